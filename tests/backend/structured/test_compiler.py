"""Grammars compiled with the demo model's vocabulary: cache, refusals, places, masks."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from array import array
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest
from benchmarks.made_schemas import make_schema
from llguidance import LLMatcher, LLParserLimits
from tests.support.processes import wait_until
from tests.support.running_server import DEMO

from headrace_backend.engine.errors import RequestRefused
from headrace_backend.engine.output_grammar import COMPLETE, MASKED, MaskState
from headrace_backend.engine.scheduling.masks import MaskCall, MaskJob
from headrace_backend.step.masks import StepMasks
from headrace_backend.structured_output import compiler as compiler_module
from headrace_backend.structured_output import output_place
from headrace_backend.structured_output.compiler import GrammarCompiler, grammar_compiler
from headrace_backend.structured_output.mask_pool import MaskPool
from headrace_backend.structured_output.output_place import CompiledGrammar, OutputPlace
from headrace_backend.structured_output.vocabulary import folder_encode, make_tokenizer, read_vocabulary
from headrace_model_folder import ModelFolder
from headrace_request.structured_output import StructuredOutput, choice

FOLDER = ModelFolder.open(DEMO)
VOCAB = FOLDER.config.vocab_size
END = frozenset(FOLDER.generation_defaults.eos_token_ids)
TOKEN_BYTES = FOLDER.token_table.token_bytes if FOLDER.token_table is not None else ()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = grammar_compiler(FOLDER)
    assert made is not None
    yield made
    made.close()


def schema_of(schema: Any) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(schema))


def place_of(compiler: GrammarCompiler, asked: StructuredOutput) -> OutputPlace:
    return compiler.compile(asked).result().new_output()


def allowed(words: np.ndarray) -> list[int]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB]).tolist()


def generated(place: OutputPlace, draw: random.Random, most: int = 400) -> str | None:
    """A text that random draws from masks make; None: it came to no end."""
    tokens, words = array("i"), np.empty(-(-VOCAB // 32), np.int32)
    for _ in range(most):
        outcome = place.fill_mask(words, max(len(tokens) - 1, 0), tokens[max(len(tokens) - 1, 0) :], END, 0)
        assert outcome is MASKED, outcome.error
        # What ends the text is preferred, so that most do end.
        ids = allowed(words)
        ending = [token for token in ids if token in END]
        if ending:
            return b"".join(TOKEN_BYTES[token] or b"" for token in tokens).decode()
        tokens.append(draw.choice(ids))
    return None


@pytest.mark.parametrize("num_schemas", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_texts_drawn_from_masks_keep_their_schemas(compiler: GrammarCompiler, num_schemas: int) -> None:
    num_whole = 0
    for seed in range(num_schemas):
        schema = make_schema(seed)
        text = generated(place_of(compiler, schema_of(schema)), random.Random(seed))
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            num_whole += 1
    assert num_whole >= 0.75 * num_schemas


@pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
def test_json_may_be_written_as_programs_write_it(compiler: GrammarCompiler, indent: int | str | None) -> None:
    words = np.empty(-(-VOCAB // 32), np.int32)
    place = place_of(compiler, StructuredOutput("json_object"))
    text = json.dumps({"a": [1, {"b": None}, []], "c": {}}, indent=indent)
    encode = folder_encode(FOLDER)
    assert place.fill_mask(words, 0, array("i", encode(text)), END, 0).state is MaskState.MASKED
    assert set(allowed(words)) >= END
    for text in ('{"a":   1}', '{"a":\n\n1}', '{"a":\n' + 21 * " " + "1}"):
        place = place_of(compiler, StructuredOutput("json_object"))
        assert place.fill_mask(words, 0, array("i", encode(text)), END, 0).state is MaskState.FAILED


def test_a_compiled_form_is_kept_and_its_outputs_are_apart(compiler: GrammarCompiler) -> None:
    asked = choice(["one", "two"])
    assert compiler.compile(asked) is compiler.compile(choice(["one", "two"]))
    one, other, words = place_of(compiler, asked), place_of(compiler, asked), np.empty(-(-VOCAB // 32), np.int32)
    assert one.fill_mask(words, 0, array("i"), END, 0) is MASKED
    first = [token for token in allowed(words) if TOKEN_BYTES[token] == b"o"]
    assert one.fill_mask(words, 0, array("i", first), END, 0) is MASKED
    assert {TOKEN_BYTES[token] for token in allowed(words)} <= {b"n", b"ne"}
    assert other.fill_mask(words, 0, array("i"), END, 0) is MASKED
    assert {(TOKEN_BYTES[token] or b"")[:1] for token in allowed(words)} == {b"o", b"t"}


def test_the_end_waits_for_the_shortest_length_unless_nothing_else_can_follow(compiler: GrammarCompiler) -> None:
    words, digit = np.empty(-(-VOCAB // 32), np.int32), array("i", [TOKEN_BYTES.index(b"7")])
    digits = StructuredOutput("regex", "[0-9]+")
    place_of(compiler, digits).fill_mask(words, 0, digit, frozenset({50}), 9)
    assert 50 not in allowed(words) and not END & set(allowed(words))
    place_of(compiler, digits).fill_mask(words, 0, digit, frozenset({50}), 0)
    assert 50 in allowed(words) and not END & set(allowed(words))
    assert place_of(compiler, choice(["7"])).fill_mask(words, 0, digit, END, 9) is COMPLETE
    assert place_of(compiler, choice(["7"])).fill_mask(words, 0, digit, frozenset(), 0) is COMPLETE


def test_tokens_that_do_not_follow_the_form_fail_their_own_output(compiler: GrammarCompiler) -> None:
    words = np.empty(-(-VOCAB // 32), np.int32)
    place = place_of(compiler, choice(["one", "two"]))
    outcome = place.fill_mask(words, 0, array("i", [TOKEN_BYTES.index(b"7")]), END, 0)
    assert outcome.state is MaskState.FAILED and "can't go on" in outcome.error and outcome.broken is None
    assert place.fill_mask(words, 0, array("i"), END, 0).state is MaskState.FAILED


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"step_max_items": 1}, "Too many items"),
        ({"max_lexer_states": 3}, "too many states"),
        ({"max_items_in_row": 1}, "Current row has"),
    ],
)
def test_a_form_that_takes_more_than_the_librarys_limits_is_the_requests_fault(
    limits: dict[str, int], named: str
) -> None:
    vocabulary = read_vocabulary(FOLDER)
    assert vocabulary is not None
    tokenizer = make_tokenizer(vocabulary, folder_encode(FOLDER))
    grammar = LLMatcher.grammar_from_lark('start: s\ns: s s | "a" | "b" s "c"')
    matcher = LLMatcher(tokenizer, grammar, limits=LLParserLimits(**limits), log_level=0)
    place, words = CompiledGrammar(matcher, END).new_output(), np.empty(-(-VOCAB // 32), np.int32)
    outcome = place.fill_mask(words, 0, array("i"), END, 0)
    if outcome is MASKED:
        outcome = place.fill_mask(words, 0, array("i", [TOKEN_BYTES.index(b"a")]), END, 0)
    assert outcome.broken is not None and not outcome.error
    assert outcome.broken.field == "spec.structured_output" and named in outcome.broken.description


def test_a_form_whose_masks_are_beyond_their_budget_is_the_requests_fault(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_place, "FREE_NS", 0)
    monkeypatch.setattr(output_place, "_MAX_EXCESS_NS", 0)
    place, words = place_of(compiler, choice(["one"])), np.empty(-(-VOCAB // 32), np.int32)
    outcome = place.fill_mask(words, 0, array("i"), END, 0)
    assert outcome.broken is not None and not outcome.error
    assert outcome.broken.field == "spec.structured_output" and "computing" in outcome.broken.description


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (schema_of({"properties": {"a/b": {"items": {"uniqueItems": True}}}}), "at /properties/a~1b/items: Unimpl"),
        (schema_of({"type": "integer", "minimum": 2, "maximum": 1}), "Unsatisfiable"),
        (schema_of(False), "Unsatisfiable"),
        (schema_of({"$ref": "#"}), "no text has this form"),
        (schema_of({"$ref": "http://example.com/other.json"}), "not present"),
        (schema_of({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}), "Unimplemented"),
        (StructuredOutput("regex", "("), "regex parse error"),
        (StructuredOutput("grammar", "start: nothing"), "nothing"),
        (
            StructuredOutput("json_schema", '{"items": {"uniqueItems": true}}', 'start: "a" @answer'),
            "at /items: Unimplemented",
        ),
        (StructuredOutput("json_schema", '{"$ref": "#"}', 'start: "a" @answer'), "no text has this form"),
        (StructuredOutput("regex", "a", "start: @nothing"), "can't be compiled"),
    ],
)
def test_what_can_not_be_compiled_is_refused_with_its_place(
    compiler: GrammarCompiler, asked: StructuredOutput, named: str
) -> None:
    with pytest.raises(RequestRefused) as refused:
        compiler.compile(asked).result()
    [violation] = refused.value.violations
    assert violation.field == f"spec.structured_output.{asked.form}" and named in violation.description


def test_a_form_may_stand_within_a_grammar(compiler: GrammarCompiler) -> None:
    form = StructuredOutput("choice", '["7"]', 'start: "1" @answer')
    place, words = place_of(compiler, form), np.empty(-(-VOCAB // 32), np.int32)
    digits = array("i", [TOKEN_BYTES.index(b"1"), TOKEN_BYTES.index(b"7")])
    assert place.fill_mask(words, 0, digits[:1], frozenset(), 0) is MASKED
    assert place.fill_mask(words, 1, digits[1:], frozenset(), 0) is COMPLETE
    assert compiler.compile(form) is not compiler.compile(choice(["7"]))


def test_a_trial_that_is_killed_is_refused_and_the_next_one_is_tried_anew(compiler: GrammarCompiler) -> None:
    place_of(compiler, choice(["before"]))
    module = "headrace_backend.structured_output.trial"
    trials = [child for child in psutil.Process().children() if module in child.cmdline()]
    assert trials
    for trial in trials:
        os.kill(trial.pid, signal.SIGSEGV)
        wait_until(lambda trial=trial: trial.status() == psutil.STATUS_ZOMBIE, 60, "the trial's end")
    refused = 0
    for text in ("a", "b", "c", "d"):
        try:
            place_of(compiler, choice([text]))
        except RequestRefused as refusal:
            assert "256 MiB, or nests too deeply" in refusal.message
            refused += 1
    assert refused == len(trials)


@pytest.fixture
def own_compiler() -> Iterator[GrammarCompiler]:
    made = grammar_compiler(FOLDER)
    assert made is not None
    yield made
    made.close()


def test_grammars_that_nobody_asks_for_make_room(
    own_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_KEPT", 3)
    forms = [choice([str(number)]) for number in range(5)]
    compiled = [own_compiler.compile(form) for form in forms]
    for each in compiled:
        each.result()
    again = own_compiler.compile(forms[4])
    assert again is compiled[4]
    own_compiler.make_room()
    assert own_compiler.compile(forms[3]) is compiled[3]
    assert own_compiler.compile(forms[0]) is not compiled[0]


def test_requests_of_known_forms_look_at_no_other_grammar(
    own_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_compiler.compile(choice(["known"])).result()
    own_compiler.make_room()
    looked_at: list[StructuredOutput] = []

    def num_bytes(asked: StructuredOutput, compiled: object) -> int:
        looked_at.append(asked)
        return 0

    monkeypatch.setattr(compiler_module, "_num_bytes", num_bytes)
    own_compiler.compile(choice(["known"])).result()
    own_compiler.make_room()
    assert not looked_at
    own_compiler.compile(choice(["another"])).result()
    own_compiler.make_room()
    assert len(looked_at) == 2


def test_grammars_take_so_much_memory_together_however_short_they_are(
    own_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_KEPT_BYTES", 100 << 20)
    forms = [StructuredOutput("regex", f"a{{{count}}}") for count in range(99_000, 99_005)]
    compiled = []
    for form in forms:
        compiled.append(own_compiler.compile(form))
        assert compiled[-1].result().num_bytes > 20 << 20
        own_compiler.make_room()
    kept = [form for form, each in zip(forms, compiled, strict=True) if own_compiler.compile(form) is each]
    assert 1 <= len(kept) <= 4 and kept == forms[-len(kept) :]


def test_a_form_that_nobody_waits_for_is_not_compiled_and_none_that_is_makes_room_for_waiting_ones(
    own_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_KEPT", 2)
    known = own_compiler.compile(choice(["known"]))
    known.result()
    go_on, plain, began = threading.Event(), own_compiler._compile, []

    def held(asked: StructuredOutput) -> CompiledGrammar:
        began.append(asked)
        assert go_on.wait(60)
        return plain(asked)

    monkeypatch.setattr(own_compiler, "_compile", held)
    forms = [choice([str(number)]) for number in range(6)]
    compiled = [own_compiler.compile(form) for form in forms]
    wait_until(lambda: len(began) == 2)
    for form in forms:
        own_compiler.give_up(form)
    assert [each.cancelled() for each in compiled] == [False, False, True, True, True, True]
    own_compiler.make_room()
    assert own_compiler.compile(choice(["known"])) is known
    # Whoever asks again has it compiled.
    again = own_compiler.compile(forms[5])
    go_on.set()
    assert again is not compiled[5] and again.result().num_bytes >= 0
    assert len(began) == 3


def test_a_pool_computes_the_masks_of_many_rows_as_one_thread_does(compiler: GrammarCompiler) -> None:
    forms = [choice(["one", "two"]), StructuredOutput("regex", "[0-9]+"), choice(["7"])]
    seven = array("i", [TOKEN_BYTES.index(b"7")])

    def job(sample: int) -> MaskJob:
        place = place_of(compiler, forms[sample % 3])
        return MaskJob(sample, place, 0, seven[: sample % 3 > 0], frozenset(), 0, False)

    jobs, pool, heard = [job(sample) for sample in range(40)], MaskPool(VOCAB), []
    pool.start(MaskCall(9, 0, jobs, [], False), *[lambda call, what, *_: heard.append(what)] * 2)
    wait_until(lambda: len(heard) == 2, 60, "masks of all rows")
    masks, outcomes = heard
    assert isinstance(masks, StepMasks) and masks.step_id == 9
    assert [outcome.state for outcome in outcomes] == [
        MaskState.COMPLETE if sample % 3 == 2 else MaskState.MASKED for sample in range(40)
    ]
    assert masks.samples.tolist() == [sample for sample in range(40) if sample % 3 != 2]
    for sample, row in zip(masks.samples.tolist(), masks.masks, strict=True):
        alone = np.empty_like(row)
        job(sample).grammar.fill_mask(alone, 0, seven[: sample % 3 > 0], frozenset(), 0)  # type: ignore[attr-defined]
        np.testing.assert_array_equal(row, alone)
    pool.close()
