"""From a valid model folder to a worker that takes steps.

Owns the phases and their order. On a CPU: plan, weights, cache, warm-up. On a GPU what the plan could only estimate is measured in between:

    plan -> weights -> profile (the largest steps, small cache) -> cache of what is left -> warm-up -> graphs -> final plan

A plan is sent before anything is allocated, and the final one when all of it is measured. Imports torch, and so do the rooms it calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Iterator, Sequence

import msgspec
import torch

from headrace_backend.config import EngineConfig
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.registry import load_model, weight_memory
from headrace_backend.parallel.collectives import agreed_least, agreed_most, slowest_times
from headrace_backend.tp_rules import rank_part, unsuitable_tp
from headrace_backend.weights.loader import pinned_bytes
from headrace_backend.weights.scheme import QuantizationRefused, Schemes
from headrace_backend.worker.ceilings import Rates, measured_rates
from headrace_backend.worker.channel import Channel
from headrace_backend.worker.cpu_batch import CpuBatch
from headrace_backend.worker.cpu_runner import CpuRunner
from headrace_backend.worker.device import choose_dtype, choose_rank_device, prepare_torch
from headrace_backend.worker.device_memory import CudaMemory, DeviceMemory
from headrace_backend.worker.errors import DoesNotFit, StartRefused
from headrace_backend.worker.gpu_runner import GpuRunner
from headrace_backend.worker.kernel_cache import use_kernel_cache
from headrace_backend.worker.kv_caches import allocate_kv_caches, cache_bytes, kv_type
from headrace_backend.worker.launch_bound import host_share, launch_bound_sizes
from headrace_backend.worker.made_up_steps import BlockPool
from headrace_backend.worker.memory_plan import (
    ModelMemory,
    Room,
    free_memory_bytes,
    measured_memory,
    plan_estimate,
    plan_memory,
    with_long_graphs,
)
from headrace_backend.worker.profile_step import PROFILE_BLOCKS, Profile, largest_steps, measure_steps
from headrace_backend.worker.quantized import checked_schemes, quantization_report
from headrace_backend.worker.rank_links import RankLinks
from headrace_backend.worker.ranks import RankPlace, take_place
from headrace_backend.worker.runner import CapturesGraphs, Runner
from headrace_backend.worker.sampler import Sampler
from headrace_backend.worker.step_buffers import StepLimits
from headrace_backend.worker.step_loop import StepLoop
from headrace_backend.worker.step_shape import AttentionSizes, captured_shapes
from headrace_backend.worker.warm_up import warm_up
from headrace_backend.worker_messages import MemoryPlan, Notice, WorkerReady
from headrace_kernels.triton_runtime import compilation_count
from headrace_model_folder import ModelFolder

# Graphs that need more than was estimated are captured once more beside a smaller cache.
_CAPTURE_ATTEMPTS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class _Model:
    """A loaded model and what its runner and cache depend on."""

    causal_lm: CausalLM
    config: EngineConfig
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    place: RankPlace = RankPlace()

    def kv_caches(self, num_blocks: int) -> list[torch.Tensor]:
        """One cache per layer."""
        model = self.causal_lm
        shape = (num_blocks, 2, model.num_kv_heads, self.config.block_size, model.head_dim)
        dtype = kv_type(self.config.kv_dtype, self.dtype)
        return allocate_kv_caches(model.num_layers, shape, dtype, self.device)


def make_runner(
    model: CausalLM,
    config: EngineConfig,
    max_model_len: int,
    kv_caches: list[torch.Tensor],
    long_sizes: Sequence[int] = (),
) -> Runner:
    """What computes steps over a cache. Must hold its tensors by itself: a runner that is dropped gives all of them back.

    Args:
        model: The model.
        config: The engine's configuration.
        max_model_len: Longest sequence, in tokens.
        kv_caches: Per layer [num_blocks, 2, num_kv_heads, block_size, head_dim].
        long_sizes: Tokens of steps with prompts to capture beside those that always are.
    """
    num_blocks, device = kv_caches[0].shape[0], kv_caches[0].device
    sampler = Sampler(config.max_num_seqs, model.vocab_size, device)
    if device.type == "cpu":
        batch = CpuBatch(config.max_num_seqs, max_model_len, config.block_size, num_blocks)
        return CpuRunner(model, batch, sampler, kv_caches)
    limits = StepLimits(config.max_num_seqs, config.max_num_batched_tokens, max_model_len)
    sizes = AttentionSizes.of(model.num_heads, kv_caches[0], model.dtype)
    mixed_sizes = (*config.captured_mixed_sizes(), *long_sizes)
    first_piece = functools.partial(model.first_piece, is_captured=True)
    shapes = captured_shapes(config.captured_batch_sizes(), mixed_sizes, limits.max_num_seqs, sizes, first_piece)
    agreed_times = functools.partial(slowest_times, model.shard.collectives)
    return GpuRunner(model, sampler, kv_caches, limits, sizes, shapes, agreed_times)


class _Phases:
    """Seconds of each phase, in order."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Notes the seconds of what runs inside; a phase may come twice."""
        start = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


