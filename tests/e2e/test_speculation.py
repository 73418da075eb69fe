"""A server that drafts answers as one that does not, in fewer steps.

What may be asked, and how answers are compared; test_speculation_matrix.py asks all of it of every
drafter. Both servers compute in fp32, where no two logits of these answers are so near that a batch
of another shape turns them round.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from benchmarks.made_schemas import long_schema
from tests.support.processes import wait_until
from tests.support.rpc import Transcript, generate, greedy, idle_load
from tests.support.running_server import RunningServer, refused, running_server

from headrace.v1 import generation_pb2

FP32 = ("--dtype", "fp32", "--device", "cpu")
NGRAM = ("--speculate", "ngram", "--speculate-tokens", "4")
# Blocks for a part of what is asked at once, so that some are preempted.
CRAMPED = ("--num-blocks", "28", "--max-model-len", "256", "--max-num-seqs", "8")
REPETITIVE = "one two three four one two three four one two three four one two"
STORY = "Once upon a time there was a little"
TOKENS = 48


def spec(prompt: str, sampling: dict[str, Any] | None = None, **fields: Any) -> generation_pb2.GenerationSpec:
    stop = fields.pop("stop", {})
    made: generation_pb2.GenerationSpec = greedy(prompt, TOKENS, **fields)
    for name, value in (sampling or {}).items():
        setattr(made.sampling, name, value)
    for name, value in stop.items():
        field = getattr(made.stop, name)
        if isinstance(value, list):
            field.extend(value)
        else:
            setattr(made.stop, name, value)
    return made


def biased(**sampling: Any) -> generation_pb2.GenerationSpec:
    """Two tokens are so likely that an answer is made of them, and repeats itself."""
    made = spec(REPETITIVE, sampling)
    made.sampling.logit_bias.update({300: 40.0, 301: 39.0})
    return made


SPECS = {
    "greedy": spec(REPETITIVE),
    "temperature": spec(REPETITIVE, {"temperature": 0.8, "seed": 3}),
    "biased": biased(),
    "biased_temperature": biased(temperature=1.5, seed=11),
    "biased_penalties": biased(temperature=1.0, seed=12, frequency_penalty=0.5),
    "top_k": spec(STORY, {"temperature": 1.2, "top_k": 5, "seed": 4}),
    "top_p": spec(STORY, {"temperature": 1.0, "top_p": 0.7, "seed": 5}),
    "min_p": spec(STORY, {"temperature": 1.3, "min_p": 0.1, "seed": 6}),
    "top_n_sigma": spec(STORY, {"temperature": 1.5, "top_n_sigma": 1.0, "seed": 7}),
    "penalties": spec(REPETITIVE, {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}),
    "bad_words": spec(REPETITIVE, stop={"bad_words": [" two three", " four"]}),
    "min_tokens": spec(STORY, stop={"min_tokens": 20, "ignore_eos": False}),
    "stop_string": spec(REPETITIVE, stop={"strings": ["four one two three"]}),
    "stop_token": spec(STORY, {"temperature": 1.2, "seed": 21}, stop={"token_ids": [*range(290, 340)]}),
    "priority": spec(STORY, {"temperature": 0.7, "seed": 22}, priority=-3),
    "logprobs": spec(REPETITIVE, {"temperature": 0.5, "seed": 8}, logprobs=3),
    "prompt_logprobs": spec(REPETITIVE, prompt_logprobs=2, logprobs=1),
    "regex": spec(STORY, {"temperature": 1.0, "seed": 10}, structured_output={"regex": "( [a-z]{1,9}){6,20}[.]"}),
    "schema": spec(STORY, {"temperature": 1.0, "seed": 11}, structured_output={"json_schema": long_schema(3, TOKENS)}),
    "greedy_schema": spec(STORY, structured_output={"json_schema": long_schema(5, TOKENS)}, logprobs=2),
    "penalized_schema": spec(
        STORY, {"frequency_penalty": 0.6, "seed": 2}, structured_output={"json_schema": long_schema(7, TOKENS)}, n=2
    ),
    "choice": spec(STORY, structured_output={"choice": {"texts": ["there is no choice", "there is one", "none"]}}),
    "grammar": spec(
        STORY, {"temperature": 0.9, "seed": 4}, structured_output={"grammar": 'start: ("a" | "b")~1..30 "!"'}
    ),
    "form_with_bad_words": spec(
        STORY, {"temperature": 1.0, "seed": 6}, structured_output={"regex": "[0-9]{5,40}"}, stop={"bad_words": ["77"]}
    ),
    "several": spec(REPETITIVE, {"temperature": 0.9, "seed": 9}, n=3),
    "best_of": spec(REPETITIVE, {"temperature": 0.9, "seed": 9}, n=2, best_of=3),
    # Rows of a search have no drafts either.
    "beams": spec(STORY, n=2, beam_search={"width": 3}),
}


def seen(transcript: Transcript) -> object:
    ends = {index: (end.reason, end.matched_stop) for index, end in transcript.finished.items()}
    return transcript.tokens, transcript.texts, ends


def logprobs(transcript: Transcript) -> list[float]:
    """Log probabilities of tokens and of the prompt's, in order."""
    found: list[float] = []
    for event in transcript.events:
        if event.HasField("prompt_logprobs"):
            found.extend(event.prompt_logprobs.logprobs.sampled)
        if event.HasField("delta"):
            found.extend(event.delta.logprobs.sampled)
    return found


