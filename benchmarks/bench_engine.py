"""The engine's own speed: workloads as token ids into one backend.

Every figure stands beside the floor that this run's ceilings allow.

One configuration serves all workloads. Greedy, answers of fixed length, prefix cache on and finding
nothing. The ceilings are measured first, in a process of their own.

    python -m benchmarks.bench_engine --shape llama-3.1-8b --dtype bf16 --load dummy --workloads
    single,burst256 --seed 0 --json FILE
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import pathlib
import sys
import tempfile
from typing import Any

import uvloop

from benchmarks import results_table
from benchmarks.ceilings import Ceilings, measured
from benchmarks.ending import CutShort, Ending
from benchmarks.engine_options import Plan, engine_options, model_folder, plan_of
from benchmarks.engine_session import EngineSession
from benchmarks.figures import write_json
from benchmarks.gpu_watch import GpuClocks
from benchmarks.measured_engine import measure_all, measured_engine, record, unmeasured
from benchmarks.measurements import itl_over_time, medians, summary
from benchmarks.sending import Run, Unfinished, counters, planning, send, uncached
from benchmarks.workloads import WORKLOADS, Workload

# Runs of a workload that is over within seconds; others run once.
_REPEATS = {"single": 3}


async def _runs(
    session: EngineSession, workload: Workload, repeats: int, ending: Ending
) -> tuple[list[Run], dict[str, Any]]:
    """Runs the workload `repeats` times; returns the runs and what the engine counted meanwhile.

    Of a workload that is cut short it returns the whole runs, or else what there is of the first,
    and why it was cut.

    Raises:
        CutShort: Before anything was answered.
    """
    load_before = await session.load()
    runs: list[Run] = []
    for number in range(repeats):
        salt = f"{workload.name} {number}".encode()
        try:
            runs.append(uncached(await send(session, workload, salt, ending), workload))
        except Unfinished as cut:
            # Where some figures are kept apart, a part of the requests does not tell which.
            partial = [uncached(cut.run, workload)] if cut.run and not workload.apart else []
            if not (runs or partial):
                raise
            return runs or partial, {"incomplete": str(cut)}
    load_after = await session.load()
    before, after = counters(load_before), counters(load_after)
    planned_before, planned_after = planning(load_before), planning(load_after)
    counted = {f"{name}_after_warm_up": after[name] - before[name] for name in after}
    return runs, counted | {name: planned_after[name] - planned_before[name] for name in planned_after}


async def _measure(session: EngineSession, workload: Workload, repeats: int, ending: Ending) -> dict[str, Any]:
    """The figures of a workload, and what else is to be said of it under "more"."""
    runs, more = await _runs(session, workload, repeats, ending)
    figures, spread = medians([summary(_others(run, workload), run.begin_s, run.unanswered) for run in runs])
    more |= {"cached_tokens": 0, "repeats": len(runs), "cut": workload.cut}
    more["unanswered"] = sum(run.unanswered for run in runs)
    more["sent_late_ms"] = round(max(run.latest_s for run in runs) * 1e3, 3)
    more["itl_over_time"] = itl_over_time(_others(runs[0], workload), runs[0].begin_s)
    if spread:
        more["spread"] = spread
    if workload.apart:
        more["apart"] = summary([runs[0].requests[index] for index in sorted(workload.apart)], runs[0].begin_s)
    return figures | {"more": more}


def _others(run: Run, workload: Workload) -> list[Any]:
    return [request for index, request in enumerate(run.requests) if index not in workload.apart]


async def run(plan: Plan, ceilings: Ceilings, path: pathlib.Path | None, ending: Ending) -> bool:
    """Starts the backend, warms it, and measures every workload.

    `path` holds what there is after each.

    False if one could not be measured, or not on a warm engine.
    """
    async with measured_engine(plan, ceilings) as (session, workloads, started, peak_gib):

        async def measure(workload: Workload) -> dict[str, Any]:
            # Of several cards the first, which does what the others do.
            with GpuClocks() if ceilings.device == "cuda" else contextlib.nullcontext() as clocks:
                figures = await _measure(session, workload, plan.repeats or _REPEATS.get(workload.name, 1), ending)
            result = record(figures, workload, plan, ceilings, started, session.model)
            card = {} if clocks is None else {"card": clocks.summary()}
            return result | {"peak_memory_gib": peak_gib()} | card

        return await measure_all(workloads, measure, results_table.lines, path, ending)


def main() -> int:
    """Command line; 1 if a workload could not be measured, or not on a warm engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine_options(parser)
    parser.add_argument(
        "--workloads",
        default="single,mix1000",
        help=f"with commas: {', '.join(WORKLOADS)}; or NAME@C, and NAME+S with another seed",
    )
    options = parser.parse_args()
    with Ending(options.limit_s) as ending, tempfile.TemporaryDirectory(prefix="headrace-shape-") as parent:
        try:
            folder = model_folder(options, pathlib.Path(parent))
            plan = plan_of(parser, options, folder)
            ceilings = measured(options.device, options.threads)
            complete = uvloop.run(ending.during(functools.partial(run, plan, ceilings, options.json)))
        except CutShort as cut:
            write_json(unmeasured(options.workloads.split(","), str(cut), options.git), options.json)
            complete = False
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
