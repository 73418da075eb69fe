"""The ranks that one host has in one life of the workers: a plan ring and a process for each.

Owns the ring, the processes, and how both end. A backend has its own host's ranks by it
(`worker_group`), and so does the agent of another host (`rank_agent`). What a rank's records and
its end mean is theirs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Callable, Sequence

from headrace_backend.config import EngineConfig
from headrace_backend.server.workers.early_workers import EarlyWorkers
from headrace_backend.server.workers.worker_process import (
    DEFAULT_WORKER_COMMAND,
    RankDescriptors,
    Record,
    WorkerProcess,
)
from headrace_backend.step.masks import max_masks_bytes
from headrace_backend.step.plan import MAX_PROMPT_LOGPROBS
from headrace_backend.step.plan_bytes import max_plan_bytes
from headrace_backend.step.ring import RingWriter, create_ring
from headrace_request import limits

_MIB = 1 << 20
# What a record takes beside its payload, at most.
_RECORD_BYTES = 16


class RankNotStarted(Exception):  # what happened, not a mistake of ours
    """The process of a rank could not be started; those before it run."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """The configuration and command line with which workers are started."""

    config: EngineConfig
    # Longest sequence in tokens: bounds the block tables and histories in a plan.
    max_model_len: int
    command: tuple[str, ...] = DEFAULT_WORKER_COMMAND
    # Whether start-up is shown as bars on stderr, which then must be a terminal.
    shows_bars: bool = False
    # Tokens of the vocabulary: bounds the masks of rows with grammars. 0: there are none.
    vocab_size: int = 0
    # Cache groups of the model: rows have a block table in each.
    num_cache_groups: int = 1
    # Workers of the command that were started already; the first life of the ranks takes them.
    early_workers: EarlyWorkers = dataclasses.field(default_factory=EarlyWorkers)

    @property
    def world_size(self) -> int:
        """Number of ranks of all pipeline stages; each is a process."""
        return self.config.num_ranks


def plan_ring_bytes(launch: WorkerLaunch) -> int:
    """Space for two of the largest plans (`plan_bytes`) and for two steps' masks.

    A ring that was read whole thus takes any plan at once.
    """
    masks_bytes = max_masks_bytes(_max_masked_draws(launch.config), launch.vocab_size)
    plan_bytes = max_plan_bytes(launch.config, launch.max_model_len, launch.num_cache_groups)
    return 2 * (plan_bytes + masks_bytes + 2 * _RECORD_BYTES)


def _max_masked_draws(config: EngineConfig) -> int:
    """Most draws of a step that have masks: one for each row, and one behind each draft."""
    num_drafts = min(config.max_num_seqs * (config.tokens_per_row - 1), config.max_num_batched_tokens)
    return config.max_num_seqs + num_drafts


def result_ring_bytes(config: EngineConfig) -> int:
    """Space for two of the largest results, and for messages."""
    num_tokens = config.max_num_seqs + min(config.max_num_batched_tokens, MAX_PROMPT_LOGPROBS)
    return 2 * num_tokens * (32 + 8 * limits.MAX_ROW_LOGPROBS) + _MIB


class HostRanks:
    """This host's ranks of one life, from their ring to their last process's end."""

    def __init__(self, launch: WorkerLaunch, ring_bytes: int, on_records: Callable[[int, list[Record]], None]) -> None:
        """Has no process yet.

        Args:
            launch: How workers are started.
            ring_bytes: Space of the plan ring, `plan_ring_bytes`.
            on_records: Called with a rank and what it has written, in order.

        Raises:
            OSError: There are no descriptors or no memory for the ring.
        """
        self._launch = launch
        self._on_records = on_records
        self._ring = create_ring(ring_bytes, num_readers=launch.config.ranks_per_host)
        try:
            self.plans = RingWriter(self._ring)
        except OSError:
            self._ring.close()
            raise
        # By rank, from the host's first one on.
        self.workers: list[WorkerProcess] = []

    def spawn(self, ranks: RankDescriptors) -> None:
        """Starts a process for each rank; may be called once.

        Raises:
            RankNotStarted: One could not be started.
        """
        config = self._launch.config
        config_json = config.model_dump_json()
        try:
            for rank in range(ranks.first_rank, ranks.first_rank + config.ranks_per_host):
                self.workers.append(self._started(rank, config_json, ranks))
        finally:
            self._ring.close()
            self._launch.early_workers.close()

    def _started(self, rank: int, config_json: str, ranks: RankDescriptors) -> WorkerProcess:
        config = self._launch.config
        try:
            return WorkerProcess(
                rank,
                rank == config.reporting_rank,
                self._launch.command,
                config_json,
                self._ring,
                result_ring_bytes(config),
                self._on_records,
                ranks,
                self._launch.early_workers,
            )
        except OSError as error:
            raise RankNotStarted(f"worker {rank} could not be started: {error.strerror}") from error

    @property
    def pids(self) -> Sequence[int]:
        """Process ids by rank."""
        return [worker.pid for worker in self.workers]

    def dump_stacks(self) -> None:
        """Has every live worker write its stacks to stderr, also a worker that was stopped.

        Workers register faulthandler for SIGUSR1.
        """
        for worker in self.workers:
            worker.send_signal(signal.SIGUSR1)
            worker.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Sends SIGKILL to the workers that still run."""
        for worker in self.workers:
            worker.send_signal(signal.SIGKILL)

    async def wait_exited(self, timeout_s: float) -> None:
        """Waits until all processes have ended, or the time is over."""
        if self.workers:
            await asyncio.wait([worker.exited for worker in self.workers], timeout=timeout_s)

    def close(self) -> list[WorkerProcess]:
        """Gives descriptors back. Returns the workers that do not die, which the kernel has now."""
        for worker in self.workers:
            worker.close()
        self.plans.close()
        return [worker for worker in self.workers if not worker.exited.done()]
