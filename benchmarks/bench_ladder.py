"""The sources of the speed, on one model, machine and trace, rung by rung.

The trace has the lengths of mix1000; each rung is useful output tokens per second.

The trace has the lengths of mix1000; each rung is useful output tokens per second.

recompute   plain PyTorch without a cache, one request at a time (a few requests only: it is that
            slow)
kv_cache    the same with a contiguous KV cache
static      batches of fixed shape, which run until their longest answer has ended
in_flight   rows refilled as they fall free, each with room for the longest sequence of the trace in
            a contiguous cache
paged       our engine with as many rows: blocks, chunked prompts, prefix cache; on a GPU our
            kernels, but no CUDA graphs; sampling and scheduling in processes of their own
graphs      the same with CUDA graphs (GPU only)
full        the engine as it is configured by default: more rows, because blocks leave room for them
int8, int4, fp8, nf4   full with the layers' weights in as many bits, each against full; those that
                       --low-bits names
head-int8, head-fp8    full with the output layer in 8 bits; after a scheme of the layers and a
                       plus, both: int4+head-int8

The first four share a plain model, the others the engine: the step between in_flight and paged
therefore holds everything in which the two differ, kernels of ours on a GPU included. Beside the
rungs: the share of allocated cache that is not used, of blocks and of both contiguous ways of
reserving (`bench_kv_waste`).

    python -m benchmarks.bench_ladder --shape llama-3.1-8b --dtype bf16 --json FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import uvloop

from benchmarks import bench_kv_waste, figures
from benchmarks.ceilings import Ceilings, measured
from benchmarks.ending import CutShort, Ending
from benchmarks.engine_options import Plan, engine_options, model_folder, plan_of
from benchmarks.measured_engine import measured_engine
from benchmarks.measurements import summary
from benchmarks.sending import NotMeasured, send
from benchmarks.workloads import Workload, build, fitted
from headrace_backend.config import QUANTIZE_GROUPS, EngineConfig

# Rows of the rungs below `full`; requests served; requests of the slowest rung.
_GPU_SIZES = (32, 128, 1)
_CPU_SIZES = (8, 24, 1)
# Parts of a rung's name -> fields of EngineConfig.
_LOW_BITS = {
    **{scheme: {"quantize": scheme} for scheme in ("int8", "int4", "fp8", "nf4")},
    **{f"head-{scheme}": {"quantize_head": scheme} for scheme in ("int8", "fp8")},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Ladder:
    """What all rungs share."""

    plan: Plan
    ceilings: Ceilings
    workload: Workload
    rows: int
    few: int
    threads: int
    # The last rungs: name -> fields of EngineConfig.
    low_bits: dict[str, dict[str, Any]]
    ending: Ending

    @property
    def dtype(self) -> str:
        """Type of weights and cache; "auto" is the engine's own rule."""
        if self.plan.engine.dtype != "auto":
            return self.plan.engine.dtype
        return "bf16" if self.ceilings.device == "cuda" else "fp32"


def plain_rungs(ladder: Ladder) -> Iterator[dict[str, Any]]:
    """The rungs without the engine."""
    job = {
        "model": ladder.plan.settings["model"],
        "device": ladder.ceilings.device,
        "dtype": ladder.dtype,
        "threads": ladder.threads,
        "rows": ladder.rows,
        "few": ladder.few,
        "max_len": ladder.workload.longest,
        "trace": ladder.workload.trace,
    }
    command = [sys.executable, "-m", "benchmarks.plain_rungs"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=figures.environment(), text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(job))
        process.stdin.close()
        yield from (json.loads(line) for line in process.stdout)
        if process.wait():
            raise NotMeasured(f"the plain rungs ended with exit code {process.returncode}")
    finally:
        process.kill()
        process.wait()


