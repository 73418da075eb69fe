"""The engine's own speed: workloads as token ids into one backend, every figure beside the floor that this run's ceilings allow.

One configuration serves all workloads. Greedy, answers of fixed length, prefix cache on and finding nothing. The ceilings are measured first, in a process of their own.

    python -m benchmarks.bench_engine --shape llama-3.1-8b --dtype bf16 --load dummy --workloads single,burst256 --seed 0 --json FILE
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pydantic
import uvloop

from benchmarks import results_table
from benchmarks.backend_process import GpuMemory
from benchmarks.ceilings import Ceilings, measured
from benchmarks.engine_session import EngineSession, engine_session
from benchmarks.figures import provenance, write_json
from benchmarks.measurements import itl_over_time, medians, summary
from benchmarks.roofline import BYTES, PerfectEngine, StepTime
from benchmarks.sending import NotMeasured, Run, counters, send, warm_up
from benchmarks.shapes import SHAPES, Shape, shape_of, write_model_folder
from benchmarks.workloads import WORKLOADS, Workload, build, fitted
from headrace_backend.config import EngineConfig

_START_TIMEOUT_S = 900.0
# Runs of a workload that is over within seconds.
_CHEAP = {"single": 3, "longprompt": 1}
_GPU_WARM_UP_TOKENS = 65_536
_CPU_WARM_UP_TOKENS = 4_096
_CPU_REQUESTS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, on what."""

    settings: dict[str, Any]
    # What the settings come to on this device.
    engine: EngineConfig
    shape: Shape
    shape_name: str
    workloads: tuple[str, ...]
    seed: int
    # 0: all requests on a GPU, a few on a CPU.
    requests: int
    # 0: as many as a workload is worth.
    repeats: int
    git: str


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """What is known of the backend once it is warm."""

    startup_s: float
    load_gb_s: float | None
    warm_up_rounds: int


def load_gb_s(session: EngineSession, dtype: str, from_folder: bool) -> float | None:
    """Bytes of weights over the seconds of the phase that read them; None for made-up weights, or if the backend does not say."""
    seconds = session.process.phases_s().get("weights")
    if not seconds or not from_folder:
        return None
    return round(session.model.parameter_count * BYTES[dtype] / seconds / 1e9, 3)


async def _start(session: EngineSession, plan: Plan, workloads: list[Workload], on_gpu: bool) -> Started:
    await session.generate([11, 12, 13], 1)
    startup_s = time.perf_counter() - session.process.started_s
    tokens = _GPU_WARM_UP_TOKENS if on_gpu else _CPU_WARM_UP_TOKENS
    rows = plan.engine.max_num_seqs if on_gpu else 8
    rounds = await warm_up(session, workloads, rows, tokens)
    rate = load_gb_s(session, session.model.dtype, plan.engine.load == "folder")
    return Started(round(startup_s, 2), rate, rounds)


async def _measure(session: EngineSession, workload: Workload, repeats: int) -> dict[str, Any]:
    """The figures of a workload, and what else is to be said of it under "more"."""
    before = counters(await session.load())
    runs = []
    for number in range(repeats):
        run = await send(session, workload, salt=f"{workload.name} {number}".encode())
        if run.cached_tokens:
            raise NotMeasured(f"{workload.name}: {run.cached_tokens} tokens came from the prefix cache")
        runs.append(run)
    after = counters(await session.load())
    figures, spread = medians([summary(_others(run, workload), run.begin_s) for run in runs])
    more: dict[str, Any] = {f"{name}_after_warm_up": after[name] - before[name] for name in after}
    more |= {"cached_tokens": 0, "repeats": repeats, "cut": workload.cut}
    more["sent_late_ms"] = round(max(run.latest_s for run in runs) * 1e3, 3)
    more["itl_over_time"] = itl_over_time(_others(runs[0], workload), runs[0].begin_s)
    if spread:
        more["spread"] = spread
    if workload.apart:
        more["apart"] = summary([runs[0].requests[index] for index in sorted(workload.apart)], runs[0].begin_s)
    return figures | {"more": more}


def _others(run: Run, workload: Workload) -> list[Any]:
    return [request for index, request in enumerate(run.requests) if index not in workload.apart]


def floor_of(workload: Workload, plan: Plan, ceilings: Ceilings, dtype: str) -> dict[str, Any]:
    """The same figures of a perfect engine."""
    time_of_step = StepTime(plan.shape, ceilings, BYTES[dtype])
    perfect = PerfectEngine(time_of_step, plan.engine.max_num_seqs, plan.engine.max_num_batched_tokens)
    requests = perfect.serve(workload)
    return summary([request for index, request in enumerate(requests) if index not in workload.apart], 0.0)


def record(
    figures: dict[str, Any], workload: Workload, plan: Plan, ceilings: Ceilings, started: Started, dtype: str
) -> dict[str, Any]:
    """One workload's record, in the order in which results are read."""
    more = figures.pop("more")
    about = provenance(plan.git)
    on_gpu = ceilings.device == "cuda"
    head = {
        "name": workload.name,
        "gpu": ceilings.name if on_gpu else "",
        "gpus": 1 if on_gpu else 0,
        "shape": plan.shape_name,
        "dtype": dtype,
        "quant": "",
        "kv_dtype": dtype,
        "seed": plan.seed,
        **{name: about.pop(name) for name in ("git", "date", "command")},
    }
    tail = {
        "peak_memory_gib": None,
        "startup_s": started.startup_s,
        "load_gb_s": started.load_gb_s,
        "floor": floor_of(workload, plan, ceilings, dtype),
        "ceilings": ceilings.summary(),
    }
    result: dict[str, Any] = (
        head | figures | tail | more | about | {"engine": {k: v for k, v in plan.settings.items() if k != "model"}}
    )
    return result


