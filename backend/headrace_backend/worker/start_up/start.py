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

from headrace_backend.cache_groups import cache_layout
from headrace_backend.config import EngineConfig
from headrace_backend.models.build import ModelBuild
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.draft_head import DraftHead
from headrace_backend.models.load import load_model, weight_memory
from headrace_backend.pp_rules import stages, unsuitable_pp
from headrace_backend.start_rules import too_long
from headrace_backend.state_rules import unsuitable_states
from headrace_backend.step.messages import MemoryPlan, Notice, WorkerReady
from headrace_backend.tp_rules import rank_part, unsuitable_tp
from headrace_backend.weights.loader import pinned_bytes
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_backend.worker.channel import Channel, RankLinks
from headrace_backend.worker.errors import StartRefused
from headrace_backend.worker.start_up.ceilings import Rates, measured_rates
from headrace_backend.worker.start_up.device import choose_dtype, choose_rank_device, prepare_torch
from headrace_backend.worker.start_up.device_memory import CudaMemory
from headrace_backend.worker.start_up.draft_model import drafting_build
from headrace_backend.worker.start_up.fitted_runner import LoadedModel, Phases, agreed_plan, fitted_runner, ready_runner
from headrace_backend.worker.start_up.kernel_cache import hash_compiler, use_kernel_cache
from headrace_backend.worker.start_up.memory_plan import ModelMemory, Room, free_memory_bytes, plan_estimate
from headrace_backend.worker.start_up.quantized import checked_schemes, quantization_report
from headrace_backend.worker.start_up.ranks import take_place
from headrace_backend.worker.start_up.sizes import WorkerSizes, fitting_tokens_per_row
from headrace_backend.worker.start_up.warm_up import probe_steps
from headrace_backend.worker.step.loop import StepLoop
from headrace_backend.worker.step.recovery import Recovery
from headrace_backend.worker.step.runner import CapturesGraphs, Runner
from headrace_facts.process_age import process_age_s
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
    return WorkerStart(config, folder, channel, Phases(phases), links or RankLinks()).ready_loop()


