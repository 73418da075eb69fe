"""From a valid model folder to a worker that takes steps.

Owns the phases and their order: plan, weights, and then the runner (`fitted_runner`). A plan is
sent before anything is allocated, and the final one when all of it is measured. Imports torch, and
so do the rooms it calls.
"""

from __future__ import annotations

import functools
import gc

import msgspec
import torch

from headrace_backend.config import EngineConfig
from headrace_backend.models.build import ModelBuild
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.load import load_model, weight_memory
from headrace_backend.step.messages import MemoryPlan, Notice, WorkerReady
from headrace_backend.tp_rules import rank_part, unsuitable_tp
from headrace_backend.weights.loader import pinned_bytes
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_backend.worker.channel import Channel, RankLinks
from headrace_backend.worker.errors import StartRefused
from headrace_backend.worker.start_up.ceilings import Rates, measured_rates
from headrace_backend.worker.start_up.device import choose_dtype, choose_rank_device, prepare_torch
from headrace_backend.worker.start_up.device_memory import CudaMemory
from headrace_backend.worker.start_up.fitted_runner import LoadedModel, Phases, agreed_plan, fitted_runner, ready_runner
from headrace_backend.worker.start_up.kernel_cache import use_kernel_cache
from headrace_backend.worker.start_up.memory_plan import Room, free_memory_bytes, plan_estimate
from headrace_backend.worker.start_up.quantized import checked_schemes, quantization_report
from headrace_backend.worker.start_up.ranks import take_place
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.start_up.warm_up import probe_steps
from headrace_backend.worker.step.loop import StepLoop
from headrace_backend.worker.step.recovery import Recovery
from headrace_backend.worker.step.runner import CapturesGraphs, Runner
from headrace_kernels.triton_runtime import compilation_count
from headrace_model_folder import ModelFolder


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
        links: Which rank it is; None: the only one, and nobody looks at its progress.

    Raises:
        StartRefused: The configuration is at fault.
        InvalidModelFolder: The folder is.
        PeerLost: Another rank was lost.
    """
    sizes = WorkerSizes.of(config, checked_max_model_len(config, folder))
    if (reason := unsuitable_tp(config, folder.config)) is not None:
        raise StartRefused(reason)
    timer = Phases(phases)
    device = _prepared_device(config, folder, links.rank if links else 0, channel)
    dtype = choose_dtype(config.dtype, folder.config, device)
    memory = CudaMemory(device) if device.type == "cuda" else None
    # What a card's part in the group takes is in the plan: the libraries' own.
    free_on_card = memory.free() if memory else 0
    with timer.timed("ranks"):
        place = take_place(config.tp, links, device, dtype, channel)
    free_bytes = free_on_card if memory else free_memory_bytes(device)
    room = Room.of_rank(device, free_bytes, memory.total() if memory else 0, int(config.memory_budget), config.tp)
    schemes = checked_schemes(config, folder, device, channel)
    build = ModelBuild(folder.config, dtype, device, schemes, place.shard, folder.tensors, sizes.max_model_len)
    weights = weight_memory(build)
    part = rank_part(folder.config.description, config.tp)
    estimate, plan = plan_estimate(sizes, part, weights, dtype, room)
    plan = agreed_plan(plan, place)
    plan = msgspec.structs.replace(plan, pinned_host_bytes=pinned_bytes(device) if config.load == "folder" else 0)
    channel.send_message(plan)
    with timer.timed("ceilings"):
        rates = measured_rates(device, dtype)
    with timer.timed("weights"):
        causal_lm = _loaded_model(config, folder, build, channel)
    model = LoadedModel(causal_lm, sizes, dtype, device, place)
    if memory is None:
        runner = ready_runner(model, plan.num_blocks, channel, timer)
    else:
        runner, final = fitted_runner(model, estimate, room, memory, channel, timer)
        plan = msgspec.structs.replace(final, pinned_host_bytes=plan.pinned_host_bytes)
        channel.send_message(plan)
    # What start-up made lives as long as the process; no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    channel.send_message(_ready(causal_lm, folder, device, plan, rates, runner, phases))
    count_late_work = functools.partial(_count_late_work, runner)
    # Other ranks may wait in a collective for one that raised.
    marked = place.marked(runner, causal_lm, device)
    recovery = Recovery(marked, probe_steps(sizes, plan.num_blocks)) if config.tp == 1 else None
    return StepLoop(marked, channel, device.type == "cuda", count_late_work, recovery)


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
        causal_lm.num_layers if device.type == "cpu" else 1,
    )


def _loaded_model(config: EngineConfig, folder: ModelFolder, build: ModelBuild, channel: Channel) -> CausalLM:
    """The model with its weights, of several ranks this one's part.

    Raises:
        StartRefused: Weights do not bear being quantized.
    """
    source = folder if config.load == "folder" else None
    try:
        return load_model(build, source, channel.send_progress, config.seed)
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
    prepare_torch(device, config.worker_threads, config.tp)
    notices = [notice, use_kernel_cache(config.kernel_cache) if device.type == "cuda" else None]
    for text in filter(None, notices):
        channel.send_message(Notice(text))
    return device
