"""A worker as one of several ranks: its device, its share of the machine, its way into the group, its marks on the board.

Owns what start-up does differently where there are several. With one rank nothing here costs anything: no group, no board.
"""

from __future__ import annotations

import dataclasses

import torch

from headrace_backend.config import EngineConfig
from headrace_backend.parallel.collectives import Collectives
from headrace_backend.parallel.rendezvous import MixedRanks, Seat, join
from headrace_backend.rank_board import RankBoard, RankLine
from headrace_backend.step_plan import StepPlan
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.worker.channel import Channel
from headrace_backend.worker.errors import StartRefused
from headrace_backend.worker.rank_links import RankLinks
from headrace_backend.worker.runner import Launched, Runner
from headrace_backend.worker.sampler import SampledTokens

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class RankPlace:
    """Which rank a worker is, and what connects it with the others."""

    shard: Shard = ALONE
    # None: there are no others.
    line: RankLine | None = None

    @property
    def collectives(self) -> Collectives | None:
        """What the ranks compute together; None: there is one."""
        return self.shard.collectives

    def marked(self, runner: Runner) -> Runner:
        """The runner, with its steps on the board."""
        return runner if self.line is None else MarkedRunner(runner, self.line)


def take_place(
    config: EngineConfig, links: RankLinks | None, device: torch.device, dtype: torch.dtype, channel: Channel
) -> RankPlace:
    """Waits for all other ranks, if there are any.

    Raises:
        StartRefused: Their devices are of different kinds.
        PeerLost: One of them was lost meanwhile.
    """
    if links is None:
        assert config.tp == 1, "one of several ranks, without links to the others"
        return RankPlace()
    line = RankBoard(links.board, config.tp).line(links.rank)
    seat = Seat(links.rank, config.tp, links.store)
    try:
        kind = f"{device_kind(device)}, {dtype}"
        collectives = join(seat, device, kind, channel.send_progress, channel.check_parent, line.enter_collective)
    except MixedRanks as mixed:
        raise StartRefused(
            f"tp is {config.tp}: {mixed}; a device of which the next ones are alike works, or tp 1"
        ) from None
    return RankPlace(Shard(links.rank, config.tp, collectives), line)


def device_kind(device: torch.device) -> str:
    """What ranks' devices must have in common."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    memory_gib = round(properties.total_memory / _GIB)
    return f"{properties.name}, compute capability {properties.major}.{properties.minor}, {memory_gib} GiB"


class MarkedRunner:
    """A runner that notes each step before it computes it."""

    def __init__(self, runner: Runner, line: RankLine) -> None:
        self._runner = runner
        self._line = line

    @property
    def launched(self) -> Launched:
        """See Runner."""
        return self._runner.launched

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """See Runner."""
        self._line.begin_step(plan.step_id)
        return self._runner.forward(plan)

    def sample(self, plan: StepPlan, hidden: torch.Tensor) -> SampledTokens | None:
        """See Runner."""
        return self._runner.sample(plan, hidden)
