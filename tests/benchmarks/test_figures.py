"""What a benchmark says of itself."""

from __future__ import annotations

import pathlib

import pytest
from benchmarks import figures


def test_other_words_and_other_names_have_another_digest(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("a")
    two.write_text("b")
    before = figures.files_digest([one, two])
    assert figures.files_digest([two, one]) == before != figures.files_digest([one])
    two.write_text("c")
    changed = figures.files_digest([one, two])
    three = two.rename(tmp_path / "three.py")
    assert len({before, changed, figures.files_digest([one, three])}) == 3


def test_a_run_names_the_code_that_it_measures_whatever_commit_it_is_given() -> None:
    about = figures.provenance("another commit")
    assert about["git"] == "another commit" and figures.product_digest().startswith(about["code"])