@contextlib.asynccontextmanager
async def measured_engine(
    plan: Plan, ceilings: Ceilings
) -> AsyncIterator[tuple[EngineSession, list[Workload], Started, Callable[[], float | None]]]:
    """A warm backend, its workloads, what is known of it, and a function that tells the peak of its memory (GiB)."""
    on_gpu = ceilings.device == "cuda"
    memory = GpuMemory() if on_gpu else None
    async with engine_session(plan.settings, _START_TIMEOUT_S) as session:
        requests = plan.requests or (0 if on_gpu else _CPU_REQUESTS)
        sizes = session.model.vocabulary_size, session.model.max_context_tokens
        workloads = [fitted(build(name, plan.seed, requests), *sizes) for name in plan.workloads]
        started = await _start(session, plan, workloads, on_gpu)
        print(f"start-up {started.startup_s} s, warm after {started.warm_up_rounds} rounds; {ceilings.summary()}")
        yield (
            session,
            workloads,
            started,
            lambda: _rounded(memory.peak_gib if memory else session.process.resident_peak_gib()),
        )
    if memory:
        memory.close()


async def run(plan: Plan, ceilings: Ceilings) -> list[dict[str, Any]]:
    """Starts the backend, warms it, and measures every workload."""
    results = []
    async with measured_engine(plan, ceilings) as (session, workloads, started, peak_gib):
        for workload in workloads:
            repeats = plan.repeats or _CHEAP.get(workload.name, 1)
            figures = await _measure(session, workload, repeats)
            result = record(figures, workload, plan, ceilings, started, session.model.dtype)
            result["peak_memory_gib"] = peak_gib()
            print("\n".join(results_table.lines(result)), flush=True)
            results.append(result)
    return results


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def engine_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which engine is measured; shared with the benchmarks beside this one."""
    parser.add_argument(
        "--shape", choices=SHAPES, default="demo", help="architecture; its folder is made, without weights"
    )
    parser.add_argument("--model", type=pathlib.Path, help="a model folder instead of a shape")
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp16", "fp32"), default="auto")
    parser.add_argument(
        "--load", choices=("dummy", "folder"), default="", help="folder needs --model and is its default"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:INDEX")
    parser.add_argument("--rows", type=int, default=0, help="sequences of a batch (max_num_seqs); 0: the default")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of the worker")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=JSON", help="another EngineConfig field; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0, help="added to the workloads' own seeds")
    parser.add_argument("--requests", type=int, default=0, help="the first N of each workload; 0: all (16 on a CPU)")
    parser.add_argument("--repeats", type=int, default=0, help="runs of each workload; 0: the benchmark's own number")
    parser.add_argument("--git", default="", help="the commit, where the tree has no history")
    parser.add_argument("--json", type=pathlib.Path)


def plan_of(parser: argparse.ArgumentParser, options: argparse.Namespace, folder: pathlib.Path) -> Plan:
    """What the options ask for, on the model in `folder`. Mistakes end the program as argparse's own do."""
    names = tuple(options.workloads.split(","))
    try:
        for name in names:
            build(name, requests=1)
    except ValueError as error:
        parser.error(str(error))
    settings = engine_settings(options, folder.resolve())
    try:
        config = EngineConfig(**settings)
    except pydantic.ValidationError as error:
        parser.error(f"{'.'.join(map(str, error.errors()[0]['loc']))}: {error.errors()[0]['msg']}")
    shape_name = options.model.name if options.model else options.shape
    sizes = (options.seed, options.requests, options.repeats)
    return Plan(settings, config, shape_of(folder), shape_name, names, *sizes, options.git)


def engine_settings(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """EngineConfig fields of the options.

    Raises:
        SystemExit: They contradict each other.
    """
    load = options.load or ("folder" if options.model else "dummy")
    if load == "folder" and options.model is None:
        raise SystemExit("--load folder needs --model: a shape has no weights")
    settings: dict[str, Any] = {
        "model": str(folder),
        "device": options.device,
        "dtype": options.dtype,
        "load": load,
        "worker_threads": options.threads,
        "max_waiting_requests": 4096,
        "start_timeout_s": _START_TIMEOUT_S,
    }
    if options.rows:
        settings["max_num_seqs"] = options.rows
    for assignment in options.set:
        name, _, value = assignment.partition("=")
        settings[name] = _json_or_text(value)
    return settings


def _json_or_text(value: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine_options(parser)
    parser.add_argument("--workloads", default="single,mix1000", help=f"with commas: {', '.join(WORKLOADS)}")
    options = parser.parse_args()
    ceilings = measured(options.device, options.threads)
    with tempfile.TemporaryDirectory(prefix="headrace-shape-") as parent:
        folder = options.model or write_model_folder(options.shape, pathlib.Path(parent))
        plan = plan_of(parser, options, folder)
        results = uvloop.run(run(plan, ceilings))
    write_json(results, options.json)


if __name__ == "__main__":
    main()
