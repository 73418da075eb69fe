"""A runner over a cache of the right size, warm and with its graphs.

Owns that part of start-up, and the clock of all of its phases. On a CPU the cache has the blocks of
the plan. On a GPU what the plan could only estimate is measured first:

    profile (the largest steps, small cache) -> cache of what is left -> warm-up -> graphs -> final
    plan
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence

import msgspec
import torch

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.draft_head import DraftHead
from headrace_backend.parallel.collectives import agreed_least, agreed_most, slowest_times
from headrace_backend.step.messages import MemoryPlan
from headrace_backend.worker.channel import Channel
from headrace_backend.worker.errors import DoesNotFit
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.start_up.device_memory import DeviceMemory
from headrace_backend.worker.start_up.drafters import cpu_speculation, drafting_model, gpu_speculation
from headrace_backend.worker.start_up.launch_bound import host_share, launch_bound_sizes
from headrace_backend.worker.start_up.memory_plan import (
    ModelMemory,
    Room,
    measured_memory,
    plan_memory,
    with_long_graphs,
)
from headrace_backend.worker.start_up.profile_step import (
    PROFILE_BLOCKS,
    Profile,
    deepest_steps,
    largest_steps,
    measure_steps,
)
from headrace_backend.worker.start_up.ranks import RankPlace
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.start_up.synthetic_steps import BlockPool
from headrace_backend.worker.start_up.warm_up import warm_up
from headrace_backend.worker.step.buffers import DeviceRows, StepLimits
from headrace_backend.worker.step.cpu_runner import CpuBatch, CpuRunner
from headrace_backend.worker.step.drafting_model import DraftingModel
from headrace_backend.worker.step.gpu_runner import GpuRunner
from headrace_backend.worker.step.kv_caches import allocate_layer_caches, cache_bytes, kv_type
from headrace_backend.worker.step.row_states import allocate_row_states, block_caches, one_of_each
from headrace_backend.worker.step.runner import CapturesGraphs, Runner, run_steps
from headrace_backend.worker.step.shape import AttentionSizes, captured_shapes


class Phases:
    """Seconds of each phase, in order."""

    def __init__(self, seconds: dict[str, float]) -> None:
        """Takes those of phases before, and adds to them."""
        self.seconds = seconds

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Notes the seconds of what runs inside; a phase may come twice."""
        start = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def whole(self, age_s: float) -> dict[str, float]:
        """The phases, and under "other" what a process of such an age has spent between them."""
        return self.seconds | {"other": max(age_s - sum(self.seconds.values()), 0.0)}


# Graphs that need more than was estimated are captured once more beside a smaller cache.
_CAPTURE_ATTEMPTS = 2
# What must be left of the cache beside graphs of steps of more tokens than these.
_LEAST_CACHE_SHARE, _LONGEST_AT_ANY_COST = 0.98, 3072
# Checkpoints that a pipeline stage without recurrent layers has room for.
_ANY_NUMBER = 1 << 31


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model and what its runner and cache depend on."""

    causal_lm: CausalLM
    sizes: WorkerSizes
    dtype: torch.dtype
    device: torch.device
    place: RankPlace = RankPlace()
    # A small model or a head that drafts; None: there is none.
    draft: CausalLM | DraftHead | None = None

    def kv_caches(self, num_blocks: int, num_checkpoints: int = 0) -> list[torch.Tensor]:
        """The cache of each layer, of recurrent ones their rows' states and kept ones.

        Layers of different cache groups may have the same.
        """
        model, sizes = self.causal_lm, self.sizes
        dtype = kv_type(sizes.kv_dtype, self.dtype)
        caches = allocate_layer_caches(model.kv_heads, sizes.cache, num_blocks, sizes.block_size, dtype, self.device)
        sources = iter(model.kv_sources)
        return [
            allocate_row_states(sizes.max_num_seqs, num_elements, self.device, num_checkpoints)
            if num_elements
            else caches[next(sources)]
            for num_elements in model.state_elements(sizes.num_drafts)
        ]

    def drafting_model(self, num_blocks: int) -> DraftingModel | None:
        """What drafts, over caches of as many blocks as the model's."""
        if self.draft is None:
            return None
        return drafting_model(self.draft, num_blocks, self.sizes, self.device)


