"""The result of `headrace bench` for people and machines.

Tables, JSON, and a plot of throughput against latency.

Owns the layout. The plot needs matplotlib, which the `bench` extra brings; it is imported by name
when a plot is wanted, so that nothing else needs it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import pathlib
from typing import Any

import rich.box
import rich.console
import rich.table

from headrace_supervisor.bench.figures import PERCENTILES, PointFigures, Result
from headrace_supervisor.bench.load import Length, Point
from headrace_supervisor.bench.sending import BenchError

PLOT_TYPES = (".png", ".svg", ".pdf")
# From here on the client's own work shows in the figures.
_BUSY_CLIENT = 0.8
_DOTS_PER_INCH = 150


def check_plot(path: pathlib.Path) -> None:
    """Raises BenchError if a plot can't be written there, before anything is measured."""
    if path.suffix.lower() not in PLOT_TYPES:
        raise BenchError(f"--plot {path}: the name must end in {', '.join(PLOT_TYPES)}")
    if not path.parent.is_dir():
        raise BenchError(f"--plot {path}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: pip install 'headrace-server[bench]'")


def report(result: Result, *, as_json: bool) -> None:
    """Prints the result, for people or for machines."""
    if as_json:
        print(json.dumps(dataclasses.asdict(result), indent=2))
        return
    console = rich.console.Console(highlight=False)
    load = result.load
    console.print(f"{result.model} ({result.revision}) on {result.device}, {result.server}")
    console.print(f"prompts of {_length(load.prompt)}, answers of {_length(load.output)}")
    console.print(_latencies(result.points[0]) if len(result.points) == 1 else _levels(result))
    for point in result.points:
        _remarks(console, point)
    if len(result.points) == 1:
        point = result.points[0]
        console.print(
            f"{point.output_tok_s:,.0f} output tokens/s, {point.input_tok_s:,.0f} prompt tokens/s over "
            f"{point.wall_s:.2f} s; goodput {point.goodput:.1%}"
        )
    console.print(
        f"goodput: TTFT at most {load.ttft_limit_ms:g} ms and TPOT at most {load.tpot_limit_ms:g} ms", style="dim"
    )


def _length(length: Length) -> str:
    return (
        f"{length.tokens} tokens"
        if not length.spread
        else f"about {length.tokens} tokens (log-normal, {length.spread:g})"
    )


def _label(point: PointFigures) -> str:
    return Point(point.concurrency, point.rate).label


def _latencies(point: PointFigures) -> rich.table.Table:
    """One level of load: a row per latency."""
    table = rich.table.Table(box=rich.box.SIMPLE)
    table.add_column(f"{_label(point)}, ms")
    for percent in PERCENTILES:
        table.add_column(f"p{percent}", justify="right")
    for name, row in point.percentiles_ms.items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    return table


def _levels(result: Result) -> rich.table.Table:
    """Several levels: a row each."""
    table = rich.table.Table(
        box=rich.box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
        caption="milliseconds, p50/p99",
        caption_justify="right",
    )
    for title in ("load", "tok/s", "TTFT", "ITL", "TPOT", "e2e", "goodput"):
        table.add_column(title, justify="right", no_wrap=True)
    for point in result.points:
        pairs = [_pair(point.percentiles_ms.get(name)) for name in ("ttft", "itl", "tpot", "e2e")]
        table.add_row(_label(point), f"{point.output_tok_s:,.0f}", *pairs, f"{point.goodput:.1%}")
    return table


def _pair(row: dict[str, float] | None) -> str:
    return "-" if row is None else "/".join(f"{row[key]:,.{0 if row[key] >= 100 else 1}f}" for key in ("p50", "p99"))


def _remarks(console: rich.console.Console, point: PointFigures) -> None:
    if point.failed:
        console.print(f"{_label(point)}: {point.failed} requests failed: {point.errors}", style="red")
    if point.client_busy > _BUSY_CLIENT:
        console.print(
            f"{_label(point)}: this client was busy {point.client_busy:.0%} of the time; the server may do better than "
            "these figures",
            style="yellow",
        )


def plot(result: Result, path: pathlib.Path) -> None:
    """Draws throughput against latency and latency against load.

    Raises BenchError if the file can't be written.
    """
    figure: Any = importlib.import_module("matplotlib.figure").Figure(figsize=(10, 4), layout="constrained")
    against, over = figure.subplots(1, 2)
    labels = [_label(point) for point in result.points]
    throughput = [point.output_tok_s for point in result.points]
    for name in ("ttft", "tpot"):
        for key in ("p50", "p99"):
            values = [point.percentiles_ms.get(name, {}).get(key) for point in result.points]
            against.plot(throughput, values, marker="o", label=f"{name.upper()} {key}")
    for x, label in zip(throughput, labels, strict=True):
        note = against.annotate(label, (x, 0), xycoords=("data", "axes fraction"), rotation=90, va="bottom", fontsize=7)
        note.set_in_layout(False)
    against.set(xlabel="output tokens/s", ylabel="ms", yscale="log", title="throughput against latency")
    over.plot(labels, throughput, marker="o", color="tab:blue", label="output tokens/s")
    over.set(xlabel="load", ylabel="output tokens/s", title="throughput and goodput")
    good = over.twinx()
    good.plot(labels, [100 * point.goodput for point in result.points], marker="s", color="tab:green", label="goodput")
    good.set(ylabel="goodput, %", ylim=(0, 105))
    against.legend(fontsize=8)
    figure.suptitle(f"{result.model} on {result.device}", fontsize=10)
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise BenchError(f"--plot {path}: {error.strerror}") from None
