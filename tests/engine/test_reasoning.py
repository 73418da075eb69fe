"""Outputs that reason first: the budget holds, and a form begins behind the section."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import TOKEN_BYTES, Reader, request
from tests.engine.masked_harness import MaskedHarness, small_compiler
from tests.support.examples import examples

from headrace_backend.engine.events import EndReason
from headrace_backend.engine.request import EngineRequest
from headrace_backend.structured_output.compiler import GrammarCompiler
from headrace_backend.structured_output.output_place import CompiledGrammar
from headrace_backend.structured_output.reasoning_place import behind_reasoning
from headrace_request.reasoning import Reasoning
from headrace_request.structured_output import StructuredOutput

REGEX = "c(ab){2,9}"


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = small_compiler()
    yield made
    made.close()


@pytest.fixture(scope="module")
def answer(compiler: GrammarCompiler) -> CompiledGrammar:
    return compiler.compile(StructuredOutput("regex", REGEX)).result()


def find(tokens: list[int], marker: tuple[int, ...], start: int) -> int | None:
    """Position behind the first marker from `start` on."""
    size = len(marker)
    ends = [at + size for at in range(start, len(tokens) - size + 1) if tuple(tokens[at : at + size]) == marker]
    return ends[0] if ends else None


def section_of(reasoning: Reasoning, tokens: list[int]) -> tuple[int | None, int | None]:
    """Positions at which an output's section begins and the answer behind it; None: it does not."""
    begins = 0 if reasoning.begins_inside else find(tokens, reasoning.start_ids, 0)
    return begins, None if begins is None else find(tokens, reasoning.end_ids, begins)


def allowed(reasoning: Reasoning, tokens: list[int]) -> list[int] | None:
    """What may follow: once the budget is spent, the next token of the end marker, or behind it."""
    left = reasoning.max_tokens
    begins, answers = section_of(reasoning, tokens)
    if begins is None or left is None:
        return None
    if answers is None:
        inside = tokens[begins:]
        if len(inside) < left:
            return None
        marker = reasoning.end_ids
        sizes = [size for size in range(len(marker)) if tuple(inside[len(inside) - size :]) == marker[:size]]
        return [marker[max(sizes)]]
    if answers - begins > left:
        num_closing = len(tokens) - answers
        return [reasoning.closing_ids[num_closing]] if num_closing < len(reasoning.closing_ids) else None
    if not reasoning.repeats:
        return None
    num_left = left - (answers - begins - len(reasoning.end_ids))
    rest = msgspec.structs.replace(reasoning, max_tokens=num_left, begins_inside=False)
    return allowed(rest, tokens[answers:])


few = st.integers(1, 3)
reasonings = st.builds(
    Reasoning,
    st.lists(few, min_size=1, max_size=2).map(tuple),
    st.lists(few, min_size=1, max_size=4).map(tuple),
    st.integers(0, 20),
    st.booleans(),
    st.lists(few, max_size=3).map(tuple),
    st.booleans(),
)


def asked(reasoning: Reasoning, grammar: CompiledGrammar | None = None, **fields: Any) -> EngineRequest:
    return request(fields.pop("prompt", 8), reasoning=reasoning, grammar=behind_reasoning(reasoning, grammar), **fields)


def tokens_of(reader: Reader, output: int = 0) -> list[int]:
    return reader.tokens.get(output, [])


@hypothesis.settings(max_examples=examples(150), deadline=None)
@hypothesis.given(
    st.lists(
        st.tuples(reasonings, st.integers(1, 20), st.integers(1, 40), st.integers(1, 3), st.integers(0, 6)),
        min_size=1,
        max_size=6,
    ),
    st.integers(9, 30),
    st.sets(st.integers(1, 40), max_size=2),
    st.sampled_from([None, 2, 4, 9]),
    st.data(),
)
def test_a_budget_holds_whatever_happens(
    rows: list[tuple[Reasoning, int, int, int, int]],
    num_blocks: int,
    deaths: set[int],
    tokens_per_row: int | None,
    data: st.DataObject,
) -> None:
    """Rows are preempted, lost, forked and drafted for."""
    harness = MaskedHarness(num_blocks, tokens_per_row=tokens_per_row, max_num_seqs=4, model_len=96)
    harness.choose_count = lambda most: data.draw(st.integers(1, most))
    arrivals = [
        (asked(reasoning, prompt=[5] * 8 + [length], max_tokens=max_tokens, n=n), pause)
        for reasoning, length, max_tokens, n, pause in rows
    ]
    for spec, reader in harness.serve(arrivals, deaths):
        for output in range(spec.asked.n):
            assert spec.asked.reasoning is not None
            follows = functools.partial(allowed, spec.asked.reasoning)
            assert tokens_of(reader, output) == expected_tokens(spec, output, follows)


@pytest.mark.parametrize("budget", [0, 1, 7, None])
@pytest.mark.parametrize("drafts", [None, 4])
def test_a_form_begins_behind_the_section_and_not_before(
    answer: CompiledGrammar, budget: int | None, drafts: int | None
) -> None:
    for seed in range(5):
        reasoning = Reasoning((7,), (8, 9), budget, begins_inside=True)
        harness = MaskedHarness(tokens_per_row=drafts)
        spec = asked(reasoning, answer, max_tokens=200, seed=seed, token_ids=[0], min_tokens=3)
        reader = harness.add(spec)
        harness.run()
        tokens = tokens_of(reader)
        _, answers = section_of(reasoning, tokens)
        assert 0 not in tokens[: answers or len(tokens)], "no stop token ends an output before its answer"
        if reader.ends[0].reason is EndReason.LENGTH:
            # Markers of two tokens are rare among the tokens that are drawn.
            assert budget is None
            continue
        assert answers is not None and (budget is None or answers <= budget + 2)
        text = b"".join(TOKEN_BYTES[token] for token in tokens[answers:]).decode()
        assert re.fullmatch(REGEX, text)


