"""How a model gets faster with more GPUs: table and plot for 1, 2, 4 and 8 ranks.

Each figure from the result files stands beside its roofline, and what was not measured is marked.

    python -m benchmarks.scaling benchmarks/results/*h200*.json --markdown docs/scaling.md --plot
    build/scaling.png

Takes records of `bench_engine` (single, burst256, mix1000) and of `bench_communication`; of several
about the same engine and workload the youngest, without those that were measured to compare. A
roofline is the floor that a result states: the workload served at the ceilings of its own run,
ranks sharing all work evenly and exchanging nothing. For a number of ranks that was not measured it
is that of the nearest one that was, shared among as many as there would be.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks.engine_records import is_typical, weights_name

RANKS = (1, 2, 4, 8)
# Workload -> what it is about, its unit, and whether more is better.
_FIGURES = {
    "single": ("itl_p50", "ITL p50, ms", False),
    "burst256": ("output_tok_s", "output tok/s", True),
    "mix1000": ("output_tok_s", "output tok/s", True),
}
_DOTS_PER_INCH = 130
_MISSING = "not measured"


class Subject(NamedTuple):
    """What is compared over numbers of ranks."""

    gpu: str
    model: str
    workload: str


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A figure and its roofline."""

    measured: float | None
    floor: float
    date: str = ""


def collected(records: Iterable[dict[str, Any]]) -> dict[Subject, dict[int, Point]]:
    """Records by subject and ranks.

    Subjects that were measured with one number of ranks only are left out, and what went through
    services.
    """
    found: dict[Subject, dict[int, Point]] = {}
    for record in records:
        if record.get("name") not in _FIGURES or not record.get("gpus") or not record["floor"] or "through" in record:
            continue
        field, _, _ = _FIGURES[record["name"]]
        points = found.setdefault(Subject(record["gpu"], _model(record), record["name"]), {})
        point = Point(record[field], record["floor"][field], record["date"])
        if record["gpus"] not in points or points[record["gpus"]].date < point.date:
            points[record["gpus"]] = point
    return {subject: _completed(subject, points) for subject, points in sorted(found.items()) if max(points) > 1}


def _model(record: dict[str, Any]) -> str:
    parts = [record["shape"], weights_name(record)]
    parts += [f"cache {record['kv_dtype']}"] if record["kv_dtype"] != record["dtype"] else []
    return " ".join(parts)


def _completed(subject: Subject, points: dict[int, Point]) -> dict[int, Point]:
    more_is_better = _FIGURES[subject.workload][2]
    completed = {}
    for ranks in RANKS:
        nearest = min(points, key=lambda known: abs(known - ranks))
        share = ranks / nearest if more_is_better else nearest / ranks
        completed[ranks] = points.get(ranks, Point(None, points[nearest].floor * share))
    return completed


