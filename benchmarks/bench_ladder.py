"""The sources of the speed, on one model, machine and trace, rung by rung.

The trace has the lengths of mix1000, each divided by four so that the slowest rungs end. A rung is
measured by its useful output tokens per second, and from `paged` on by those of one request at a
time too.

recompute    plain PyTorch without a cache, one request at a time (few requests: it is that slow)
kv_cache     the same with a contiguous KV cache
static       batches of fixed shape, which run until their longest answer has ended
in_flight    rows refilled as they fall free, each with room for the longest sequence of the trace
             in a contiguous cache
paged        our engine with as many rows: blocks, chunked prompts, prefix cache; on a GPU our fused
             kernels, but no CUDA graphs; sampling and scheduling in processes of their own
graphs       the same with CUDA graphs (GPU only)
full         the engine as it is configured by default: more rows, since blocks leave room for them
int8, int4, fp8, nf4   full with the layers' weights in as many bits, each against full; those that
                       --low-bits names (on a GPU fp8, otherwise none)
head-int8, head-fp8    full with the output layer in 8 bits; after a scheme of the layers and a
                       plus, both: int4+head-int8
tp2, tp4               full on several GPUs, those that --gpus names
speculation  one request at a time with drafts that are right with the probability of --acceptance
             by a throw (`forced_worker`), on the weights of the last rung of few bits

The first four share a plain model, the others the engine: the step between in_flight and paged
therefore holds everything in which the two differ, kernels of ours on a GPU included.

`mfu` is a rung's model FLOPs utilization: products of prompts and answers, each token counted once,
over its time at the matrix rate that this run measured; `bandwidth` is what one request at a time
reads of weights, of the measured copy bandwidth. Beside the rungs: one token with and without a
cache by context (`contexts`), attention of one layer with its scores in memory and without
(`attention`, GPU only), and the share of allocated cache that is not used, of blocks and of both
contiguous ways of reserving (`bench_kv_waste`).

    python -m benchmarks.bench_ladder --shape llama-3.1-8b --dtype bf16 --json FILE
    python -m benchmarks.publish_ladder FILE     # table and picture into README.md and docs
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import uvloop

from benchmarks import bench_kv_waste, figures
from benchmarks.backend_process import PROGRAM
from benchmarks.ceilings import measured
from benchmarks.ending import CutShort, Ending
from benchmarks.engine_options import START_TIMEOUT_S, engine_options, model_folder, plan_of
from benchmarks.engine_session import engine_session
from benchmarks.ladder_plain import plain_process
from benchmarks.ladder_rungs import EngineRungs, Ladder, Record, Sizes
from benchmarks.roofline import BYTES
from benchmarks.sending import NotMeasured, warm_up
from benchmarks.workloads import Workload, build, fitted
from headrace_backend.config import QUANTIZE_GROUPS

_SHORTER = 4
_WARM_UP_TOKENS = 4096
# Few rows need few graphs, and one answers.
_DRAFTING: dict[str, Any] = {"speculate": "ngram", "speculate_tokens": "auto", "max_num_seqs": 8}
_FORCED = ("benchmarks.forced_backend", "free")
# Requests and rows of the two contiguous ways of reserving, beside blocks.
_WASTE = (128, 32)
_ON_GPU = Sizes(rows=32, requests=64, few=2, many=1000, longest_context=32_768)
_ON_CPU = Sizes(rows=8, requests=24, few=1, many=48, longest_context=512)
# Parts of a rung's name -> fields of EngineConfig.
_LOW_BITS = {
    **{scheme: {"quantize": scheme} for scheme in ("int8", "int4", "fp8", "nf4")},
    **{f"head-{scheme}": {"quantize_head": scheme} for scheme in ("int8", "fp8")},
}


@contextlib.asynccontextmanager
async def _engine(
    ladder: Ladder, settings: dict[str, Any], rows: int, program: Sequence[str] = PROGRAM
) -> AsyncIterator[EngineRungs]:
    """A warm engine, stopped in the end; `rows` is the largest batch that it is warmed with."""
    began_s = time.perf_counter()
    settings = ladder.plan.settings | settings | {"dtype": ladder.dtype}
    async with engine_session(settings, START_TIMEOUT_S, program=program) as session:
        await session.generate([11, 12, 13], 1)
        ready_s = time.perf_counter() - began_s
        await warm_up(session, [ladder.workload], rows, _WARM_UP_TOKENS)
        print(f"  engine ready in {ready_s:.1f} s, warm in {time.perf_counter() - began_s:.1f} s", flush=True)
        yield EngineRungs(ladder, session)


async def climb(ladder: Ladder, record: Record) -> None:
    """All rungs, in order; what was measured by then stays in the record if one fails."""
    sizes, rows = ladder.sizes, ladder.sizes.rows
    below = ladder.first(sizes.requests, concurrency=rows)
    async with plain_process(ladder.plain_job()) as plain:
        # The plain model is loaded while this engine starts.
        without_graphs = {"max_num_seqs": rows} | ({"graph_sizes": "off"} if ladder.on_gpu else {})
        async with _engine(ladder, without_graphs | _beside(ladder), rows) as engine:
            await plain.loaded()
            async for said in plain.measured():
                _take(ladder, record, said)
            record.add(await engine.rung("paged", below))
    whole = ladder.first(sizes.many)
    async with _engine(ladder, {}, ladder.most_rows) as engine:
        if ladder.on_gpu:
            record.add(await engine.rung("graphs", below, single=False))
        record.add(await engine.rung("full", whole))
    for name, settings in (ladder.low_bits | ladder.more_gpus).items():
        async with _engine(ladder, settings, ladder.most_rows) as engine:
            record.add(await engine.rung(name, whole))
    if ladder.acceptance:
        weights, settings = ([("full", {}), *ladder.low_bits.items()])[-1]
        async with _engine(ladder, settings | _DRAFTING, _DRAFTING["max_num_seqs"], _FORCED) as engine:
            record.add(await engine.speculation(weights))


def _beside(ladder: Ladder) -> dict[str, Any]:
    """The first engine's cache is as large as its rows need: the plain model lies beside it."""
    kv_bytes = ladder.plan.shape.kv_elements * BYTES[ladder.dtype]
    longest = 1 << (ladder.workload.longest - 1).bit_length()
    return {"kv_memory": 2 * ladder.sizes.rows * longest * kv_bytes, "max_model_len": longest}


