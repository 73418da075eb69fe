"""One step on a GPU: its kernels, their share of the time, and the gaps between them.

The worker's own rooms in this process, without an engine: a model with dummy weights, its runner
with graphs, and steps of one kind after the other, as the step loop launches them. What CUPTI says
of the device is added up per kernel. The profiler itself stretches gaps a little; the step's time
without it is measured beside.

    python -m benchmarks.profile_step --shape llama-3.1-8b --steps 1x640,256x640,32x8000,16xchunk512

With `--drafts K` the worker may draft K tokens, and 1x640d8 is a row with 8 drafts behind its last
token. Verified drafts are those of a lookup, so rows go on by a token or more from step to step.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.figures import provenance, write_json
from benchmarks.gpu_watch import GpuClocks, clock_line
from benchmarks.shapes import SHAPES, write_model_folder
from headrace_backend.config import QUANTIZE_GROUPS, EngineConfig
from headrace_backend.models.build import ModelBuild
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.load import load_model
from headrace_backend.step.plan import StepPlan
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.weights.scheme import Schemes
from headrace_backend.worker.start_up.device import choose_device, choose_dtype, prepare_torch
from headrace_backend.worker.start_up.fitted_runner import make_runner
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.start_up.synthetic_steps import (
    BlockPool,
    Chunk,
    SamplingKind,
    drafted_step,
    make_step,
    release_step,
)
from headrace_backend.worker.step.kv_caches import allocate_kv_caches, kv_type
from headrace_backend.worker.step.runner import CapturesGraphs, Runner
from headrace_kernels.attention.quantized_kv import is_quantized, scales_of
from headrace_model_folder import ModelFolder

_MAX_MODEL_LEN = 16_384
_WARM_STEPS = 4
_STEPS = 10
# An engine goes on and on, and a card's clocks may fall with its power and heat. With 10 steps
# behind a pause, products of 256 rows in FP8 saved 5% of a step, of which the engine had nothing;
# whether that was why is not known (docs/experiments.md, "tiles that the library does not name").
_HEATING_S = 1.0
_NAME_LENGTH = 78
# Tokens that prompts are drawn from, which every model has.
_TOKEN_IDS = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class KernelShare:
    """All launches of one kernel in a step."""

    name: str
    launches: float
    us: float


@dataclasses.dataclass(frozen=True, slots=True)
class StepProfile:
    """Averages of a step. Times in microseconds."""

    kind: str
    # Without the profiler, steps launched one after the other.
    wall_us: float
    # What the host needs to launch one step.
    launch_us: float
    kernels: float
    busy_us: float
    # Between the end of a kernel and the beginning of the next, under the profiler.
    gap_us: float
    shares: tuple[KernelShare, ...]
    # Of the second before, by `GpuClocks`.
    card: dict[str, float] | None = None


def plan_of(kind: str, pool: BlockPool) -> StepPlan:
    """A step by its name: ROWSxCONTEXT decodes, or [PROMPTSx]chunkTOKENS[@START] of prompts.

    A name of both has a + between them. Prompts have tokens of all kinds: a card that multiplies
    the same row again and again needs less power, and is faster than it is with any real prompt.
    """
    chunks: list[Chunk] = []
    for part in kind.split("+"):
        rows, is_chunk, chunk = part.rpartition("chunk")
        if is_chunk:
            count, _, start = chunk.partition("@")
            chunks += [Chunk(int(start or 0), int(count))] * int(rows.removesuffix("x") or 1)
        else:
            rows, context = part.split("x")
            chunks += [Chunk(int(context) - 1, 1)] * int(rows)
    plan = make_step(chunks, pool, SamplingKind.GREEDY)
    size = plan.forward.token_ids.size
    plan.forward.token_ids = np.random.default_rng(0).integers(0, _TOKEN_IDS, size, dtype=np.int32)
    return plan


def decode_sizes(kinds: Sequence[str]) -> str:
    """Rows of the named steps of decodes alone, as `graph_sizes` takes them; 1 if none is named."""
    sizes = {int(kind.partition("x")[0]) for kind in kinds if "chunk" not in kind and "+" not in kind}
    return ",".join(map(str, sorted(sizes))) or "1"


def steps_of(kind: str, pool: BlockPool) -> tuple[StepPlan, StepPlan]:
    """A step that takes rows, and the one that is profiled after it, again and again.

    Names are those of `plan_of`, and ROWSxCONTEXTdDRAFTS of decodes with drafts.
    """
    name, _, drafts = kind.partition("d") if "x" in kind else (kind, "", "")
    taken = plan_of(name, pool)
    return taken, drafted_step(taken, int(drafts)) if drafts else dataclasses.replace(taken, admissions=[])


def _run(runner: Runner, plan: StepPlan, steps: int) -> float:
    """Launches a step so often; seconds until the host is done with that."""
    began = time.perf_counter()
    for _ in range(steps):
        runner.sample(plan, runner.forward(plan))
    return time.perf_counter() - began


def _heat(runner: Runner, plan: StepPlan, seconds: float) -> dict[str, float] | None:
    """Runs a step again and again for so long, as an engine would; the card's power and clocks."""
    began = time.perf_counter()
    with GpuClocks() as clocks:
        while time.perf_counter() < began + seconds:
            _run(runner, plan, _STEPS)
            torch.cuda.synchronize()
    return clocks.summary()