class WorkerStart:
    """One worker's start: what was decided of it, phase by phase.

    The configuration is read here and nowhere later: what follows sees sizes, the room that there
    is, and the model's build.
    """

    def __init__(
        self, config: EngineConfig, folder: ModelFolder, channel: Channel, timer: Phases, links: RankLinks
    ) -> None:
        """Settles device, place among the ranks and bits. Loads nothing."""
        self._folder, self._channel, self._timer = folder, channel, timer
        max_model_len = checked_max_model_len(config, folder)
        for unsuitable in (unsuitable_states, unsuitable_tp, unsuitable_pp):
            if (reason := unsuitable(config, folder.config)) is not None:
                raise StartRefused(reason)
        stage = stages(config, folder.config)[links.rank // config.tp]
        layout, tokens_per_row = (
            cache_layout(config, folder.config, stage),
            fitting_tokens_per_row(config, folder.config),
        )
        self._sizes = WorkerSizes.of(
            config, max_model_len, stage, layout, tokens_per_row, folder.config.description.has_experts
        )
        with timer.timed("device"):
            self._device = _prepared_device(config, folder, links.rank, channel)
            self._dtype = choose_dtype(config.dtype, folder.config, self._device)
            self._memory = CudaMemory(self._device) if self._device.type == "cuda" else None
            # What a card's part in the group takes is in the plan: the libraries' own.
            free_on_card = self._memory.free() if self._memory else 0
        with timer.timed("ranks"):
            self._place = take_place(config, links, self._device, self._dtype, channel)
        free_bytes = free_on_card if self._memory else free_memory_bytes(self._device)
        device_bytes = self._memory.total() if self._memory else 0
        self._room = Room.of_rank(
            self._device, free_bytes, device_bytes, int(config.memory_budget), config.ranks_per_host
        )
        self._bits = checked_schemes(config, folder, self._device, channel)
        # None: no other model drafts, and no head.
        where = (self._dtype, self._device, self._bits, self._place.shard)
        self._draft = drafting_build(config, folder, self._sizes, *where)
        # None: seeded weights instead of the folder's.
        self._source = folder if config.load == "folder" else None
        self._seed = config.seed
        self._source_of_bits = _source_of_bits(config, folder)

    def ready_loop(self) -> StepLoop:
        """Plans, loads, warms up and says so.

        Returns:
            What takes steps from now on.
        """
        build = self._build()
        estimate, plan = self._planned(build)
        with self._timer.timed("ceilings"):
            rates = measured_rates(self._device, self._dtype)
        with self._timer.timed("weights"):
            causal_lm = self._loaded(build)
            draft = self._loaded_draft(causal_lm)
        runner, plan = self._runner(causal_lm, draft, estimate, plan)
        # What start-up made lives as long as the process; no collection needs to look at it again.
        gc.collect()
        gc.freeze()
        self._channel.send_message(self._readiness(causal_lm, plan, rates, runner))
        count_late_work = functools.partial(_count_late_work, runner)
        # Other ranks may wait in a collective for one that raised.
        linked = self._place.linked(runner, causal_lm, self._device)
        alone = self._place.collectives is None
        recovery = Recovery(linked, probe_steps(self._sizes, plan.num_blocks)) if alone else None
        reported = None if runner.speculation is None else runner.speculation.report_to(self._channel.send_drafts)
        return StepLoop(linked, self._channel, self._device.type == "cuda", count_late_work, recovery, reported)

    def _build(self) -> ModelBuild:
        folder, sizes = self._folder, self._sizes
        where = (self._dtype, self._device, self._bits, self._place.shard)
        return ModelBuild(folder.config, *where, folder.tensors, sizes.max_model_len, sizes.stage)

    def _planned(self, build: ModelBuild) -> tuple[ModelMemory, MemoryPlan]:
        """The plan before anything is allocated, sent, and the estimates behind it."""
        part = rank_part(build.description, self._sizes.num_ranks, build.shard.whole_experts)
        draft = None if self._draft is None else self._draft.memory()
        estimate, plan = plan_estimate(self._sizes, part, weight_memory(build), self._dtype, self._room, draft)
        plan = agreed_plan(plan, self._place)
        pinned = pinned_bytes(self._device) if self._source is not None else 0
        plan = msgspec.structs.replace(plan, pinned_host_bytes=pinned)
        self._channel.send_message(plan)
        return estimate, plan

    def _loaded(self, build: ModelBuild) -> CausalLM:
        """The model with its weights, of several ranks this one's part.

        Raises:
            StartRefused: Weights do not bear being quantized.
        """
        try:
            return load_model(build, self._source, self._channel.send_progress, self._seed)
        except QuantizationRefused as refused:
            raise StartRefused(f"{self._source_of_bits}: {refused}") from refused

    def _loaded_draft(self, target: CausalLM) -> CausalLM | DraftHead | None:
        """The draft model or head with its weights; None where there is none.

        Raises:
            StartRefused: Weights do not bear being quantized.
        """
        try:
            return None if self._draft is None else self._draft.loaded(target, self._channel.send_progress, self._seed)
        except QuantizationRefused as refused:
            raise StartRefused(f"draft model: {refused}") from refused

    def _runner(
        self, causal_lm: CausalLM, draft: CausalLM | DraftHead | None, estimate: ModelMemory, plan: MemoryPlan
    ) -> tuple[Runner, MemoryPlan]:
        """The runner over its cache, warm, and the plan that it follows."""
        sizes = self._sizes if causal_lm.can_be_captured else self._sizes.without_graphs()
        model = LoadedModel(causal_lm, sizes, self._dtype, self._device, self._place, draft)
        if self._memory is None:
            return ready_runner(model, plan, self._channel, self._timer), plan
        runner, final = fitted_runner(model, estimate, self._room, self._memory, self._channel, self._timer)
        final = msgspec.structs.replace(final, pinned_host_bytes=plan.pinned_host_bytes)
        self._channel.send_message(final)
        return runner, final

    def _readiness(self, causal_lm: CausalLM, plan: MemoryPlan, rates: Rates, runner: Runner) -> WorkerReady:
        """What the engine hears of a worker that is ready."""
        phases = self._timer.whole(process_age_s())
        load_gb_s = sum(record.num_bytes for record in self._folder.tensors.values()) / phases["weights"] / 1e9
        return WorkerReady(
            str(self._device),
            plan.num_blocks,
            plan.block_size,
            self._folder.parameter_count,
            phases,
            load_gb_s,
            plan,
            runner.captured_mixed_sizes if isinstance(runner, CapturesGraphs) else (),
            rates.copy_bytes_per_s,
            rates.matmul_flops_per_s,
            quantization_report(causal_lm),
            causal_lm.num_layers if self._device.type == "cpu" else 1,
            self._sizes.tokens_per_row,
            runner.drafted_graphs if isinstance(runner, CapturesGraphs) else (),
            plan.num_checkpoints,
        )


def _source_of_bits(config: EngineConfig, folder: ModelFolder) -> str:
    """Who asked for few bits: settings, or the tool that made the folder."""
    asked = {"quantize": config.quantize, "quantize_head": config.quantize_head}
    sources = [f"{name} is {value}" for name, value in asked.items() if value != "off"]
    if folder.config.quantized_by is not None or folder.gguf_file is not None:
        sources.append(f"{folder.name}: quantized by another tool")
    return ", ".join(sources)


def _count_late_work(runner: Runner) -> int:
    """Kernels compiled and graphs captured so far; a warm worker adds none."""
    return compilation_count() + (runner.num_captured if isinstance(runner, CapturesGraphs) else 0)


def checked_max_model_len(config: EngineConfig, folder: ModelFolder) -> int:
    """Longest sequence in tokens.

    Raises:
        StartRefused: It is longer than the model's context.
    """
    if (reason := too_long(config, folder.config)) is not None:
        raise StartRefused(reason)
    return config.max_model_len or folder.config.max_position_embeddings


def _prepared_device(config: EngineConfig, folder: ModelFolder, rank: int, channel: Channel) -> torch.device:
    """The device, ready for work. Tells the operator what is not as it might be."""
    device, notice = choose_rank_device(config, folder.config, rank)
    if device.type == "cpu" and config.graph_sizes not in ("auto", "off"):
        raise StartRefused(f"graph_sizes is {config.graph_sizes}; the CPU has no graphs: auto and off work")
    if device.type == "cuda":
        hash_compiler()
    prepare_torch(device, config.worker_threads, config.ranks_per_host)
    notices = [notice, use_kernel_cache(config.kernel_cache) if device.type == "cuda" else None]
    for text in filter(None, notices):
        channel.send_message(Notice(text))
    return device
