"""The newest figures of the engine in docs/figures.md, of the results that stand in the repository.

A row is a model with its weights on so many cards, a column a workload, and a cell what the newest
run of both gave, which links to its JSON. Owns which runs are shown and the words of the table; the
numbers are those of `bench_engine`. Runs with settings of their own, and those whose file says that
they were measured to compare, are left out: they are in docs/experiments.md.

    python -m benchmarks.publish_figures
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from benchmarks.engine_records import is_typical, weights_name
from benchmarks.placed_text import placed
from benchmarks.results_table import share_of_floor

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PAGE = "docs/figures.md"
# Older runs are of code that has little left.
_SHOWN_SINCE = "2026-11-24"

Record = dict[str, Any]


class _Column(NamedTuple):
    """A workload's figure."""

    workload: str
    title: str
    field: str
    unit: str
    more_is_better: bool


_COLUMNS = (
    _Column("single", "one request at a time: between tokens", "itl_p50", " ms", False),
    _Column("burst256", "256 requests at once, tok/s", "output_tok_s", "", True),
    _Column("mix1000", "1,000 requests at once, tok/s", "output_tok_s", "", True),
    _Column("prefill8k", "32 prompts of 8,000, prompt tok/s", "input_tok_s", "", True),
)


class _Row(NamedTuple):
    """What was measured: rows of the table stand in this order."""

    gpu: str
    num_gpus: int
    shape: str
    weights: str


class Run(NamedTuple):
    """A workload's record and the name of its file."""

    record: Record
    file: str


def runs(folder: pathlib.Path) -> Iterator[Run]:
    """All workloads in the folder's results of `bench_engine`."""
    for path in sorted(folder.glob("*engine*.json")):
        records = json.loads(path.read_text())
        for record in records if isinstance(records, list) else ():
            if "floor" in record and "shape" in record:
                yield Run(record, path.name)


def table(found: Iterable[Run]) -> str:
    """The newest figure of each row and column, as a table of Markdown."""
    newest: dict[_Row, dict[str, Run]] = {}
    for run in sorted(found, key=lambda run: run.record["date"]):
        if _is_shown(run):
            newest.setdefault(_row(run.record), {})[run.record["name"]] = run
    columns = [column.title for column in _COLUMNS]
    lines = [f"| cards | model | weights | {' | '.join(columns)} |", "|---" * (3 + len(columns)) + "|"]
    for row in sorted(sorted(newest), key=lambda row: row.gpu, reverse=True):
        cells = [_cell(newest[row].get(column.workload), column) for column in _COLUMNS]
        if any(cells):
            cards = f"{row.num_gpus} {row.gpu}" if row.num_gpus > 1 else row.gpu
            lines.append(f"| {cards} | {row.shape} | {row.weights} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _is_shown(run: Run) -> bool:
    record = run.record
    return is_typical(record, run.file) and record["date"] >= _SHOWN_SINCE and record["kv_dtype"] == record["dtype"]


def _row(record: Record) -> _Row:
    gpu = record["gpu"].removeprefix("NVIDIA ").split(" ")[0]
    return _Row(gpu, record.get("gpus") or 1, record["shape"], weights_name(record))


def _cell(run: Run | None, column: _Column) -> str:
    """A figure that links to its file, with its share of the floor of the same run."""
    if run is None:
        return ""
    value = run.record[column.field]
    shown = f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
    link = f"[{shown}{column.unit}](../benchmarks/results/{run.file})"
    # Floors without that ceiling count products of FP8 at the rate of bf16.
    counts_fp8 = "fp8" not in weights_name(run.record) or "fp8_gemm_m8192_tflop_s" in run.record["ceilings"]
    share = share_of_floor(value, run.record["floor"].get(column.field), column.more_is_better)
    # One request's time is its bytes', whatever products take.
    is_shown = share is not None and (counts_fp8 or column.workload == "single")
    return f"{link}, {share:.0%}" if is_shown else link


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=_ROOT, help="of the repository that is written to")
    root = parser.parse_args().root
    page = root / _PAGE
    page.write_text(placed(page.read_text(), "newest", table(runs(root / "benchmarks" / "results"))))
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
