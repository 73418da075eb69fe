"""What quantizing costs: the demo model stays close in every scheme, intervals are those of pairs, and the document's table is replaced and nothing else."""

from __future__ import annotations

import pathlib

import pytest
from benchmarks.accuracy import Case, Result, paired_difference, replace_table, table, variants
from benchmarks.accuracy_divergence import Divergence, diverge, load
from benchmarks.accuracy_tasks import DEMO, SPLITS, documents, questions

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.weights.scheme import Scheme

DOCUMENTS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "accuracy.md"


@pytest.fixture(scope="module")
def plain() -> CausalLM:
    return load(DEMO, None)


@pytest.mark.parametrize("case", [*variants("weights"), *variants("cache")[1:]], ids=lambda case: case.name)
def test_the_demo_model_stays_close(plain: CausalLM, case: Case) -> None:
    quantize, kv_dtype = case.quantize, case.kv_dtype
    model = plain if quantize == "off" else load(DEMO, Scheme.named(quantize, case.group))
    found = diverge(model, plain, documents(4), kv_dtype)
    assert found.tokens > 100
    limits = {
        "off": (1e-9, 1.0) if kv_dtype == "auto" else (1e-3, 0.98),
        "int8": (1e-3, 0.98),
        "fp8": (1e-3, 0.98),
        "int4": (1e-2, 0.95),
    }
    most, least = limits[quantize]
    assert kv_dtype == "auto" or found.kl > 1e-9
    assert 0 <= found.kl + 1e-9 and found.kl <= most and found.same_choice >= least
    assert 1 < found.perplexity < 1.5


def test_questions_are_of_both_splits_and_as_many_as_asked_for() -> None:
    asked = questions(320)
    assert abs(len(asked) - 320) <= 8 and len({question.item.domain for question in asked}) == 8
    assert len(SPLITS) == 2 and questions(320) == asked


def test_the_interval_is_that_of_the_pairs() -> None:
    before, right = [True] * 98 + [False] * 2, [True] * 95 + [False] * 5
    mean, half = paired_difference(right, before)
    assert mean == pytest.approx(-3.0)
    # Three of a hundred pairs differ: sqrt(0.03 * 0.97 / 99) * 1.96.
    assert half == pytest.approx(100 * 1.96 * (0.03 * 0.97 / 99) ** 0.5)
    assert paired_difference(before, before) == (0.0, 0.0)


def test_the_table_is_replaced_and_nothing_else(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "accuracy.md"
    path.write_text(DOCUMENTS.read_text())
    result = Result("int8", 8.1, 0.01, 100, 97.5, 1056, -0.5, 0.25, Divergence(1000, 1.13, 0.001, 0.99))
    replace_table(path, table([result], "About.", "weights"), "weights")
    once = path.read_text()
    assert "| int8 | 8.10 | 1.00% | 97.50% | -0.50 ± 0.25 | 1.1300 | 0.00100 | 99.00% |" in once
    replace_table(path, table([result], "About.", "weights"), "weights")
    assert path.read_text() == once
    begin, end = "<!-- table: benchmarks.accuracy -->", "<!-- end of table -->"
    outside = []
    for text in (once, DOCUMENTS.read_text()):
        before, _, rest = text.partition(begin)
        outside.append((before, rest.partition(end)[2]))
    assert outside[0] == outside[1]
    replace_table(path, table([result], "About.", "cache"), "cache")
    assert "| int8 | 1,056 | 97.50% | -0.50 ± 0.25 | 1.1300 | 0.00100 | 99.00% |" in path.read_text()
    assert path.read_text().partition(end)[0] == once.partition(end)[0]
    path.write_text("no marks")
    with pytest.raises(ValueError, match="no place for the table"):
        replace_table(path, "", "weights")