def _take(ladder: Ladder, record: Record, said: dict[str, Any]) -> None:
    """Takes a rung, or what stands beside the rungs."""
    if "rung" not in said:
        record.beside |= said
        return
    said["mfu"] = ladder.mfu(ladder.first(said["requests"]), said["wall_s"])
    record.add(said)


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


def _written(ladder: Ladder, record: Record) -> dict[str, Any]:
    """What is written: the rungs, and what stands beside them."""
    requests, rows = _WASTE
    waste = bench_kv_waste.run(requests, rows, ladder.plan.engine.block_size, 3 + ladder.plan.seed)
    return {
        "name": "ladder",
        "gpu": ladder.ceilings.name if ladder.on_gpu else "",
        "gpus": int(ladder.on_gpu),
        "shape": ladder.plan.shape_name,
        "dtype": ladder.dtype,
        "rows": ladder.sizes.rows,
        "max_num_seqs": ladder.plan.engine.max_num_seqs,
        "shorter": _SHORTER,
        "cut": ladder.workload.cut,
        "seed": ladder.plan.seed,
        "rungs": record.rungs,
        **record.beside,
        "kv_waste": {name: value for name, value in waste.items() if name.startswith("waste")},
        "ceilings": ladder.ceilings.summary(),
    }


def _shorter(workload: Workload) -> Workload:
    """The trace with prompts and answers of a quarter of their tokens, 4 at least."""
    trace = [(ids[: max(4, len(ids) // _SHORTER)], max(4, output // _SHORTER)) for ids, output in workload.trace]
    return dataclasses.replace(workload, trace=trace)


def main() -> int:
    """Command line; 1 if a rung is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine_options(parser)
    parser.add_argument("--low-bits", help=f"rungs after full, with commas: {', '.join(_LOW_BITS)}, int4+head-int8")
    parser.add_argument("--acceptance", type=float, default=0.8, help="that a draft is right; 0: no rung with drafts")
    parser.add_argument(
        "--gpus",
        type=lambda text: [int(part) for part in text.split(",") if part],
        default=[],
        help="numbers of GPUs of the last rungs, with commas: 2,4",
    )
    options = parser.parse_args()
    if options.quant or options.quant_head:
        parser.error("the ladder takes schemes as --low-bits, not as --quant and --quant-head")
    if not 0 <= options.acceptance < 1:
        parser.error(f"--acceptance is a probability from 0 to below 1, is {options.acceptance:g}")
    group = options.quant_group or QUANTIZE_GROUPS[-1]
    try:
        low_bit_rungs(options.low_bits or "", group)
    except ValueError as error:
        parser.error(str(error))
    # The group too is that of one rung alone.
    options.quant_group = None
    with Ending(options.limit_s) as ending, tempfile.TemporaryDirectory(prefix="headrace-shape-") as parent:
        try:
            written = _climbed(parser, options, group, pathlib.Path(parent), ending)
        except CutShort as cut:
            written = {"name": "ladder", "rungs": [], "error": str(cut)}
    print(written.get("error") or json.dumps(written["kv_waste"]), flush=True)
    figures.write_json(written | figures.provenance(options.git), options.json)
    return 1 if "error" in written else 0


def _climbed(
    parser: argparse.ArgumentParser, options: argparse.Namespace, group: int, parent: pathlib.Path, ending: Ending
) -> dict[str, Any]:
    """The record of all rungs that there is time for. Raises CutShort: before the first."""
    given_rows, given_requests = options.rows, options.requests
    # The rows are a rung's business; `full` takes the engine's own default.
    options.rows, options.requests, options.workloads = 0, 0, "mix1000"
    plan = plan_of(parser, options, model_folder(options, parent))
    ceilings = measured(options.device, options.threads)
    sizes = _ON_GPU if ceilings.device == "cuda" else _ON_CPU
    sizes = dataclasses.replace(
        sizes,
        rows=given_rows or sizes.rows,
        requests=given_requests or sizes.requests,
        many=given_requests or sizes.many,
    )
    whole = _shorter(build("mix1000", plan.seed, max(sizes.requests, sizes.many)))
    workload = fitted(whole, plan.shape.vocab_size, plan.shape.max_position_embeddings)
    low_bits = ("fp8" if ceilings.device == "cuda" else "") if options.low_bits is None else options.low_bits
    more_gpus = {f"tp{ranks}": {"tp": ranks} for ranks in options.gpus}
    engines = low_bit_rungs(low_bits, group), more_gpus, options.acceptance
    ladder = Ladder(plan, ceilings, workload, sizes, options.threads, *engines)
    record = Record()
    try:
        uvloop.run(ending.during(lambda _: climb(ladder, record)))
    except (RuntimeError, NotMeasured, CutShort) as error:
        return _written(ladder, record) | {"error": f"{type(error).__name__}: {error}"}
    return _written(ladder, record)


if __name__ == "__main__":
    sys.exit(main())