def all_at_once(server: RunningServer, specs: list[generation_pb2.GenerationSpec]) -> list[Transcript]:
    with concurrent.futures.ThreadPoolExecutor(len(specs)) as pool:
        return list(pool.map(lambda each: generate(server.address, each), specs))


@pytest.fixture(scope="module")
def drafting() -> Iterator[RunningServer]:
    with running_server(*FP32, *NGRAM, *CRAMPED) as server:
        yield server
        wait_until(lambda: idle_load(server.address), 60, "no request and no block left")


def assert_same(found: Transcript, expected: Transcript, name: str) -> None:
    assert seen(found) == seen(expected), name
    np.testing.assert_allclose(logprobs(found), logprobs(expected), atol=1e-4, err_msg=name)


def test_drafts_save_steps_and_are_counted(drafting: RunningServer) -> None:
    done = generate(drafting.address, SPECS["biased"]).done
    assert done is not None
    ledger = done.ledger
    assert TOKENS // 2 < ledger.accepted_tokens <= ledger.draft_tokens
    # Each other token took a step, and one that was planned ahead may have come to nothing.
    assert ledger.step_count <= TOKENS - ledger.accepted_tokens + 1


FORMS = ["regex", "schema", "penalized_schema", "grammar"]


def test_rows_with_forms_answer_as_without_drafts_in_fewer_steps(
    drafting: RunningServer, shared_server: RunningServer
) -> None:
    """test_speculation_matrix.py has all forms, and what happens to rows."""
    found, expected = (all_at_once(server, [SPECS[name] for name in FORMS]) for server in (drafting, shared_server))
    for name, one, other in zip(FORMS, found, expected, strict=True):
        assert_same(one, other, name)
        assert one.done is not None and one.done.ledger.draft_tokens > 0
    by_name = dict(zip(FORMS, zip(found, expected, strict=True), strict=True))
    drafted, plain = by_name["schema"]
    assert drafted.done is not None and plain.done is not None
    assert 0 < drafted.done.ledger.accepted_tokens
    assert drafted.done.ledger.step_count < plain.done.ledger.step_count


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--speculate", "ngram", "--pp", "2"), "speculate is ngram and pp is 2"),
        (("--speculate", "magic"), "speculate"),
        (("--speculate", "ngram", "--speculate-tokens", "12"), "--speculate-tokens: must be auto or a whole number"),
        (("--speculate", "ngram", "--speculate-tokens", "-1"), "--speculate-tokens: must be auto or a whole number"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options: tuple[str, ...], reason: str) -> None:
    ended, _ = refused(*FP32, *options)
    assert ended.returncode != 0 and reason in ended.stderr + ended.stdout, ended.stderr