def exposed(records: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[int, float]]:
    """Exposed communication in us of a step, by model and step, then by ranks."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for record in sorted((r for r in records if r.get("name") == "communication"), key=lambda r: str(r["date"])):
        bits = record["quant"] if record["quant"] != "off" else "bf16"
        for case in record["cases"]:
            found.setdefault((f"{record['shape']} {bits}", case["step"]), {})[record["ranks"]] = case["exposed_us"]
    return found


def table(subjects: dict[Subject, dict[int, Point]], communication: dict[Any, dict[int, float]]) -> Iterator[str]:
    """The subjects as a Markdown table."""
    yield "| model | workload | | 1 GPU | 2 | 4 | 8 |"
    yield "|---|---|---|---|---|---|---|"
    for subject, points in subjects.items():
        _, unit, more_is_better = _FIGURES[subject.workload]
        cells = " | ".join(_cell(points[ranks], more_is_better) for ranks in RANKS)
        yield f"| {subject.model} | {subject.workload} | {unit} | {cells} |"
    for (model, step), by_ranks in communication.items():
        cells = " | ".join(f"{by_ranks[ranks]:,.0f}" if ranks in by_ranks else _MISSING for ranks in RANKS[1:])
        yield f"| {model} | step {step} | exposed communication, us | 0 | {cells} |"


def _cell(point: Point, more_is_better: bool) -> str:
    digits = 0 if point.floor >= 100 else 2
    if point.measured is None:
        return f"{_MISSING} (roofline {point.floor:,.{digits}f})"
    share = point.measured / point.floor if more_is_better else point.floor / point.measured
    return f"**{point.measured:,.{digits}f}** of {point.floor:,.{digits}f} ({share:.0%})"


def page(records: list[dict[str, Any]]) -> str:
    """The table with what must be said of it."""
    subjects = collected(records)
    cards = ", ".join(sorted({subject.gpu for subject in subjects}))
    dates = sorted(point.date[:10] for points in subjects.values() for point in points.values() if point.date)
    words = "\n".join(
        [
            "# Scaling over GPUs",
            "",
            "`python -m benchmarks.scaling benchmarks/results/*h200*.json --markdown docs/scaling.md` made this",
            f"page: {cards}, {dates[0]} to {dates[-1]}. Bold is measured. Behind it stand the roofline (the",
            "same workload at the ceilings of the same run, with nothing exchanged between ranks) and the share",
            "of it that was reached. Where nothing was measured only a roofline is given, that of the nearest",
            "number of ranks shared among these. Products in FP8 are held against the rate of bf16, which they",
            "can beat. Exposed communication is what a step takes longer than the same kernels do without",
            "communication between ranks (`python -m benchmarks.bench_communication`); steps are named",
            "ROWSxCONTEXT.",
        ]
    )
    return "\n".join([words, "", *table(subjects, exposed(records)), ""])


def plot(subjects: dict[Subject, dict[int, Point]]) -> Figure:
    """Each subject's figures over the ranks: measured as dots, rooflines as dotted lines.

    Rooflines are hollow where nothing was measured.
    """
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    for axes, workload in zip(figure.subplots(1, len(_FIGURES)), _FIGURES, strict=True):
        for subject, points in subjects.items():
            if subject.workload != workload:
                continue
            known = [(ranks, point.measured) for ranks, point in points.items() if point.measured is not None]
            (drawn,) = axes.plot(*zip(*known, strict=True), "o-", label=subject.model)
            color = drawn.get_color()
            axes.plot(RANKS, [points[ranks].floor for ranks in RANKS], ":", color=color)
            missing = [(ranks, point.floor) for ranks, point in points.items() if point.measured is None]
            if missing:
                axes.plot(*zip(*missing, strict=True), "o", color=color, markerfacecolor="none")
        axes.set(xlabel="GPUs", ylabel=_FIGURES[workload][1], xscale="log", yscale="log", title=workload)
        axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
        axes.minorticks_off()
        axes.legend(fontsize=7)
    figure.suptitle("dots: measured; dotted: roofline; hollow: not measured", fontsize=10)
    return figure


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", type=pathlib.Path, nargs="+", help="JSON files; records of other benchmarks are left out"
    )
    parser.add_argument("--markdown", type=pathlib.Path, help="where the page goes; default: printed")
    parser.add_argument("--plot", type=pathlib.Path, help="where the plot goes (.png or .svg)")
    options = parser.parse_args()
    records: list[dict[str, Any]] = []
    for file in options.files:
        value = json.loads(file.read_text())
        found = value if isinstance(value, list) else [value]
        records += [each for each in found if is_typical(each, file.name)]
    if not (subjects := collected(records)):
        parser.error("no file has a record of more than one GPU")
    if options.plot:
        plot(subjects).savefig(options.plot, dpi=_DOTS_PER_INCH)
    if options.markdown:
        options.markdown.write_text(page(records))
    else:
        print(page(records))


if __name__ == "__main__":
    main()