def test_an_output_that_begins_without_the_marker_has_its_form_from_there(answer: CompiledGrammar) -> None:
    reasoning = Reasoning((7, 4), (8,), 5)
    kinds = set()
    for seed in range(40):
        harness = MaskedHarness()
        reader = harness.add(asked(reasoning, answer, max_tokens=80, seed=seed, token_ids=[0]))
        harness.run()
        tokens = tokens_of(reader)
        begins, answers = section_of(reasoning, tokens)
        reasons = begins == 2
        assert reasons or begins is None or begins > 2
        assert not reasons or answers is not None
        text = b"".join(TOKEN_BYTES[token] for token in (tokens[answers:] if reasons else tokens)).decode()
        assert re.fullmatch(REGEX, text)
        kinds.add(reasons)
    assert kinds == {False, True}


def test_reasoning_within_its_budget_waits_for_no_mask() -> None:
    harness = MaskedHarness()
    harness.add(asked(Reasoning((23,), (22,), 12, begins_inside=True), max_tokens=12, seed=3))
    harness.run()
    assert harness.num_masks == 0
    harness.add(asked(Reasoning((23,), (22,), 11, begins_inside=True), max_tokens=60, seed=3))
    harness.run()
    # The forced token, and nothing behind it.
    assert harness.num_masks == 1


def test_drafts_stop_before_the_budget_and_go_on_behind_the_section() -> None:
    harness = MaskedHarness(tokens_per_row=4)
    reasoning = Reasoning((23,), (22,), 20, begins_inside=True)
    reader = harness.add(asked(reasoning, max_tokens=90, seed=3))
    harness.run()
    assert reader.done is not None and reader.done.accepted_tokens > 40
    assert tokens_of(reader)[20] == 22


def test_a_resumed_output_goes_on_where_its_budget_stands() -> None:
    reasoning = Reasoning((7,), (8, 9), 6, begins_inside=True)
    for emitted, forced in (([3, 3, 3], None), ([3] * 6, 8), ([3, 3, 3, 3, 3, 8], 9), ([8, 9] + [3] * 9, None)):
        harness = MaskedHarness()
        spec = asked(reasoning, max_tokens=20, seed=1, emitted=(np.array(emitted, np.int32),), admitted=True)
        reader = harness.add(spec)
        harness.run()
        expected = expected_tokens(spec, 0, lambda tokens: allowed(reasoning, tokens))
        assert emitted + tokens_of(reader) == expected
        assert forced is None or tokens_of(reader)[0] == forced


@pytest.mark.parametrize(
    ("options", "field"),
    [({"bad_words": [[8]]}, "spec.stop.bad_words"), ({"min_tokens": 4, "token_ids": [8]}, "spec.stop.min_tokens")],
)
def test_a_request_that_bans_the_end_of_its_reasoning_is_at_fault(options: dict[str, Any], field: str) -> None:
    harness = MaskedHarness()
    reader = harness.add(asked(Reasoning((7,), (8,), 3, begins_inside=True), max_tokens=9, **options))
    beside = harness.add(request(9, 9))
    harness.run()
    end = reader.ends[0]
    assert end.reason is EndReason.ERROR and end.broken is not None and end.broken.field == field
    assert len(tokens_of(reader)) == 3
    assert beside.ends[0].reason is EndReason.LENGTH


def test_stop_tokens_end_reasoning_once_the_output_is_long_enough() -> None:
    harness = MaskedHarness()
    options: dict[str, Any] = {"min_tokens": 3, "token_ids": [8]}
    reader = harness.add(asked(Reasoning((7,), (8,), 3, begins_inside=True), max_tokens=9, **options))
    harness.run()
    assert reader.ends[0].reason is EndReason.STOP and tokens_of(reader)[3:] == [8]


def test_the_answer_begins_as_it_must_behind_a_section_that_was_ended() -> None:
    reasoning = Reasoning((7,), (8,), 3, closing_ids=(4, 5, 6), begins_inside=True)
    harness = MaskedHarness()
    reader = harness.add(asked(reasoning, max_tokens=40, seed=3))
    harness.run()
    assert tokens_of(reader)[3:7] == [8, 4, 5, 6]
    assert harness.num_masks == 1


@pytest.mark.parametrize("death", range(1, 14))
def test_a_worker_that_is_lost_within_an_end_marker_has_it_written_again(death: int) -> None:
    reasoning = Reasoning((1,), (8, 9, 10, 11), 4, begins_inside=True)
    spec = asked(reasoning, max_tokens=20, seed=3)
    [(_, reader)] = MaskedHarness().serve([(spec, 14)], {death})
    assert tokens_of(reader) == expected_tokens(spec, 0, lambda tokens: allowed(reasoning, tokens))


def test_a_form_begins_behind_the_closing_tokens(answer: CompiledGrammar) -> None:
    reasoning = Reasoning((7,), (8,), 3, closing_ids=(4, 5), begins_inside=True)
    harness = MaskedHarness()
    reader = harness.add(asked(reasoning, answer, max_tokens=90, seed=3, token_ids=[0]))
    harness.run()
    assert tokens_of(reader)[3:6] == [8, 4, 5]
    assert re.fullmatch(REGEX, b"".join(TOKEN_BYTES[token] for token in tokens_of(reader)[6:]).decode())
