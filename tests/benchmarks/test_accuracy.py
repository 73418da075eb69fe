"""What quantizing costs is measured and written down.

The demo model stays close in every scheme, intervals are those of pairs, and the document's table
is replaced and nothing else.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import pytest
from benchmarks import accuracy, accuracy_rows
from benchmarks.accuracy import Case, Result, cases, chosen, heading, paired_difference, replace_table, result_of, table
from benchmarks.accuracy_divergence import Divergence, diverge, load
from benchmarks.accuracy_rows import Row, Rows
from benchmarks.accuracy_tasks import COUNTS, DEMO, SPLITS, documents, questions

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.weights.scheme import Schemes

DOCUMENTS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "accuracy.md"


@pytest.fixture(scope="module")
def plain() -> CausalLM:
    return load(DEMO, None)


ROUNDED = [case for case in cases("weights") if case.written is None]


# Other groups and heads of a scheme are rounded by the same code as the scheme alone.
VARIANTS = [case for case in ROUNDED if "," in case.name]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.slow if case in VARIANTS else ())
        for case in [*ROUNDED, *cases("cache")[1:]]
    ],
)
def test_the_demo_model_stays_close(plain: CausalLM, case: Case) -> None:
    quantize, kv_dtype = case.quantize, case.kv_dtype
    model = plain if case.schemes == Schemes() else load(DEMO, *case.schemes)
    found = diverge(model, plain, documents(4), kv_dtype)
    assert found.tokens > 100
    limits = {
        "off": (1e-9, 1.0) if (kv_dtype, case.head) == ("auto", "off") else (1e-3, 0.98),
        "int8": (1e-3, 0.98),
        "fp8": (1e-3, 0.98),
        "int4": (1e-2, 0.95),
        "nf4": (1e-2, 0.95),
    }
    most, least = limits[quantize]
    assert found.kl > 1e-9 or (quantize, case.head, kv_dtype) == ("off", "off", "auto")
    assert 0 <= found.kl + 1e-9 and found.kl <= most and found.same_choice >= least
    # Of four conversations, with names and keys of tools that no model can foresee.
    assert 1 < found.perplexity < 2


def test_questions_are_of_both_splits_and_as_many_as_asked_for() -> None:
    asked = questions(320)
    assert abs(len(asked) - 320) <= 8 and {question.item.domain for question in asked} == set(COUNTS)
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


DIVERGENCE = Divergence(1000, 1.13, 0.001, 0.99)
ABOUT = {"date": "2026-11-21T10:00:00+00:00", "git": "abc", "cpu": "a processor", "cores": 4, "threads": 1}


def row_of(name: str, right: list[bool]) -> Row:
    return Row(name, 8.1, 0.01, 1056, right, DIVERGENCE, 2.5, ABOUT)


def test_a_row_is_found_again_where_nothing_it_depends_on_has_changed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, other = cases("weights")[1].key(), cases("weights")[3].key()
    rows, row = Rows(tmp_path / "rows", "weights", 100, 10), row_of("int8", [True, False])
    assert rows.find(case) is None
    rows.keep(case, row)
    rows.keep(other, dataclasses.replace(row, name="int4, groups of 32"))
    assert rows.find(case) == row and Rows(tmp_path / "rows", "weights", 100, 10).find(case) == row
    # Another case, number of questions or texts, table, or other code.
    assert rows.find(case | {"group": 64}) is None
    for else_ in (Rows(tmp_path / "rows", "weights", 101, 10), Rows(tmp_path / "rows", "weights", 100, 11)):
        assert else_.find(case) is None
    assert Rows(tmp_path / "rows", "cache", 100, 10).find(case) is None
    with monkeypatch.context() as patch:
        patch.setattr(accuracy_rows, "code_digest", lambda: "other")
        assert rows.find(case) is None
    (file,) = (path for path in (tmp_path / "rows").iterdir() if path.name == "weights-int8.json")
    file.write_text(file.read_text()[:-9])
    assert rows.find(case) is None


def test_the_code_that_a_row_depends_on_is_there() -> None:
    root = accuracy_rows.ROOT
    assert all((root / folder).is_dir() for folder in accuracy_rows._CODE)
    assert all(list(root.glob(pattern)) for pattern in accuracy_rows._FILES)
    assert len(accuracy_rows.code_digest().rpartition(" ")[2]) == 64


def test_rows_are_chosen_by_name_with_the_plain_one_before_them() -> None:
    assert [case.name for case in chosen("weights", ["nf4", "int8"])] == ["off", "int8", "nf4"]
    assert chosen("weights", []) == cases("weights") and chosen("cache", ["fp8"])[0].kv_dtype == "auto"
    assert len({case.name for case in cases("weights")}) == len(cases("weights"))
    with pytest.raises(ValueError, match="there is no row 'int5', only off; int8; fp8"):
        chosen("weights", ["int5"])


def test_only_what_was_not_measured_is(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    class Quick:
        def __init__(self, *sizes: object) -> None:
            pass

        def row(self, case: Case) -> Row:
            measured.append(case.name)
            return row_of(case.name, [True] * 98 + [case.name == "off"] * 2)

    document = tmp_path / "accuracy.md"
    document.write_text(DOCUMENTS.read_text())

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["accuracy", "--rows", str(tmp_path / "rows"), *arguments])
        assert accuracy.main() == 0

    monkeypatch.setattr(accuracy, "Measurement", Quick)
    run("--only", "nf4")
    assert measured == ["off", "nf4"] and "| nf4 | 8.10 | 1.00% | 98.00% | -2.00 ± 2.7" in capsys.readouterr().out
    run("--table", str(document))
    names = [case.name for case in cases("weights")]
    assert sorted(measured) == sorted(names)
    run("--table", str(document))
    assert sorted(measured) == sorted(names)
    text = document.read_text()
    assert all(f"| {name} | 8.10 |" in text for name in names)
    assert "100 questions, 1,000 tokens of text; 2026-11-21, commit abc, on a processor, 1 of 4 cores." in text
    for wrong in (("--only", "int5"), ("--only", "nf4", "--table", str(document))):
        with pytest.raises(SystemExit):
            run(*wrong)
    assert document.read_text() == text


def test_rows_of_several_commits_are_said_to_be() -> None:
    later = dataclasses.replace(row_of("int8", [True]), about=ABOUT | {"git": "def", "date": "2026-11-22"})
    said = heading([row_of("off", [True]), later])
    assert (
        said
        == "1 questions, 1,000 tokens of text; 2026-11-21, 2026-11-22, commit abc, def, on a processor, 1 of 4 cores."
    )


def test_differences_are_those_from_the_plain_row() -> None:
    plain, row = row_of("off", [True] * 100), row_of("int8", [True] * 97 + [False] * 3)
    result = result_of(row, plain)
    assert (result.accuracy, result.difference) == (97.0, pytest.approx(-3.0)) and result.interval > 0
    assert result_of(plain, plain).difference == 0
