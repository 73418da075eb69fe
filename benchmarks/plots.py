"""Plots of result files: throughput against latency, ITL over time, kernel efficiency, the ladder.

Drawn beside each file, named after it.

Owns the drawing only; every number is in the JSON. Needs matplotlib (the `bench` extra).

    python -m benchmarks.plots benchmarks/results/2026-11-21-h200-engine.json
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

Record = dict[str, Any]

DOTS_PER_INCH = 130
# Rungs of the ladder whose requests are served one after the other.
_ONE_AT_A_TIME = ("recompute", "kv_cache")


def _title(record: Record) -> str:
    machine = record.get("gpu") or record.get("cpu", "")
    return " ".join(str(part) for part in (record.get("shape", ""), record.get("dtype", ""), "on", machine) if part)


def throughput_against_latency(records: list[Record]) -> Figure:
    """A point per workload: output tokens per second against the latencies.

    The floor of each is a cross.
    """
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, field, name in zip(figure.subplots(1, 2), ("itl_p50", "ttft_p95"), ("ITL p50", "TTFT p95"), strict=True):
        for record in records:
            if record[field] is None:
                continue
            (drawn,) = axes.plot(record["output_tok_s"], record[field], "o")
            axes.annotate(record["name"], (record["output_tok_s"], record[field]), fontsize=7, rotation=20)
            floor = record.get("floor") or {}
            if floor.get(field):
                axes.plot(floor["output_tok_s"], floor[field], "x", color=drawn.get_color())
        axes.set(xlabel="output tokens/s", ylabel=f"{name}, ms", xscale="log", yscale="log", title=name)
    figure.suptitle(f"{_title(records[0])} (o measured, x floor of the same run)", fontsize=10)
    return figure


def itl_over_time(records: list[Record]) -> Figure:
    """Median and p99 of the inter-token latencies over each workload's course."""
    drawn = [record for record in records if record.get("itl_over_time")]
    figure = Figure(figsize=(11, 2.2 * len(drawn) + 0.6), layout="constrained")
    for axes, record in zip(figure.subplots(len(drawn), 1, squeeze=False)[:, 0], drawn, strict=True):
        times, medians, tails = zip(*record["itl_over_time"], strict=True)
        axes.plot(times, medians, label="p50")
        axes.plot(times, tails, label="p99")
        if (record.get("floor") or {}).get("itl_p50"):
            axes.axhline(record["floor"]["itl_p50"], label="floor p50", linestyle=":", color="gray")
        axes.set(ylabel="ITL, ms", yscale="log", title=record["name"])
        axes.legend(fontsize=7, loc="upper right")
    figure.suptitle(_title(records[0]), fontsize=10)
    return figure


def kernel_efficiency(record: Record) -> Figure:
    """Each kernel's share of the ceiling."""
    cases = [case for case in record["cases"] if "of_ceiling" in case]
    figure = Figure(figsize=(10, 0.22 * len(cases) + 1.2), layout="constrained")
    axes = figure.subplots()
    names = [f"{case['file']}.{case['case']}" for case in cases]
    colors = ["tab:blue" if case["bound"] == "memory" else "tab:orange" for case in cases]
    bars = axes.barh(names, [100 * case["of_ceiling"] for case in cases], color=colors)
    axes.bar_label(bars, [f"{case['us']:.1f} us" for case in cases], fontsize=6, padding=2)
    axes.axvline(100, linestyle=":", color="gray")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.set(
        xlabel="% of the ceiling of the same run (blue: copy bandwidth, orange: matrix rate)", title=_title(record)
    )
    return figure


def ladder(record: Record) -> Figure:
    """The rungs: throughput, and one request at a time beside it."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    throughput, single = figure.subplots(1, 2, width_ratios=(3, 2))
    rungs = [rung for rung in record["rungs"] if rung.get("output_tok_s")]
    bars = throughput.bar([rung["rung"] for rung in rungs], [rung["output_tok_s"] for rung in rungs])
    throughput.bar_label(bars, [f"{rung['output_tok_s']:,.0f}\n{rung['total_gain']:g} x" for rung in rungs], fontsize=7)
    throughput.set(ylabel="useful output tokens/s", yscale="log", title="all requests at once")
    # Of plain rungs one request at a time is what they measure.
    alone = [(rung["rung"], rung["single_tok_s"]) for rung in record["rungs"] if rung.get("single_tok_s")]
    alone = [(rung["rung"], rung["output_tok_s"]) for rung in rungs if rung["rung"] in _ONE_AT_A_TIME] + alone
    bars = single.bar([name for name, _ in alone], [rate for _, rate in alone], color="tab:orange")
    single.bar_label(bars, [f"{rate:,.0f}" for _, rate in alone], fontsize=7)
    single.set(title="one request at a time")
    for axes in (throughput, single):
        axes.tick_params(axis="x", labelrotation=30, labelsize=8)
        axes.margins(y=0.2)
    figure.suptitle(_title(record), fontsize=10)
    return figure


def figures_of(value: Any) -> Iterator[tuple[str, Figure]]:
    """The plots that a result file gives, each with a name.

    Workloads that were cut short have none.
    """
    if isinstance(value, list):
        value = [record for record in value if not record.get("incomplete")]
    if isinstance(value, list) and value and "itl_p50" in value[0]:
        yield "latency", throughput_against_latency(value)
        if any(record.get("itl_over_time") for record in value):
            yield "itl", itl_over_time(value)
    elif isinstance(value, dict) and any("of_ceiling" in case for case in value.get("cases", ())):
        yield "kernels", kernel_efficiency(value)
    elif isinstance(value, dict) and "rungs" in value:
        yield "ladder", ladder(value)


def main() -> None:
    """Draws what each file holds; says so where that is nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=pathlib.Path, nargs="+", help="JSON files of benchmarks")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the plots; default: beside each file")
    parser.add_argument("--type", choices=("svg", "png"), default="svg")
    options = parser.parse_args()
    for file in options.files:
        drawn = list(figures_of(json.loads(file.read_text())))
        for name, figure in drawn:
            path = (options.out or file.parent) / f"{file.stem}-{name}.{options.type}"
            figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Date": None} if options.type == "svg" else None)
            print(path)
        if not drawn:
            print(f"{file}: nothing to draw")


if __name__ == "__main__":
    main()
