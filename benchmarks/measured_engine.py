"""A warm engine to be measured, and the record that results are written as.

Owns the start, the warm-up, memory, floors and the order of workloads, whichever way these are
sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from benchmarks.ceilings import Ceilings
from benchmarks.ending import CutShort, Ending
from benchmarks.engine_options import START_TIMEOUT_S, Plan
from benchmarks.engine_session import EngineSession, engine_session
from benchmarks.figures import provenance, write_json
from benchmarks.gpu_watch import GpuMemory
from benchmarks.measurements import summary
from benchmarks.roofline import BYTES, PerfectEngine, StepTime
from benchmarks.sending import NotMeasured, warm_up
from benchmarks.workloads import Workload, build, fitted
from headrace_model_folder import ModelFolder
from headrace_protos.engine.v1 import engine_pb2

# Prompt tokens of a workload in one round of warm-up, about.
_GPU_WARM_UP_TOKENS = 16_384
_CPU_WARM_UP_TOKENS = 2_048
_CPU_ROWS = 8
_CPU_REQUESTS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """What is known of the backend once it is warm."""

    startup_s: float
    load_gb_s: float | None
    warm_up_rounds: int
    # Whether the last round of warm-up compiled and captured nothing.
    warm: bool
    phases_s: dict[str, float]
    # Tokens of steps with prompts that are replayed from graphs.
    captured_mixed_sizes: list[int]


def load_gb_s(session: EngineSession, plan: Plan) -> float | None:
    """Bytes of the folder's tensors over the seconds of the phase that read them.

    None for dummy weights, or if the backend does not say.
    """
    seconds = session.process.phases_s().get("weights")
    if not seconds or plan.engine.load != "folder":
        return None
    folder = ModelFolder.open(plan.engine.model)
    return round(sum(tensor.num_bytes for tensor in folder.tensors.values()) / seconds / 1e9, 3)


async def _start(session: EngineSession, plan: Plan, workloads: list[Workload], on_gpu: bool) -> Started:
    await session.generate([11, 12, 13], 1)
    startup_s = time.perf_counter() - session.process.started_s
    tokens = _GPU_WARM_UP_TOKENS if on_gpu else _CPU_WARM_UP_TOKENS
    rows = plan.engine.max_num_seqs if on_gpu else _CPU_ROWS
    rounds, warm = await warm_up(session, workloads, rows, tokens)
    rate = load_gb_s(session, plan)
    return Started(
        round(startup_s, 2), rate, rounds, warm, session.process.phases_s(), session.process.captured_mixed_sizes()
    )


def floor_of(workload: Workload, plan: Plan, ceilings: Ceilings, model: engine_pb2.EngineModel) -> dict[str, Any]:
    """The figures of a perfect engine."""
    # Ranks on a CPU share what was measured of it.
    ranks = plan.engine.tp if ceilings.device == "cuda" else 1
    time_of_step = StepTime(
        plan.shape,
        ceilings,
        BYTES[model.dtype],
        bits_per_weight=model.quantization.bits_per_weight,
        head_bits_per_weight=model.quantization.head_bits_per_weight,
        # What a rank has of it, and the others as much.
        kv_bytes_per_token=model.kv_bytes_per_token * plan.engine.tp,
        ranks=ranks,
        rounds_inputs=_rounds_inputs(model.quantization.activations),
    )
    perfect = PerfectEngine(time_of_step, plan.engine.max_num_seqs, plan.engine.max_num_batched_tokens)
    requests = perfect.serve(workload)
    return summary([request for index, request in enumerate(requests) if index not in workload.apart], 0.0)


def _rounds_inputs(activations: str) -> bool:
    """Whether most of the layers' products multiply 8 bits by 8 bits, however few the tokens."""
    return activations.startswith(("fp8", "int8"))


def record(
    figures: dict[str, Any],
    workload: Workload,
    plan: Plan,
    ceilings: Ceilings,
    started: Started,
    model: engine_pb2.EngineModel,
) -> dict[str, Any]:
    """One workload's record, in the order in which results are read."""
    more = figures.pop("more")
    about = provenance(plan.git)
    on_gpu = ceilings.device == "cuda"
    head = {
        "name": workload.name,
        "gpu": ceilings.name if on_gpu else "",
        "gpus": plan.engine.tp if on_gpu else 0,
        "shape": plan.shape_name,
        "dtype": model.dtype,
        "quant": model.quantization.scheme,
        "kv_dtype": model.kv_dtype,
        "seed": plan.seed,
        **{name: about.pop(name) for name in ("git", "date", "command")},
    }
    tail = {
        "peak_memory_gib": None,
        "startup_s": started.startup_s,
        "load_gb_s": started.load_gb_s,
        "floor": floor_of(workload, plan, ceilings, model),
        "ceilings": ceilings.summary(),
    }
    result: dict[str, Any] = (
        head
        | figures
        | tail
        | more
        | about
        | {
            **_people(workload),
            "quant_head": model.quantization.head_scheme,
            "warm": started.warm,
            "phases_s": started.phases_s,
            "captured_mixed_sizes": started.captured_mixed_sizes,
            "engine": {k: v for k, v in plan.settings.items() if k != "model"},
        }
    )
    return result


