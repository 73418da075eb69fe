"""A worker as a rank: its device, share of the machine, way into the group, marks on the board.

Owns what start-up does differently where there are several ranks, and what a worker reports of its
progress.
"""

from __future__ import annotations

import dataclasses

import torch

from headrace_backend.config import EngineConfig
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.parallel.collectives import Collectives
from headrace_backend.parallel.rendezvous import Greeting, MixedRanks, Seat, StageSeat, join, join_stages
from headrace_backend.step.masks import StepMasks
from headrace_backend.step.messages import Notice
from headrace_backend.step.plan import StepPlan
from headrace_backend.step.rank_board import RankBoard, RankLine
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.worker.channel import Channel, RankLinks
from headrace_backend.worker.errors import StartRefused
from headrace_backend.worker.sampling.sampler import SampledTokens
from headrace_backend.worker.step.runner import Launched, Runner, StepRunner
from headrace_backend.worker.step.stage_runner import StageRunner

_GIB = 1 << 30
_SPLIT_STAGE = (
    "the ranks of a pipeline stage are on several hosts: their all-reduces are NCCL's over the network; with pp a "
    "multiple of hosts they stay within a host, on cards that reach each other's memory"
)


@dataclasses.dataclass(frozen=True, slots=True)
class RankPlace:
    """Which rank a worker is, and what connects it with the others."""

    shard: Shard = ALONE
    # None: nobody looks.
    line: RankLine | None = None
    # Among the ranks of several pipeline stages; None: all ranks are of one.
    stage_seat: StageSeat | None = None

    @property
    def collectives(self) -> Collectives | None:
        """What all ranks agree by, those of other stages too; None: there is one."""
        return self.shard.collectives if self.stage_seat is None else self.stage_seat.everyone

    def linked(self, runner: Runner, model: CausalLM, device: torch.device) -> StepRunner:
        """The runner between the stages before and behind, if there are any, with its marks.

        Its steps are on the board, and on a CPU the model's layers.
        """
        linked: StepRunner = runner
        if self.stage_seat is not None:
            like = torch.empty(0, dtype=model.dtype, device=device)
            linked = StageRunner(runner, self.stage_seat.links, model.hidden_size, like)
        if self.line is None:
            return linked
        if device.type == "cpu":
            model.report_progress(self.line.make_progress)
        return MarkedRunner(linked, self.line)


def take_place(
    config: EngineConfig, links: RankLinks | None, device: torch.device, dtype: torch.dtype, channel: Channel
) -> RankPlace:
    """Waits for all other ranks, if there are any.

    Args:
        config: The engine's configuration: how many ranks share the layers of how many stages.
        links: Which rank this is; None: the only one, and nobody looks at its progress.
        device: Device on which this rank computes.
        dtype: Activations' type.
        channel: Takes the progress of the waiting.

    Raises:
        StartRefused: Their devices are of different kinds.
        PeerLost: One of them was lost meanwhile.
    """
    line = _own_line(config.num_ranks, links)
    if links is None or line is None or (links.store is None and links.meeting is None):
        assert config.num_ranks == 1, "one of several ranks, without links to the others"
        return RankPlace(line=line)
    seat = Seat(links.rank, config.num_ranks, links.store, links.meeting, config.ranks_per_host)
    if links.rank == 0 and device.type == "cuda" and config.tp > config.ranks_per_host:
        channel.send_message(Notice(_SPLIT_STAGE))
    kind = f"{device_kind(device)}, {dtype}"
    greeting = Greeting(kind, channel.send_progress, channel.check_parent, line.enter_collective)
    rank = links.rank % config.tp
    try:
        if config.pp == 1:
            return RankPlace(Shard(rank, config.tp, join(seat, device, greeting), config.expert_parallel), line)
        stage_seat = join_stages(seat, config.pp, device, greeting)
    except MixedRanks as mixed:
        asked = f"tp is {config.tp}" + (f" and pp is {config.pp}" if config.pp > 1 else "")
        alone = "tp 1" if config.pp == 1 else "tp 1 with pp 1"
        raise StartRefused(f"{asked}: {mixed}; a device of which the next ones are alike works, or {alone}") from None
    return RankPlace(Shard(rank, config.tp, stage_seat.stage, config.expert_parallel), line, stage_seat)


def _own_line(num_ranks: int, links: RankLinks | None) -> RankLine | None:
    if links is None or links.board is None:
        return None
    return RankBoard(links.board, num_ranks).line(links.rank)


def device_kind(device: torch.device) -> str:
    """What ranks' devices must have in common."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    memory_gib = round(properties.total_memory / _GIB)
    return f"{properties.name}, compute capability {properties.major}.{properties.minor}, {memory_gib} GiB"


class MarkedRunner:
    """A runner that marks each step on the board before and after it computes the step.

    On a GPU the second mark follows the launch.
    """

    def __init__(self, runner: StepRunner, line: RankLine) -> None:
        self._runner = runner
        self._line = line

    @property
    def launched(self) -> Launched:
        """Implements `Runner.launched`."""
        return self._runner.launched

    @property
    def draws(self) -> bool:
        """Implements `StepRunner.draws`."""
        return self._runner.draws

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Implements `Runner.forward`."""
        self._line.begin_step(plan.step_id)
        hidden = self._runner.forward(plan)
        self._line.make_progress()
        return hidden

    def sample(self, plan: StepPlan, hidden: torch.Tensor, masks: StepMasks | None = None) -> SampledTokens | None:
        """Implements `Runner.sample`."""
        return self._runner.sample(plan, hidden, masks)

    def reset(self) -> None:
        """Implements `Runner.reset`."""
        self._runner.reset()
