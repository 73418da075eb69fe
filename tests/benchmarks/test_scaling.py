"""The scaling table: measured figures beside their rooflines, and what was not measured said so."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest
from benchmarks import plan_check
from benchmarks.scaling import Subject, collected, page, plot

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"


def record(ranks: int, itl: float, floor: float, **more: Any) -> dict[str, Any]:
    about = {"name": "single", "gpu": "Card", "gpus": ranks, "shape": "m", "quant": "", "dtype": "bf16"}
    return about | {"kv_dtype": "bf16", "itl_p50": itl, "floor": {"itl_p50": floor}, "date": "2026-01-01"} | more


def test_what_was_not_measured_has_a_roofline_alone() -> None:
    records = [record(1, 4.0, 3.2), record(4, 2.0, 0.8), record(4, 1.6, 0.8, date="2026-01-02")]
    [points] = collected(records).values()
    assert [points[ranks].measured for ranks in (1, 2, 4, 8)] == [4.0, None, 1.6, None]
    assert [points[ranks].floor for ranks in (1, 2, 4, 8)] == [3.2, 1.6, 0.8, 0.4]
    shown = page(records)
    assert "| **4.00** of 3.20 (80%) | not measured (roofline 1.60) | **1.60** of 0.80 (50%) |" in shown


def test_what_went_through_services_is_no_engines_figure() -> None:
    records = [record(1, 4.0, 3.2), record(2, 2.0, 1.6), record(1, 5.0, 3.2, date="2026-01-02", through="grpc")]
    [points] = collected(records).values()
    assert points[1].measured == 4.0


def test_exposed_communication_stands_below() -> None:
    about = {"name": "communication", "gpu": "Card", "shape": "m", "quant": "fp8", "date": "2026-01-01"}
    reported = [about | {"ranks": ranks, "cases": [{"step": "1x640", "exposed_us": 100.4 * ranks}]} for ranks in (2, 4)]
    assert "| m fp8 | step 1x640 | exposed communication, us | 0 | 201 | 402 | not measured |" in page(
        [record(1, 4.0, 3.2), record(2, 3.0, 1.6), *reported]
    )


def test_one_number_of_ranks_alone_scales_nothing() -> None:
    assert not collected([record(1, 4.0, 3.2), record(0, 5.0, 3.0)])


def test_kept_results_can_be_drawn() -> None:
    records = [found for file in RESULTS.glob("*h200-ranks*.json") for found in json.loads(file.read_text())]
    subjects = collected(records)
    assert Subject("NVIDIA H200", "llama-3.1-8b bf16", "single") in subjects
    assert len(plot(subjects).axes) == 3


def test_the_plan_leaves_out_results_of_other_benchmarks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        RESULTS / f"2026-11-{name}.json" for name in ("21-h200-profile", "22-h200-host-telemetry", "24-h200-ladder")
    ]
    monkeypatch.setattr(sys, "argv", ["plan_check", *map(str, files)])
    plan_check.main()
    assert capsys.readouterr().out.count("\n") == 2, "the table's head alone"
