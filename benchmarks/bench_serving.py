"""What text and gRPC cost: the same workloads on the same backend, two ways in turns.

They go through service processes, and through the engine's own stream.

Text in and out with a byte-level BPE of our own that has as many entries as the model's vocabulary;
several client processes; one or more service processes. Loss is the share of the engine's output
tokens per second that is missing through gRPC. Runs alternate, medians are compared.

    python -m benchmarks.bench_serving --shape llama-3.1-8b --dtype bf16 --workloads
    burst256,poisson15 --services 1 --clients 4 --json FILE

With `--telemetry off,array,span` what differs is not the way but how much is traced
(`serving_telemetry`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
from typing import Any

import uvloop
from tokenizers import Tokenizer

from benchmarks import results_table, serving_telemetry
from benchmarks.ceilings import Ceilings, measured
from benchmarks.ending import CutShort, Ending
from benchmarks.engine_options import Plan, engine_options, model_folder, plan_of
from benchmarks.engine_session import EngineSession
from benchmarks.figures import write_json
from benchmarks.measured_engine import measure_all, measured_engine, record, unmeasured
from benchmarks.measurements import itl_over_time, medians, summary
from benchmarks.sending import counters, send, uncached
from benchmarks.serving import Services, send_texts, services, worded
from benchmarks.workloads import WORKLOADS, Workload, first_of

# The loss is a small difference of two figures, which takes several runs; five minutes of people
# are enough by themselves.
_REPEATS = {"users1000": 1}


@dataclasses.dataclass(frozen=True, slots=True)
class Front:
    """What stands in front of the engine."""

    tokenizer: Tokenizer
    services: Services
    clients: int


async def _measure(session: EngineSession, front: Front, workload: Workload, repeats: int) -> dict[str, Any]:
    """Alternates both ways; returns the figures through gRPC.

    The engine's own stand beside them under "more".
    """
    before, cpu_s = counters(await session.load()), front.services.cpu_s()
    engine_runs, runs = [], []
    for number in range(repeats):
        engine_runs.append(uncached(await send(session, workload, f"{workload.name} e{number}".encode()), workload))
        salt = f"{workload.name} s{number}"
        runs.append(
            uncached(await send_texts(workload, front.tokenizer, front.services, salt, front.clients), workload)
        )
    after = counters(await session.load())
    figures, spread = medians([summary(run.requests, run.begin_s, run.unanswered) for run in runs])
    engine, engine_spread = medians([summary(run.requests, run.begin_s, run.unanswered) for run in engine_runs])
    tokens = sum(len(request.arrivals_s) for run in runs for request in run.requests)
    more: dict[str, Any] = {f"{name}_after_warm_up": after[name] - before[name] for name in after}
    more |= {
        "through": "grpc",
        "services": len(front.services.addresses),
        "clients": front.clients,
        "engine_api": engine,
        # Arrivals, and people who think, do not come faster where a server is: there the latencies
        # tell.
        "loss": None
        if workload.arrivals_s or workload.users
        else round(1 - figures["output_tok_s"] / engine["output_tok_s"], 4),
        "service_us_per_token": round((front.services.cpu_s() - cpu_s) / tokens * 1e6, 2),
        "service_rss_mib": round(front.services.resident_mib(), 1),
        "cached_tokens": 0,
        "repeats": repeats,
        "cut": workload.cut,
        "unanswered": sum(run.unanswered for run in runs),
        "sent_late_ms": round(max(run.latest_s for run in runs) * 1e3, 3),
        "spread": spread,
        "engine_api_spread": engine_spread,
        "itl_over_time": itl_over_time(runs[0].requests, runs[0].begin_s),
    }
    return figures | {"more": more}


def _lines(result: dict[str, Any]) -> list[str]:
    """The figures through gRPC beside the engine's own."""
    beside = result | {"floor": result["engine_api"]}
    shown = [line.replace("  floor ", "  engine") for line in results_table.lines(beside)]
    added = [f"{name} {result[name] - result['engine_api'][name]:+.2f} ms" for name in ("ttft_p50", "ttft_p95")]
    loss = "" if result["loss"] is None else f"loss {result['loss']:.2%} of the engine's tokens/s; "
    return [*shown, f"  {loss}{', '.join(added)}; {result['service_us_per_token']} us of service CPU per token"]


async def run(
    plan: Plan, ceilings: Ceilings, num_services: int, clients: int, path: pathlib.Path | None, ending: Ending
) -> bool:
    """Starts everything, warms it, and measures every workload both ways.

    `path` holds what there is after each.

    False if one could not be measured, or not on a warm engine.
    """
    tokenizer = Tokenizer.from_file(str(pathlib.Path(plan.settings["model"]) / "tokenizer.json"))
    async with measured_engine(plan, ceilings) as (session, workloads, started, peak_gib):
        with services(session.process.address, num_services) as running:
            front = Front(tokenizer, running, clients)
            texts = [worded(workload, session.model.vocabulary_size) for workload in workloads]
            await send_texts(first_of(texts[0], 2 * clients), tokenizer, running, "warm-up", clients)

            async def measure(workload: Workload) -> dict[str, Any]:
                figures = await _measure(session, front, workload, plan.repeats or _REPEATS.get(workload.name, 3))
                result = record(figures, workload, plan, ceilings, started, session.model)
                return result | {"peak_memory_gib": peak_gib()}

            return await measure_all(texts, measure, _lines, path, ending)


def main() -> int:
    """Command line; 1 if a workload could not be measured, or not on a warm engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine_options(parser)
    parser.add_argument(
        "--workloads", default="burst256,poisson15", help=f"with commas: {', '.join(WORKLOADS)}; or NAME@C, NAME+SEED"
    )
    parser.add_argument("--services", type=int, default=1, help="service processes")
    parser.add_argument(
        "--clients", type=int, default=max(1, len(os.sched_getaffinity(0)) // 4), help="client processes"
    )
    parser.add_argument(
        "--telemetry",
        default="",
        help=(
            f"instead of the engine beside the front: off and some of {', '.join(serving_telemetry.DETAILS)}, all "
            "traced, with commas"
        ),
    )
    options = parser.parse_args()
    modes = tuple(filter(None, options.telemetry.split(",")))
    if modes and not {"off"} < set(modes) <= {"off", *serving_telemetry.DETAILS}:
        parser.error(f"--telemetry: off and some of {', '.join(serving_telemetry.DETAILS)}, not {options.telemetry}")
    if modes and "users1000" in options.workloads:
        parser.error("--telemetry: turns must be alike, and the users of users1000 come as they are answered")
    with Ending(options.limit_s) as ending, tempfile.TemporaryDirectory(prefix="headrace-shape-") as parent:
        try:
            folder = model_folder(options, pathlib.Path(parent), tokenizer=True)
            plan = plan_of(parser, options, folder)
            about = plan, measured(options.device, options.threads)
            front = options.services, options.clients, options.json
            if modes:
                work = functools.partial(serving_telemetry.run, *about, modes, *front)
            else:
                work = functools.partial(run, *about, *front)
            complete = uvloop.run(ending.during(work))
        except CutShort as cut:
            write_json(unmeasured(options.workloads.split(","), str(cut), options.git), options.json)
            complete = False
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
