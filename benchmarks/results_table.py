"""Figures beside their floors, as people read them in a terminal."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_watch import clock_line

# Field, unit, and whether more is better.
_ROWS = (
    ("output_tok_s", "tok/s", True),
    ("input_tok_s", "tok/s", True),
    ("ttft_p50", "ms", False),
    ("ttft_p95", "ms", False),
    ("itl_p50", "ms", False),
    ("itl_p99", "ms", False),
    ("tpot_p50", "ms", False),
    ("e2e_p50", "ms", False),
    ("e2e_p95", "ms", False),
    ("e2e_p99", "ms", False),
)


def share_of_floor(measured: float | None, floor: float | None, more_is_better: bool) -> float | None:
    """How near a figure is to its floor: 1 is there. None where either is missing."""
    if not measured or not floor:
        return None
    return measured / floor if more_is_better else floor / measured


def lines(result: dict[str, Any]) -> list[str]:
    """One workload's figures, each with its floor and the share of it that was reached."""
    floor = result["floor"] or {}
    shown = [
        f"{result['name']}: {result['requests']} requests in {result['wall_s']:.2f} s, goodput {result['goodput']:.1%}"
    ]
    if result.get("unanswered"):
        shown.append(f"  {result['unanswered']} more were given up unanswered: they are in no percentile")
    for name, unit, more_is_better in _ROWS:
        if result[name] is None:
            continue
        share = share_of_floor(result[name], floor.get(name), more_is_better)
        beside = "" if share is None else f"  floor {floor[name]:>12,.2f}  {share:>7.1%}"
        shown.append(f"  {name:<13}{result[name]:>12,.2f} {unit:<5}{beside}")
    if result.get("held_plans"):
        shown.append(
            f"  plans        {result['held_plans']:>12,} of {result['step_count']:,} held back, "
            f"{result['late_plans']:,} late"
        )
    if result.get("card"):
        shown.append(f"  card         {clock_line(result['card'])}")
    return shown