def start_worker(
    config: EngineConfig,
    folder: ModelFolder,
    channel: Channel,
    phases: dict[str, float],
    links: RankLinks | None = None,
) -> StepLoop:
    """Makes everything ready and says so.

    Args:
        config: The engine's configuration.
        folder: The model.
        channel: Takes the memory plan, progress and readiness.
        phases: Seconds per phase so far; further ones are added.
        links: To the other ranks; None: there are none.

    Raises:
        StartRefused: The configuration is at fault.
        InvalidModelFolder: The folder is.
        PeerLost: Another rank was lost.
    """
    max_model_len = checked_max_model_len(config, folder)
    if (reason := unsuitable_tp(config, folder.config)) is not None:
        raise StartRefused(reason)
    timer = _Phases(phases)
    device = _prepared_device(config, folder, links.rank if links else 0, channel)
    dtype = choose_dtype(config.dtype, folder.config, device)
    memory = CudaMemory(device) if device.type == "cuda" else None
    # What a card's part in the group takes is in the plan: the libraries' own.
    free_on_card = memory.free() if memory else 0
    with timer.timed("ranks"):
        place = take_place(config, links, device, dtype, channel)
    free_bytes = free_on_card if memory else free_memory_bytes(device)
    room = Room.of_rank(device, free_bytes, memory.total() if memory else 0, config)
    schemes = checked_schemes(config, folder, device, channel)
    about = (folder.config, dtype, schemes.layers, device, place.shard, folder.tensors, schemes.head)
    weights = weight_memory(*about)
    part = rank_part(folder.config, config.tp)
    estimate, plan = plan_estimate(config, part, weights, dtype, max_model_len, room)
    plan = _agreed(plan, place)
    plan = msgspec.structs.replace(plan, pinned_host_bytes=pinned_bytes(device) if config.load == "folder" else 0)
    channel.send_message(plan)
    with timer.timed("ceilings"):
        rates = measured_rates(device, dtype)
    with timer.timed("weights"):
        causal_lm = _loaded_model(config, folder, dtype, device, schemes, max_model_len, channel, place)
    model = _Model(causal_lm, config, max_model_len, dtype, device, place)
    if memory is None:
        runner = _ready_runner(model, plan.num_blocks, channel, timer)
    else:
        runner, final = _fitted_runner(model, estimate, room, memory, channel, timer)
        plan = msgspec.structs.replace(final, pinned_host_bytes=plan.pinned_host_bytes)
        channel.send_message(plan)
    # What start-up made lives as long as the process; no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    channel.send_message(_ready(causal_lm, folder, device, plan, rates, runner, phases))
    count_late_work = functools.partial(_count_late_work, runner)
    return StepLoop(place.marked(runner), channel, device.type == "cuda", count_late_work)


def _ready(
    causal_lm: CausalLM,
    folder: ModelFolder,
    device: torch.device,
    plan: MemoryPlan,
    rates: Rates,
    runner: Runner,
    phases: dict[str, float],
) -> WorkerReady:
    """What the engine hears of a worker that is ready."""
    load_gb_s = sum(record.num_bytes for record in folder.tensors.values()) / phases["weights"] / 1e9
    return WorkerReady(
        str(device),
        plan.num_blocks,
        plan.block_size,
        folder.parameter_count,
        phases,
        load_gb_s,
        plan,
        runner.captured_mixed_sizes if isinstance(runner, CapturesGraphs) else (),
        rates.copy_bytes_per_s,
        rates.matmul_flops_per_s,
        quantization_report(causal_lm),
    )


def _agreed(plan: MemoryPlan, place: RankPlace) -> MemoryPlan:
    """The plan with the number of blocks that every rank has room for, so that all do the same with them."""
    num_blocks = agreed_least(place.collectives, plan.num_blocks)
    return msgspec.structs.replace(plan, num_blocks=num_blocks, kv_cache_bytes=num_blocks * plan.kv_block_bytes)


def _loaded_model(
    config: EngineConfig,
    folder: ModelFolder,
    dtype: torch.dtype,
    device: torch.device,
    schemes: Schemes,
    max_model_len: int,
    channel: Channel,
    place: RankPlace,
) -> CausalLM:
    """The model with its weights, of several ranks this one's part.

    Raises:
        StartRefused: Weights do not bear being quantized.
    """
    source = folder if config.load == "folder" else None
    try:
        about = (dtype, device, config.load, config.seed, channel.send_progress, max_model_len)
        return load_model(source, folder.config, *about, schemes.layers, place.shard, schemes.head)
    except QuantizationRefused as refused:
        raise StartRefused(f"{_source_of_bits(config, folder)}: {refused}") from refused


def _source_of_bits(config: EngineConfig, folder: ModelFolder) -> str:
    """Whose wish few bits are."""
    asked = {"quantize": config.quantize, "quantize_head": config.quantize_head}
    wishes = [f"{name} is {value}" for name, value in asked.items() if value != "off"]
    if folder.config.quantized_by is not None or folder.gguf_file is not None:
        wishes.append(f"{folder.name}: quantized by another tool")
    return ", ".join(wishes)


