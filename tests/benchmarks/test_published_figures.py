"""Which runs the table of the newest figures shows, and that the page has that table."""

from __future__ import annotations

import pathlib
from typing import Any

from benchmarks.publish_figures import Run, runs, table

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(file: str = "2026-11-30-h200-engine.json", **fields: Any) -> Run:
    record = {
        "name": "burst256",
        "gpu": "NVIDIA H200",
        "gpus": 1,
        "shape": "llama-3.1-8b",
        "dtype": "bf16",
        "kv_dtype": "bf16",
        "quant": "",
        "date": "2026-11-30T10:00:00+00:00",
        "command": "python -m benchmarks.bench_engine --load dummy",
        "output_tok_s": 1000.4,
        "floor": {"output_tok_s": 1250.5},
        "ceilings": {},
        "cut": False,
    }
    return Run(record | fields, file)


def figures(*found: Run) -> list[str]:
    """The rows of a table, without its head."""
    return table(found).splitlines()[2:]


def test_the_newest_run_is_shown_with_its_file_and_its_share_of_the_floor() -> None:
    newer, older = run("b.json"), run("a.json", date="2026-11-29T10:00:00+00:00", output_tok_s=2000.0)
    [row] = figures(newer, older)
    assert row == "| H200 | llama-3.1-8b | bf16 |  | [1,000](../benchmarks/results/b.json), 80% |  |  |"


def test_runs_that_were_made_to_compare_are_left_out() -> None:
    assert figures(run("2026-11-30-h200-engine-before.json")) == []
    assert figures(run(command="bench_engine --set expert_parallel=true")) == []
    assert figures(run(cut=True)) == figures(run(kv_dtype="fp8")) == figures(run(date="2026-11-21")) == []


def test_fp8_has_a_share_only_of_floors_that_count_its_products() -> None:
    assert "80%" not in figures(run(quant="fp8"))[0]
    assert "80%" in figures(run(quant="fp8", ceilings={"fp8_gemm_m8192_tflop_s": 1250.0}))[0]


def test_weights_are_named_by_what_the_command_says_of_them() -> None:
    command = 'bench_engine --quant int4 --set quantize_activations="fp8"'
    assert "| int4, int8 head, fp8 activations |" in figures(run(quant="int4", quant_head="int8", command=command))[0]
    assert "| fp8 in blocks |" in figures(run(quant="fp8 fp8", command="bench_engine --files fp8_blocks"))[0]


def test_cards_come_newest_first_and_fewest_first() -> None:
    cards = [run(gpu="NVIDIA H100 80GB HBM3"), run(gpus=4), run()]
    assert [row.split(" | ")[0] for row in figures(*cards)] == ["| H200", "| 4 H200", "| H100"]


def test_the_page_has_the_table_of_the_results_in_the_repository() -> None:
    made = table(runs(_ROOT / "benchmarks" / "results"))
    assert made in (_ROOT / "docs/figures.md").read_text(), "run python -m benchmarks.publish_figures"
