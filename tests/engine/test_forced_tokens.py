"""Tokens that a grammar leaves no choice about are computed side by side, and change no answer."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.engine.harness import EOS, Reader, request
from tests.engine.masked_harness import MaskedHarness, small_compiler
from tests.support.examples import examples

from headrace_backend.engine.events import EndReason
from headrace_backend.engine.request import EngineRequest, Recording
from headrace_backend.structured_output.output_place import CompiledGrammar
from headrace_backend.structured_output.reasoning_place import behind_reasoning
from headrace_facts import facts, step_records, token_steps
from headrace_request.reasoning import Reasoning
from headrace_request.structured_output import StructuredOutput

FORMS = [
    "(a|cc)(abcabcabcabcabcabc|bbabbabbabb|c)(a|b){1,9}",
    "((a|b)abababababab){1,5}c?",
    "ababababcababab",
    "[abc]{3,12}(cccc|aaaa)b",
    "(cabcab|bab)*",
]
SKIPPED = {"max_drafts": -1}
DRAWN = {"max_drafts": 0}


@pytest.fixture(scope="module")
def grammars() -> Iterator[list[CompiledGrammar]]:
    compiler = small_compiler()
    yield [compiler.compile(StructuredOutput("regex", form)).result() for form in FORMS]
    compiler.close()


def tokens_of(reader: Reader) -> dict[int, list[int]]:
    return reader.tokens


def ends_of(reader: Reader) -> dict[int, tuple[Any, ...]]:
    return {index: (end.reason, end.stop_token_id, end.stop_string_index) for index, end in reader.ends.items()}


def answer(spec: EngineRequest, **options: Any) -> Reader:
    """What an output is where each of its tokens is drawn, alone."""
    harness = MaskedHarness(**options)
    reader = harness.add(spec)
    harness.run()
    assert harness.worker.num_forced == 0
    return reader


options_of_rows = st.fixed_dictionaries(
    {
        "form": st.integers(0, len(FORMS) - 1),
        "length": st.integers(1, 20),
        "max_tokens": st.integers(1, 40),
        "n": st.integers(1, 3),
        "seed": st.integers(0, 9),
        "min_tokens": st.integers(0, 12),
        "strings": st.sampled_from([(), (b"cab",), (b"bb", b"aaa")]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "num_logprobs": st.sampled_from([-1, 0, 2]),
        "reasons": st.booleans(),
        "pause": st.integers(0, 6),
    }
)


def asked(grammars: list[CompiledGrammar], options: dict[str, Any], **fields: Any) -> EngineRequest:
    values = {name: value for name, value in options.items() if name not in ("form", "length", "reasons", "pause")}
    values["min_tokens"] = min(values["min_tokens"], values["max_tokens"])
    reasoning = Reasoning((), (7, 8), 3, begins_inside=True) if options["reasons"] else None
    grammar = behind_reasoning(reasoning, grammars[options["form"]])
    ends = [] if options["form"] == 1 else [EOS]
    return request(
        [5] * 8 + [options["length"]], reasoning=reasoning, grammar=grammar, token_ids=ends, **values, **fields
    )


@hypothesis.settings(max_examples=examples(120), deadline=None)
@hypothesis.given(
    st.lists(options_of_rows, min_size=1, max_size=6),
    st.integers(9, 30),
    st.sets(st.integers(1, 40), max_size=2),
    st.sampled_from([None, 4]),
    st.sampled_from([1, 2]),
)
def test_answers_are_those_of_which_each_token_was_drawn(
    grammars: list[CompiledGrammar],
    rows: list[dict[str, Any]],
    num_blocks: int,
    deaths: set[int],
    tokens_per_row: int | None,
    pp: int,
) -> None:
    """Whatever is preempted, lost, forked, penalized or stopped."""
    pp = 1 if tokens_per_row else pp
    options = {"tokens_per_row": tokens_per_row, "max_num_seqs": 4, "model_len": 96}
    harness = MaskedHarness(num_blocks, pp=pp, max_num_batched_tokens=16, **options)
    arrivals = [(asked(grammars, row, **SKIPPED), row["pause"]) for row in rows]
    for row, (_, reader) in zip(rows, harness.serve(arrivals, deaths), strict=True):
        expected = answer(asked(grammars, row, **DRAWN), **options)
        assert tokens_of(reader) == tokens_of(expected)
        assert ends_of(reader) == ends_of(expected)


def test_what_must_come_takes_one_step(grammars: list[CompiledGrammar]) -> None:
    steps, tokens = {}, {}
    for name, way in (("skipped", SKIPPED), ("drawn", DRAWN)):
        harness = MaskedHarness()
        reader = harness.add(request(9, 60, grammar=grammars[1], seed=4, token_ids=[EOS], **way))
        harness.run()
        assert reader.done is not None
        steps[name], tokens[name] = reader.done.step_count, tokens_of(reader)
        assert bool(harness.worker.num_forced) == (name == "skipped")
    assert tokens["skipped"] == tokens["drawn"]
    assert 2 * steps["skipped"] < steps["drawn"]


def test_telemetry_counts_what_must_come_and_knows_its_step(grammars: list[CompiledGrammar]) -> None:
    harness = MaskedHarness()
    records = harness.engine.steps.reader()
    span = facts.SpanContext("ab" * 16, "cd" * 8)
    reader = harness.add(request(9, 60, grammar=grammars[2], span=span, recording=Recording()))
    harness.run()
    num_tokens = len(tokens_of(reader)[0])
    # Steps that are settled behind the output's end draw what is dropped.
    steps = step_records.decode(records.take())
    assert reader.done is not None
    assert steps["forced_tokens"].sum() == harness.worker.num_forced > 3
    assert steps["num_prefill_tokens"].tolist() == [9] + [0] * (len(steps) - 1)
    [of_output] = facts.decode_trace(reader.done.engine_trace).token_steps
    ids = token_steps.step_ids(of_output).tolist()
    assert ids == np.repeat(steps["step_id"], steps["num_samples"]).tolist()[:num_tokens]


def test_drafts_that_are_lost_are_counted_once() -> None:
    harness = MaskedHarness()
    records = harness.engine.steps.reader()
    harness.add(request(9, 4))
    for lost in (0, 3, 3, 7):
        harness.plan()
        result = harness.worker.run()
        result.lost_drafts = lost
        harness.engine.settle(result)
    assert step_records.decode(records.take())["lost_drafts"].tolist() == [0, 3, 0, 4]


def test_the_log_probability_of_what_must_come_is_0(grammars: list[CompiledGrammar]) -> None:
    harness = MaskedHarness()
    reader = harness.add(request(9, 60, grammar=grammars[2], num_logprobs=2))
    harness.run()
    tokens = tokens_of(reader)[0]
    skipped = [entry for entry, token in zip(reader.logprobs, tokens, strict=True) if entry == (0.0, 1, [token])]
    assert len(skipped) == harness.worker.num_forced > 3
    assert reader.ends[0].reason is EndReason.STOP


def test_the_plan_waits_for_masks_that_may_say_what_must_come(grammars: list[CompiledGrammar]) -> None:
    harness = MaskedHarness()
    harness.add(request(9, 60, grammar=grammars[2]))
    beside = harness.add(request(10, 3))
    assert harness.engine.plan() is not None
    [call] = harness.engine.take_mask_calls()
    assert harness.engine.plan() is None
    harness.engine.masks_done(call, [job.grammar.fill_mask(_words(), *job[2:7]) for job in call.jobs])  # type: ignore[attr-defined]
    plan = harness.engine.plan()
    assert plan is not None and plan.forward.forced_counts.size == 1
    assert beside.done is None


def _words() -> np.ndarray:
    return np.empty(1, np.int32)


def test_bad_words_have_each_token_drawn(grammars: list[CompiledGrammar]) -> None:
    harness = MaskedHarness()
    harness.add(request(9, 60, grammar=grammars[2], bad_words=[[3, 4]]))
    harness.run()
    assert harness.worker.num_forced == 0


def test_a_place_that_looked_ahead_gives_the_same_masks_again(grammars: list[CompiledGrammar]) -> None:
    for grammar in grammars:
        ahead, plain = grammar.new_output(), grammar.new_output()
        tokens: array[int] = array("i")
        draw = np.random.default_rng(3)
        num_given = 0
        for position in range(30):
            words, expected = _words(), _words()
            outcome = plain.fill_mask(expected, max(position - 1, 0), tokens[-1:], frozenset({EOS}), 4)
            first = min(num_given, position)
            found = ahead.fill_mask(words, first, tokens[first:], frozenset({EOS}), 4, True)
            num_given = position + len(found.forced or ())
            assert found.state is outcome.state
            np.testing.assert_array_equal(words, expected)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if found.state.name != "MASKED" or EOS in allowed:
                break
            tokens.append(int(draw.choice(allowed)))