def engine_rung(ladder: Ladder, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One rung of our engine."""
    rung: dict[str, Any] = uvloop.run(ladder.ending.during(lambda _: _engine_rung(ladder, name, settings)))
    return rung


async def _engine_rung(ladder: Ladder, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    settings = ladder.plan.settings | settings | {"dtype": ladder.dtype}
    plan = dataclasses.replace(ladder.plan, settings=settings, engine=EngineConfig(**settings))
    async with measured_engine(plan, ladder.ceilings) as (session, _, _, _):
        run = await send(session, ladder.workload, name.encode())
    served = summary(run.requests, run.begin_s)
    return {"rung": name, **{field: served[field] for field in ("requests", "output_tok_s", "wall_s")}}


def engine_rungs(ladder: Ladder) -> Iterator[dict[str, Any]]:
    """The engine's rungs that exist on this device."""
    rows = {"max_num_seqs": ladder.rows}
    if ladder.ceilings.device == "cuda":
        yield engine_rung(ladder, "paged", rows | {"graph_sizes": "off"})
        yield engine_rung(ladder, "graphs", rows)
    else:
        yield engine_rung(ladder, "paged", rows)
    yield engine_rung(ladder, "full", {})
    for name, settings in ladder.low_bits.items():
        yield engine_rung(ladder, name, settings)


def low_bit_rungs(names: str, quantize_group: int) -> dict[str, dict[str, Any]]:
    """The rungs of --low-bits: name -> fields of EngineConfig.

    Args:
        names: Names of schemes, with commas between.
        quantize_group: Inputs of a group of int4.

    Raises:
        ValueError: A name that is none, or that gives the layers or the output layer two schemes.
    """
    rungs: dict[str, dict[str, Any]] = {}
    for name in filter(None, names.split(",")):
        parts = [_LOW_BITS.get(part) for part in name.split("+")]
        settings = {field: scheme for part in parts if part for field, scheme in part.items()}
        if None in parts or len(settings) < len(parts):
            raise ValueError(
                f"--low-bits: {name!r} is none of {', '.join(_LOW_BITS)}, or one of the layers and one of the head "
                "with a plus"
            )
        rungs[name] = settings | ({"quantize_group": quantize_group} if settings.get("quantize") == "int4" else {})
    return rungs


def climb(ladder: Ladder, rungs: list[dict[str, Any]]) -> str:
    """Appends all rungs, each with its gain over the one before and over the first.

    Returns why it ended early; "" if it did not.
    """
    try:
        for rung in itertools.chain(plain_rungs(ladder), engine_rungs(ladder)):
            first, before = (rungs[0], _before(rungs)) if rungs else (rung, rung)
            rung["gain"] = round(rung["output_tok_s"] / before["output_tok_s"], 2)
            rung["total_gain"] = round(rung["output_tok_s"] / first["output_tok_s"], 2)
            rungs.append(rung)
            rates = f"{rung['output_tok_s']:>10,.1f} tok/s {rung['gain']:>7.2f} x {rung['total_gain']:>8.1f} x in all"
            print(f"{rung['rung']:<10} {rates}", flush=True)
    except (RuntimeError, NotMeasured, CutShort) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _before(rungs: list[dict[str, Any]]) -> dict[str, Any]:
    """The rung that the next one's gain is over: the last, or `full` for schemes of weights."""
    return next((rung for rung in rungs if rung["rung"] == "full"), rungs[-1])


def _record(ladder: Ladder, rungs: list[dict[str, Any]], error: str) -> dict[str, Any]:
    """What is written: the rungs, and beside them the cache's waste."""
    waste = bench_kv_waste.run(len(ladder.workload.trace), ladder.rows, 16, 3 + ladder.plan.seed)
    on_gpu = ladder.ceilings.device == "cuda"
    record = {
        "name": "ladder",
        "gpu": ladder.ceilings.name if on_gpu else "",
        "gpus": int(on_gpu),
        "shape": ladder.plan.shape_name,
        "dtype": ladder.dtype,
        "rows": ladder.rows,
        "requests": len(ladder.workload.trace),
        "cut": ladder.workload.cut,
        "seed": ladder.plan.seed,
        "rungs": rungs,
        "kv_waste": {name: value for name, value in waste.items() if name.startswith("waste")},
        "ceilings": ladder.ceilings.summary(),
    }
    return record | ({"error": error} if error else {})


def main() -> int:
    """Command line; 1 if a rung is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine_options(parser)
    parser.add_argument(
        "--low-bits", default="", help=f"rungs after full, with commas: {', '.join(_LOW_BITS)}, int4+head-int8"
    )
    options = parser.parse_args()
    if options.quant or options.quant_head:
        parser.error("the ladder takes schemes as --low-bits, not as --quant and --quant-head")
    try:
        low_bits = low_bit_rungs(options.low_bits, options.quant_group or QUANTIZE_GROUPS[-1])
    except ValueError as error:
        parser.error(str(error))
    given_rows = options.rows
    # The group too is that of one rung alone.
    options.quant_group = None
    # The rows are a rung's business; `full` takes the engine's own default.
    options.rows, options.workloads = 0, "mix1000"
    with Ending(options.limit_s) as ending, tempfile.TemporaryDirectory(prefix="headrace-shape-") as parent:
        try:
            plan = plan_of(parser, options, model_folder(options, pathlib.Path(parent)))
            record = _climbed(plan, options, given_rows, low_bits, ending)
        except CutShort as cut:
            record = {"name": "ladder", "rungs": [], "error": str(cut)}
    print(record.get("error") or f"unused share of allocated cache: {record['kv_waste']}", flush=True)
    figures.write_json(record | figures.provenance(options.git), options.json)
    return 1 if "error" in record else 0


def _climbed(
    plan: Plan, options: argparse.Namespace, given_rows: int, low_bits: dict[str, dict[str, Any]], ending: Ending
) -> dict[str, Any]:
    """The record of all rungs that there is time for. Raises CutShort: before the first."""
    ceilings = measured(options.device, options.threads)
    rows, requests, few = _GPU_SIZES if ceilings.device == "cuda" else _CPU_SIZES
    sizes = plan.shape.vocab_size, plan.shape.max_position_embeddings
    workload = fitted(build("mix1000", plan.seed, options.requests or requests), *sizes)
    ladder = Ladder(plan, ceilings, workload, given_rows or rows, few, options.threads, low_bits, ending)
    rungs: list[dict[str, Any]] = []
    return _record(ladder, rungs, climb(ladder, rungs))


if __name__ == "__main__":
    sys.exit(main())