def profile(runner: Runner, kind: str, pool: BlockPool, heating_s: float = _HEATING_S) -> StepProfile:
    """Profiles one kind of step, behind so many seconds of it."""
    taken, again = steps_of(kind, pool)
    _run(runner, taken, 1)
    _run(runner, again, _WARM_STEPS)
    torch.cuda.synchronize()
    # Rows with drafts go on from step to step, and would soon be beyond their blocks.
    card = _heat(runner, again, heating_s) if again.forward.known_counts.any() else None
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    launch_s = _run(runner, again, _STEPS)
    end.record()
    torch.cuda.synchronize()
    wall_us = start.elapsed_time(end) * 1e3 / _STEPS
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        _run(runner, again, _STEPS)
        torch.cuda.synchronize()
    runner.forward(release_step(len(taken.forward.rows)))
    found = _summary(kind, wall_us, launch_s * 1e6 / _STEPS, profiler.events())
    return dataclasses.replace(found, card=card)


def _summary(kind: str, wall_us: float, launch_us: float, events: Sequence[object]) -> StepProfile:
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)  # type: ignore[attr-defined]
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    )
    launches: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    gaps, free_at = 0.0, spans[0][0]
    for begin, end, name in spans:
        launches[name] += 1
        times[name] += end - begin
        gaps += max(begin - free_at, 0.0)
        free_at = max(free_at, end)
    shares = tuple(
        KernelShare(name, launches[name] / _STEPS, us / _STEPS)
        for name, us in sorted(times.items(), key=lambda t: -t[1])
    )
    return StepProfile(
        kind, wall_us, launch_us, len(spans) / _STEPS, sum(times.values()) / _STEPS, gaps / _STEPS, shares
    )