def _people(workload: Workload) -> dict[str, Any]:
    """How many there were, and for how long."""
    if workload.users is None:
        return {}
    people = workload.users
    return {"users": len(people.turns), "seconds": people.seconds, "think_s": people.think_s}


@contextlib.asynccontextmanager
async def measured_engine(
    plan: Plan, ceilings: Ceilings, telemetry_socket: str = ""
) -> AsyncIterator[tuple[EngineSession, list[Workload], Started, Callable[[], float | None]]]:
    """A warm backend, its workloads, what is known of it, and its peak memory.

    The last is a function that returns GiB.
    """
    on_gpu = ceilings.device == "cuda"
    memory = GpuMemory() if on_gpu else None
    async with engine_session(plan.settings, START_TIMEOUT_S, telemetry_socket) as session:
        requests = plan.requests or (0 if on_gpu else _CPU_REQUESTS)
        sizes = session.model.vocabulary_size, session.model.max_context_tokens
        workloads = [
            fitted(build(name, plan.seed, requests, plan.seconds, plan.think_s), *sizes) for name in plan.workloads
        ]
        begin_s = time.perf_counter()
        started = await _start(session, plan, workloads, on_gpu)
        warm_s = time.perf_counter() - begin_s
        print(
            f"start-up {started.startup_s} s, {'warm' if started.warm else 'STILL COMPILING'} after "
            f"{started.warm_up_rounds} rounds in {warm_s:.1f} s; phases {started.phases_s}; captured "
            f"{started.captured_mixed_sizes}; ceilings {ceilings.summary()}",
            flush=True,
        )
        yield (
            session,
            workloads,
            started,
            lambda: _rounded(memory.peak_gib if memory else session.process.resident_peak_gib()),
        )
    if memory:
        memory.close()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


async def measure_all(
    workloads: Sequence[Workload],
    measure: Callable[[Workload], Awaitable[dict[str, Any]]],
    lines: Callable[[dict[str, Any]], list[str]],
    path: pathlib.Path | None,
    ending: Ending,
) -> bool:
    """Measures workloads one after the other, on an engine that is there.

    Args:
        workloads: In their order.
        measure: Makes the record of one; may raise NotMeasured, which the others outlive.
        lines: What is printed of a record.
        path: Holds the records there are, after each.
        ending: What may cut it short; those that were not measured by then have records that say
            so.

    Returns:
        Whether all were measured, and on a warm engine.
    """
    results: list[dict[str, Any]] = []
    complete = True
    for place, workload in enumerate(workloads):
        try:
            with ending.told_apart():
                result = await measure(workload)
        except NotMeasured as error:
            print(f"NOT MEASURED: {error}", flush=True)
            complete = False
            continue
        except CutShort as cut:
            write_json(results + unmeasured([each.name for each in workloads[place:]], str(cut)), path)
            return False
        print("\n".join(lines(result)), flush=True)
        complete = _is_clean(result) and complete
        results.append(result)
        write_json(results, path)
        if cut_short := result.get("incomplete"):
            write_json(results + unmeasured([each.name for each in workloads[place + 1 :]], cut_short), path)
            return False
    return complete


def unmeasured(names: Sequence[str], why: str, git: str = "") -> list[dict[str, Any]]:
    """The records of workloads that the end came before."""
    print(f"CUT SHORT: {why}; not measured: {', '.join(names) or 'nothing'}", flush=True)
    return [{"name": name, "incomplete": why, **provenance(git)} for name in names]


def _is_clean(result: dict[str, Any]) -> bool:
    """Whether nothing was compiled or captured while this was measured; said aloud if not."""
    late = result.get("late_work_after_warm_up", 0)
    if late:
        print(f"  NOT WARM: {late} kernels compiled or graphs captured during {result['name']}", flush=True)
    return bool(result["warm"]) and not late
