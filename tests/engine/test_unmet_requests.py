"""Requests that can't be met, as shows while they are generated: their error is their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.engine.harness import TOKEN_BYTES, Reader, request
from tests.engine.masked_harness import GuessingHarness, MaskedHarness, small_compiler

from headrace_backend.engine.events import EndReason
from headrace_backend.structured_output.compiler import GrammarCompiler
from headrace_backend.structured_output.output_place import CompiledGrammar
from headrace_request.structured_output import choice


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = small_compiler()
    yield made
    made.close()


def repeated(compiler: GrammarCompiler, token: int, count: int) -> CompiledGrammar:
    """The grammar of one text: a token so often."""
    return compiler.compile(choice([count * TOKEN_BYTES[token].decode()])).result()


def tokens_of(reader: Reader) -> list[int]:
    return reader.tokens.get(0, [])


@pytest.mark.parametrize(("word", "num_drawn"), [([3], 0), ([3, 3], 1), ([3, 3, 3, 3], 3)])
def test_bad_words_that_leave_nothing_of_a_form_are_the_requests_fault(
    compiler: GrammarCompiler, word: list[int], num_drawn: int
) -> None:
    harness = MaskedHarness()
    only = repeated(compiler, 3, 4)
    reader = harness.add(request(4, 9, grammar=only, bad_words=[word]))
    beside = harness.add(request(5, 9, grammar=only, bad_words=[[4]]))
    harness.run()
    end = reader.ends[0]
    assert (end.reason, end.error, len(tokens_of(reader))) == (EndReason.ERROR, "", num_drawn)
    assert end.broken is not None and end.broken.field == "spec.stop.bad_words"
    assert beside.ends[0].reason is EndReason.STOP


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_bans_are_known_behind_drafts_that_are_right(compiler: GrammarCompiler, num_right: int) -> None:
    answer = [3] * num_right + [6] * 9
    harness = GuessingHarness({1: {0: answer}}, 1.0)
    only = repeated(compiler, 3, 4)
    reader = harness.add(request(4, 9, grammar=only, seed=1, bad_words=[[3, 3, 3, 3]]))
    harness.run()
    assert len(tokens_of(reader)) == 3
    assert reader.ends[0].broken is not None and reader.ends[0].broken.field == "spec.stop.bad_words"


def test_logits_that_are_no_numbers_are_never_the_requests_fault(compiler: GrammarCompiler) -> None:
    harness = MaskedHarness()
    only = repeated(compiler, 3, 9)
    reader = harness.add(request(4, 9, grammar=only, bad_words=[[4]]))
    while not tokens_of(reader):
        harness.step()
    harness.worker.non_finite_rows = {0}
    harness.run()
    end = reader.ends[0]
    assert (end.reason, end.error, end.broken) == (EndReason.ERROR, "the model's output was not a number", None)