def make_model(
    shape: str, settings: dict[str, Any], schemes: Schemes, shard: Shard = ALONE
) -> tuple[CausalLM, EngineConfig]:
    """A model with dummy weights on its device, or a rank's part of it, and its configuration.

    The configuration is the engine's defaults but for the settings.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(shape, pathlib.Path(name))
        config = EngineConfig.model_validate({"model": folder, "load": "dummy", **settings})
        opened = ModelFolder.open(folder, require_weights=False)
        where, _ = choose_device(config.device)
        prepare_torch(where, config.worker_threads, config.tp)
        dtype = choose_dtype(config.dtype, opened.config, where)
        longest = min(_MAX_MODEL_LEN, opened.config.max_position_embeddings)
        build = ModelBuild(opened.config, dtype, where, schemes, shard, max_position=longest)
        return load_model(build, None, lambda *_: None), config


def make_caches(model: CausalLM, config: EngineConfig, num_blocks: int) -> list[torch.Tensor]:
    """So many blocks a layer, with synthetic keys and values."""
    size = (num_blocks, 2, model.num_kv_heads, config.block_size, model.head_dim)
    device = next(model.parameters()).device
    caches = allocate_kv_caches(model.num_layers, size, kv_type(config.kv_dtype, model.dtype), device)
    for cache in caches:
        _fill(cache)
    return caches


def captured_runner(
    model: CausalLM, config: EngineConfig, caches: list[torch.Tensor], long_sizes: Sequence[int] = ()
) -> Runner:
    """Returns a runner with its graphs, if it has any.

    Graphs of long steps with prompts of so many tokens are among them.
    """
    runner = make_runner(model, WorkerSizes.of(config, model.max_position), caches, long_sizes)
    if isinstance(runner, CapturesGraphs):
        runner.capture(lambda *_: None)
    return runner


def _fill(cache: torch.Tensor) -> None:
    """Synthetic keys and values of order 1."""
    if not is_quantized(cache):
        cache.normal_()
        return
    cache.view(torch.int8).random_(0, 100)
    scales_of(cache).fill_(0.02)


def _print(result: StepProfile, top: int) -> None:
    print(
        f"{result.kind}: {result.wall_us:,.0f} us a step; {result.kernels:.0f} kernels busy {result.busy_us:,.0f} us, "
        f"gaps {result.gap_us:,.0f} us; launching takes the host {result.launch_us:,.0f} us"
    )
    if result.card is not None:
        print(f"  card: {clock_line(result.card)}")
    for share in result.shares[:top]:
        print(
            f"  {share.us:9.1f} us {share.us / result.busy_us:6.1%} {share.launches:5.0f}x {share.name[:_NAME_LENGTH]}"
        )


def main() -> None:
    """Profiles the named steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--dtype", choices=["auto", "bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--quant", choices=["off", "int8", "int4", "fp8", "nf4"], default="off")
    parser.add_argument("--quant-group", type=int, choices=QUANTIZE_GROUPS, default=128, help="of int4")
    parser.add_argument("--quant-activations", choices=["auto", "fp8"], default="auto", help="of int4")
    parser.add_argument("--quant-head", choices=["off", "int8", "fp8"], default="off", help="of the output layer")
    parser.add_argument("--kv-dtype", choices=["auto", "fp8", "int8"], default="auto", help="numbers of the KV cache")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", default="1x640,256x640,32x8000,chunk8192")
    parser.add_argument("--drafts", type=int, default=0, help="most drafts of a row; 0: no speculation")
    parser.add_argument("--blocks", type=int, default=18_000, help="of the cache")
    parser.add_argument("--graphs", help="batch sizes to capture, or off; default: those of the steps of decodes")
    parser.add_argument(
        "--heating-s", type=float, default=_HEATING_S, help="seconds of a step before it is timed, without drafts"
    )
    parser.add_argument("--top", type=int, default=16, help="kernels to print")
    parser.add_argument("--git", default="")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    kinds = arguments.steps.split(",")
    schemes = Schemes.named(arguments.quant, arguments.quant_group, arguments.quant_head, arguments.quant_activations)
    settings = {
        "device": arguments.device,
        "dtype": arguments.dtype,
        "graph_sizes": arguments.graphs or decode_sizes(kinds),
        "kv_dtype": arguments.kv_dtype,
    }
    if arguments.drafts:
        settings |= {"speculate": "ngram", "speculate_tokens": arguments.drafts}
    model, config = make_model(arguments.shape, settings, schemes)
    runner = captured_runner(model, config, make_caches(model, config, arguments.blocks))
    pool = BlockPool(arguments.blocks, config.block_size)
    results = [profile(runner, kind, pool, arguments.heating_s) for kind in kinds]
    for result in results:
        _print(result, arguments.top)
    where = {**provenance(arguments.git), "gpu": torch.cuda.get_device_name(), "quant": arguments.quant}
    where["quant_head"] = arguments.quant_head
    where["kv_dtype"] = arguments.dtype if arguments.kv_dtype == "auto" else arguments.kv_dtype
    write_json([{**where, **dataclasses.asdict(result)} for result in results], arguments.json)


if __name__ == "__main__":
    main()