def make_runner(
    model: CausalLM,
    sizes: WorkerSizes,
    kv_caches: list[torch.Tensor],
    long_sizes: Sequence[int] = (),
    draft: DraftingModel | None = None,
) -> Runner:
    """What computes steps over a cache.

    Must hold its tensors by itself: a runner that is dropped gives all of them back.

    Args:
        model: The model.
        sizes: Sizes of the model's steps.
        kv_caches: Per layer [num_blocks, 2, num_kv_heads, block_size, head_dim], as the sizes say
            which layers share one. Of recurrent layers their rows' states.
        long_sizes: Tokens of steps with prompts to capture beside those that always are: of those
            that the sizes name, and of full steps.
        draft: A small model or a head that drafts, over caches of as many blocks; None: there is
            none.
    """
    blocks = block_caches(kv_caches)[0]
    num_blocks, device = blocks.shape[0], blocks.device
    sampler = Sampler(sizes.max_num_seqs, model.vocab_size, device)
    model.use_cache_groups(sizes.cache.layer_groups)
    if device.type == "cpu":
        batch = CpuBatch(sizes.max_num_seqs, sizes.max_model_len, sizes.block_size, num_blocks, sizes.num_groups)
        speculation = cpu_speculation(model, sizes, sampler, batch, draft)
        return CpuRunner(model, batch, sampler, kv_caches, speculation)
    limits = StepLimits(
        sizes.max_num_seqs,
        sizes.max_num_batched_tokens,
        sizes.max_model_len,
        model.attention_window,
        sizes.tokens_per_row,
        sizes.num_groups,
    )
    attention = AttentionSizes.of_layers(
        model.num_heads, one_of_each(kv_caches), model.dtype, sizes.tokens_per_row, model.norms_heads
    )
    full_sizes = set(long_sizes).difference(sizes.long_graphs)
    mixed_sizes = {*sizes.mixed_graphs, *long_sizes} - full_sizes
    first_piece = functools.partial(model.first_piece, is_captured=True)
    shapes = captured_shapes(sizes.batch_graphs, mixed_sizes, limits.max_num_seqs, attention, first_piece, full_sizes)
    shapes = [shape for shape in shapes if shape.num_tokens <= limits.max_num_batched_tokens]
    agreed_times = functools.partial(slowest_times, model.shard.collectives)
    max_blocks = -(-sizes.max_model_len // sizes.block_size)
    rows = DeviceRows(sizes.max_num_seqs, max_blocks, num_blocks, device, sizes.num_groups)
    speculation = gpu_speculation(model, sizes, sampler, rows, draft)
    return GpuRunner(model, sampler, kv_caches, limits, attention, shapes, agreed_times, speculation, rows)


def agreed_plan(plan: MemoryPlan, place: RankPlace) -> MemoryPlan:
    """The plan with the blocks and checkpoints that every rank has room for, so that all agree."""
    num_blocks = agreed_least(place.collectives, plan.num_blocks)
    plan = msgspec.structs.replace(plan, num_blocks=num_blocks, kv_cache_bytes=num_blocks * plan.kv_block_bytes)
    # All ranks ask, whether or not their stage has recurrent layers.
    num_checkpoints = agreed_least(place.collectives, plan.num_checkpoints if plan.state_bytes else _ANY_NUMBER)
    if num_checkpoints == _ANY_NUMBER:
        return plan
    one = plan.checkpoint_bytes // max(plan.num_checkpoints, 1)
    return msgspec.structs.replace(plan, num_checkpoints=num_checkpoints, checkpoint_bytes=num_checkpoints * one)


def ready_runner(
    model: LoadedModel, plan: MemoryPlan, channel: Channel, timer: Phases, long_sizes: Sequence[int] = ()
) -> Runner:
    """A runner over a cache of the plan's blocks and checkpoints, warm."""
    num_blocks = plan.num_blocks
    with timer.timed("cache"):
        channel.send_progress("cache", 0, num_blocks, "blocks")
        kv_caches = model.kv_caches(num_blocks, plan.num_checkpoints)
        draft = model.drafting_model(num_blocks)
        runner = make_runner(model.causal_lm, model.sizes, kv_caches, long_sizes, draft)
        channel.send_progress("cache", num_blocks, num_blocks, "blocks")
    with timer.timed("warm_up"):
        caches = kv_caches if draft is None else [*kv_caches, *draft.kv_caches]
        warm_up(runner, model.causal_lm, caches, model.sizes, channel.send_progress)
    return runner


def fitted_runner(
    model: LoadedModel, estimate: ModelMemory, room: Room, memory: DeviceMemory, channel: Channel, timer: Phases
) -> tuple[Runner, MemoryPlan]:
    """Returns a runner whose cache takes what weights, steps and graphs leave, and its plan.

    Raises:
        DoesNotFit: What was measured leaves too little.
    """
    with timer.timed("profile"):
        profile, worthwhile = _profiled(model, memory, channel)
        needed, long_sizes = _with_room(model, measured_memory(estimate, profile, room), worthwhile, room)
    collectives = model.place.collectives
    # Cards of one kind may differ in memory by less than their kind tells; all ranks capture again,
    # or none.
    tolerance = agreed_least(collectives, room.reserve_bytes) // 2
    for attempt in range(1, _CAPTURE_ATTEMPTS + 1):
        plan = agreed_plan(plan_memory(model.sizes, needed, room), model.place)
        runner = ready_runner(model, plan, channel, timer, long_sizes)
        with timer.timed("graphs"):
            graph_bytes = agreed_most(collectives, _capture(runner, memory, channel))
        if graph_bytes <= needed.graphs + tolerance:
            return runner, msgspec.structs.replace(plan, graph_bytes=graph_bytes)
        if attempt < _CAPTURE_ATTEMPTS:
            # The next attempt needs their memory.
            del runner
            memory.release()
            needed = dataclasses.replace(needed, graphs=graph_bytes)
    raise DoesNotFit(f"graphs take {graph_bytes} bytes, and took less before; graph_sizes off works")


def _with_room(
    model: LoadedModel, memory: ModelMemory, long_sizes: tuple[int, ...], room: Room
) -> tuple[ModelMemory, tuple[int, ...]]:
    """Returns the memory needed with graphs of the long steps, and the long sizes that have room.

    Where any rank has no room for them there are none: nobody should be refused for what only makes
    steps shorter. The longest have graphs only if that leaves nearly all of the cache.
    """
    whole = _cache_bytes(model, memory, room)
    shorter = tuple(size for size in long_sizes if size <= _LONGEST_AT_ANY_COST)
    # Where these are all, the two are the same one.
    for tried, least_share in {long_sizes: _LEAST_CACHE_SHARE, shorter: 0.0}.items():
        larger = with_long_graphs(memory, model.sizes, tried)
        has_room = _cache_bytes(model, larger, room) > least_share * whole
        if tried and agreed_least(model.place.collectives, has_room):
            return larger, tried
    return memory, ()


def _cache_bytes(model: LoadedModel, memory: ModelMemory, room: Room) -> int:
    """Bytes that are left for the cache; 0 if what is left is too little."""
    try:
        return plan_memory(model.sizes, memory, room).kv_cache_bytes
    except DoesNotFit:
        return 0


def _profiled(model: LoadedModel, memory: DeviceMemory, channel: Channel) -> tuple[Profile, tuple[int, ...]]:
    """What the largest steps need, and which of the long ones are worth a graph."""
    long_sizes: list[int] = []

    def small_runner() -> tuple[Runner, int]:
        kv_caches = model.kv_caches(PROFILE_BLOCKS)
        draft = model.drafting_model(PROFILE_BLOCKS)
        runner = make_runner(model.causal_lm, model.sizes, kv_caches, draft=draft)
        return runner, cache_bytes(kv_caches) + (draft.cache_bytes if draft is not None else 0)

    pool = BlockPool(PROFILE_BLOCKS, model.sizes.block_size)
    steps, deepest = list(largest_steps(model.sizes, pool)), list(deepest_steps(model.sizes, pool))

    def on_step(done: int) -> None:
        channel.send_progress("profile", done, len(steps) + len(deepest), "steps")

    def look(runner: Runner) -> None:
        # Layers of a kind need the same memory one after the other, and 8,192 tokens behind 123,000
        # take each of an 8B Llama's some 35 ms of an H200 (1.7e13 operations).
        with model.causal_lm.representative_layers():
            run_steps(runner, deepest, lambda done: on_step(len(steps) + done))
        long_sizes.extend(_launch_bound(model, runner, pool))

    return measure_steps(memory, small_runner, steps, on_step, look), tuple(long_sizes)


def _launch_bound(model: LoadedModel, runner: Runner, pool: BlockPool) -> tuple[int, ...]:
    """Tokens of the long steps that are worth a graph, by the rank whose host is the slowest."""
    sizes = model.sizes
    most = sizes.max_num_seqs * sizes.max_model_len
    wait = functools.partial(torch.cuda.synchronize, model.device)

    def share(num_tokens: int) -> float:
        own = host_share(runner, num_tokens, sizes.max_model_len, model.causal_lm.vocab_size, pool, wait)
        return slowest_times(model.place.collectives, [own])[0]

    tried = [size for size in sizes.long_graphs if size <= most]
    full_size = sizes.max_num_batched_tokens
    return launch_bound_sizes(tried, sizes.num_ranks, share, full_size if full_size <= most else 0)


def _capture(runner: Runner, memory: DeviceMemory, channel: Channel) -> int:
    """Captures the runner's graphs, if it has any; bytes of the device that they take."""
    if not isinstance(runner, CapturesGraphs):
        return 0
    memory.release()
    before = memory.free()
    runner.capture(channel.send_progress)
    memory.release()
    return max(before - memory.free(), 0)