def _count_late_work(runner: Runner) -> int:
    """Kernels compiled and graphs captured so far; a warm worker adds none."""
    return compilation_count() + (runner.num_captured if isinstance(runner, CapturesGraphs) else 0)


def checked_max_model_len(config: EngineConfig, folder: ModelFolder) -> int:
    """Longest sequence in tokens.

    Raises:
        StartRefused: It is longer than the model's context.
    """
    context = folder.config.max_position_embeddings
    if config.max_model_len > context:
        raise StartRefused(f"max_model_len is {config.max_model_len}; the model's context has {context} tokens")
    return config.max_model_len or context


def _prepared_device(config: EngineConfig, folder: ModelFolder, rank: int, channel: Channel) -> torch.device:
    """The device, ready for work. Tells the operator what is not as it might be."""
    device, notice = choose_rank_device(config, folder.config, rank)
    if device.type == "cpu" and config.graph_sizes not in ("auto", "off"):
        raise StartRefused(f"graph_sizes is {config.graph_sizes}; the CPU has no graphs: auto and off work")
    prepare_torch(config, device)
    notices = [notice, use_kernel_cache(config.kernel_cache) if device.type == "cuda" else None]
    for text in filter(None, notices):
        channel.send_message(Notice(text))
    return device


def _ready_runner(
    model: _Model, num_blocks: int, channel: Channel, timer: _Phases, long_sizes: Sequence[int] = ()
) -> Runner:
    """A runner over a cache of that many blocks, warm."""
    with timer.timed("cache"):
        channel.send_progress("cache", 0, num_blocks, "blocks")
        kv_caches = model.kv_caches(num_blocks)
        runner = make_runner(model.causal_lm, model.config, model.max_model_len, kv_caches, long_sizes)
        channel.send_progress("cache", num_blocks, num_blocks, "blocks")
    with timer.timed("warm_up"):
        warm_up(runner, model.causal_lm, kv_caches, model.config, model.max_model_len, channel.send_progress)
    return runner


def _fitted_runner(
    model: _Model, estimate: ModelMemory, room: Room, memory: DeviceMemory, channel: Channel, timer: _Phases
) -> tuple[Runner, MemoryPlan]:
    """A runner whose cache takes what weights, measured activations and graphs leave; and the final plan.

    Raises:
        DoesNotFit: What was measured leaves too little.
    """
    with timer.timed("profile"):
        profile, long_sizes = _profiled(model, memory, channel)
        needed = with_long_graphs(measured_memory(estimate, profile, room), model.config, long_sizes)
    collectives = model.place.collectives
    # Cards of one kind may differ in memory by less than their kind tells; all ranks capture again, or none.
    tolerance = agreed_least(collectives, room.reserve_bytes) // 2
    for attempt in range(1, _CAPTURE_ATTEMPTS + 1):
        plan = _agreed(plan_memory(model.config, needed, model.max_model_len, room), model.place)
        runner = _ready_runner(model, plan.num_blocks, channel, timer, long_sizes)
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


def _profiled(model: _Model, memory: DeviceMemory, channel: Channel) -> tuple[Profile, tuple[int, ...]]:
    """What the largest steps need, and which of the long ones are worth a graph."""
    long_sizes: list[int] = []

    def small_runner() -> tuple[Runner, int]:
        kv_caches = model.kv_caches(PROFILE_BLOCKS)
        runner = make_runner(model.causal_lm, model.config, model.max_model_len, kv_caches)
        return runner, cache_bytes(kv_caches)

    pool = BlockPool(PROFILE_BLOCKS, model.config.block_size)
    steps = list(largest_steps(model.config, model.max_model_len, pool))

    def look(runner: Runner) -> None:
        long_sizes.extend(_launch_bound(model, runner, pool))

    def on_step(done: int) -> None:
        channel.send_progress("profile", done, len(steps), "steps")

    return measure_steps(memory, small_runner, steps, on_step, look), tuple(long_sizes)


def _launch_bound(model: _Model, runner: Runner, pool: BlockPool) -> tuple[int, ...]:
    """Tokens of the long steps that are worth a graph, by the rank whose host is the slowest."""
    config, most = model.config, model.config.max_num_seqs * model.max_model_len
    wait = functools.partial(torch.cuda.synchronize, model.device)

    def share(num_tokens: int) -> float:
        own = host_share(runner, num_tokens, model.max_model_len, pool, wait)
        return slowest_times(model.place.collectives, [own])[0]

    sizes = [size for size in config.long_graph_sizes() if size <= most]
    return launch_bound_sizes(sizes, config.tp, share)


def _capture(runner: Runner, memory: DeviceMemory, channel: Channel) -> int:
    """Captures the runner's graphs, if it has any; bytes of the device that they take."""
    if not isinstance(runner, CapturesGraphs):
        return 0
    memory.release()
    before = memory.free()
    runner.capture(channel.send_progress)
    memory.release()
    return max(before - memory.free(), 0)
