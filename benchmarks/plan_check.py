"""What `headrace plan` predicts of engines that were measured, beside the measurements.

It makes the table of docs/operations.md from result files of `bench_engine` and `bench_serving`.

    python -m benchmarks.plan_check benchmarks/results/2026-11-21-h200-engine.json ...

Workloads are taken for closed loops of the requests that are open at once, of the mean lengths;
users1000 for what it is. Records of other workloads, shapes or cards are left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.workloads import USERS_SECONDS, build
from headrace_supervisor.plan.capacity import GPUS, Demand, Gpu, Prediction, RankSizes, predict
from headrace_supervisor.plan.command import engine_sizes

# Rows of a step on a GPU.
_ROWS = 512
_SHAPES = ("llama-3.1-8b", "llama-3.1-70b")


class Line(NamedTuple):
    """One row of the table."""

    model: str
    tp: int
    workload: str
    unit: str
    predicted: float
    measured: float


def demand_of(record: dict[str, Any]) -> Demand | None:
    """Whom an engine served; None for workloads that are none of the plan's."""
    if record.get("name") not in ("single", "burst256", "mix1000", "users1000"):
        return None
    seconds, think_s = record.get("seconds", USERS_SECONDS), record.get("think_s", 0.0)
    workload = build(record["name"], record["seed"], seconds=seconds, think_s=think_s)
    prompt, output = (
        round(statistics.mean(column)) for column in zip(*((len(p), o) for p, o in workload.trace), strict=True)
    )
    if workload.users:
        return Demand(record["users"], prompt, output, workload.users.think_s)
    return Demand(min(workload.concurrency or len(workload.trace), _ROWS), prompt, output, 0.0)


@functools.cache
def _sizes(shape: str, tp: int, quantize: str, head: str, kv_dtype: str, gpu: Gpu) -> RankSizes:
    engine = {"tp": tp, "quantize": quantize, "quantize_head": head, "kv_dtype": kv_dtype, "load": "dummy"}
    return engine_sizes(shape, engine, gpu)


def line_of(record: dict[str, Any]) -> Line | None:
    """The plan's word and the engine's; None where the plan says nothing, or of other results."""
    card = next((gpu for name, gpu in GPUS.items() if name in record.get("gpu", "").lower()), None)
    if card is None or record.get("shape") not in _SHAPES or (demand := demand_of(record)) is None:
        return None
    settings, tp = record["engine"], record["gpus"]
    # A folder that was quantized already says so as "compressed-tensors fp8".
    scheme = record["quant"].split()[-1] if record["quant"] else "off"
    bits = scheme, settings.get("quantize_head", "off"), settings.get("kv_dtype", "auto")
    found = predict(_sizes(record["shape"], tp, *bits, card), card, demand)
    names = [record["shape"], "bf16" if bits[0] == "off" else bits[0]]
    names += [f"output layer {bits[1]}"] * (bits[1] != "off") + [f"cache {bits[2]}"] * (bits[2] != "auto")
    return Line(", ".join(names), tp, record["name"], *_compared(record, demand, found))


def _compared(record: dict[str, Any], demand: Demand, found: Prediction) -> tuple[str, float, float]:
    """Unit, predicted, measured: what the workload is about."""
    if record["name"] == "single":
        return "ITL ms", found.itl_ms, record["itl_p50"]
    if record["name"] == "users1000":
        return "answer s", found.answer_s, record["e2e_p50"] / 1e3
    return "output tok/s", demand.users * demand.output / found.answer_s, record["output_tok_s"]


def table(lines: list[Line]) -> Iterator[str]:
    """The lines as a Markdown table."""
    yield "| model | tp | workload | | predicted | measured | measured / predicted |"
    yield "|---|---|---|---|---|---|---|"
    for line in lines:
        digits = 0 if line.predicted >= 1000 else 2
        shown = (f"{value:,.{digits}f}" for value in (line.predicted, line.measured))
        yield (
            f"| {line.model} | {line.tp} | {line.workload} | {line.unit} | {' | '.join(shown)} | "
            f"{line.measured / line.predicted:.2f} |"
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", type=pathlib.Path, nargs="+", help="JSON files; records of other benchmarks are left out"
    )
    values = [json.loads(file.read_text()) for file in parser.parse_args().files]
    records = [record for value in values for record in (value if isinstance(value, list) else [value])]
    lines = [line for record in records if (line := line_of(record)) is not None]
    print("\n".join(table(sorted(lines, key=lambda line: (line.model, line.workload, line.tp)))))


if __name__ == "__main__":
    main()
