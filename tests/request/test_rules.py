"""Each field of a request has a rule, in the same words wherever it is checked."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from headrace_request import rules
from headrace_request.reasoning import Reasoning
from headrace_request.request import Request
from headrace_request.rule_kinds import Bounds, Range
from headrace_request.sampling import Sampling
from headrace_request.stop import Stop

BOUNDS = Bounds(vocabulary_size=100, max_context_tokens=64, max_outputs=8, end_of_text_token_ids=frozenset({2}))


def column(*tokens: int) -> bytes:
    return np.array(tokens, "<u4").tobytes()


def asked(path: str, value: object) -> Request:
    request = Request(column(1, 2, 3), Stop(max_tokens=8))
    name, _, rest = path.partition(".")
    if rest:
        value = msgspec.structs.replace(getattr(request, name), **{rest: value})
    return msgspec.structs.replace(request, **{name: value})


# Path, value, and what a caller hears.
BROKEN: list[tuple[str, object, str, str]] = [
    ("sampling.temperature", 0.001, "temperature", "must be 0 (greedy), or at least 0.01 and at most 100"),
    ("sampling.temperature", math.nan, "temperature", "must be 0 (greedy), or at least 0.01 and at most 100"),
    ("sampling.top_p", 0.0, "top_p", "must be above 0 and at most 1"),
    ("sampling.top_k", 101, "top_k", "must be at least -1 and at most 100"),
    ("sampling.min_p", -0.1, "min_p", "must be at least 0 and at most 1"),
    ("sampling.top_n_sigma", math.nan, "top_n_sigma", "must be at least 0 and at most 100"),
    ("sampling.repetition_penalty", math.inf, "repetition_penalty", "must be at least 0.01 and at most 10"),
    ("sampling.presence_penalty", -2.5, "presence_penalty", "must be at least -2 and at most 2"),
    ("sampling.bad_words", (column(5), b""), "bad_words[1]", "must have at least 1 and at most 262 tokens"),
    ("sampling.bad_words", (column(5, 100),), "bad_words[0][1]", "must be below the vocabulary size, 100"),
    ("stop.strings", (b"ok", b""), "strings[1]", "must have at least 1 and at most 256 bytes"),
    ("stop.strings", (b"x",) * 17, "strings", "must have at most 16 entries"),
    ("stop.strings", (b"\xff",), "strings[0]", "must be UTF-8"),
    ("stop.token_ids", column(5, 100), "token_ids[1]", "must be below the vocabulary size, 100"),
    ("stop.token_ids", column(*[5] * 65), "token_ids", "must have at most 64 entries"),
    ("stop.token_ids", b"12345", "token_ids", "has 5 bytes; token ids take 4 bytes each"),
    ("stop.max_tokens", 64, "max_tokens", "must be at least 1 and at most 63"),
    ("stop.min_tokens", 9, "min_tokens", "must be at most 8"),
    ("n", 9, "n", "must be at least 1 and at most 8"),
    ("num_logprobs", 21, "logprobs", "must be at most 20"),
    ("num_prompt_logprobs", 21, "prompt_logprobs", "must be at most 20"),
    ("priority", -101, "priority", "must be at least -100 and at most 100"),
    ("max_drafts", 9, "speculation.max_drafts", "must be at least 1 and at most 8"),
    ("max_drafts", -2, "speculation.max_drafts", "must be at least 1 and at most 8"),
    (
        "max_drafts",
        3,
        "speculation.max_drafts",
        "is 3, and this server drafts nothing: it was started without speculate",
    ),
    ("cache_salt", b"s" * 257, "cache_salt", "must have at most 256 bytes"),
    ("reasoning", Reasoning((), (6,)), "reasoning.start_ids", "must have at least 1 and at most 32 tokens"),
    ("reasoning", Reasoning((5,), ()), "reasoning.end_ids", "must have at least 1 and at most 32 tokens"),
    ("reasoning", Reasoning((5,), (6,) * 33), "reasoning.end_ids", "must have at least 1 and at most 32 tokens"),
    ("reasoning", Reasoning((5,), (6, 100)), "reasoning.end_ids[1]", "must be below the vocabulary size, 100"),
    ("reasoning", Reasoning((-1,), (6,)), "reasoning.start_ids[0]", "must be below the vocabulary size, 100"),
    ("reasoning", Reasoning((5,), (6,), -1), "reasoning.max_tokens", "must be at least 0 and at most 63"),
    (
        "reasoning",
        Reasoning((5,), (6,), closing_ids=(7,) * 33),
        "reasoning.closing_ids",
        "must have at least 0 and at most 32 tokens",
    ),
    (
        "reasoning",
        Reasoning((), (6,), begins_inside=True, repeats=True),
        "reasoning.start_ids",
        "must have at least 1 and at most 32 tokens",
    ),
    ("reasoning", Reasoning((5,), (6,), 64), "reasoning.max_tokens", "must be at least 0 and at most 63"),
]


@pytest.mark.parametrize(("path", "value", "field", "words"), BROKEN)
def test_a_broken_rule_is_named_with_its_limit(path: str, value: object, field: str, words: str) -> None:
    (found,) = rules.check(asked(path, value), BOUNDS)
    assert found.field.endswith(field) and found.field.startswith("spec.")
    assert found.description == words


def test_biases_are_named_by_their_token() -> None:
    biases = Sampling(logit_bias_ids=column(5, 100), logit_bias_values=np.array([math.nan, 1], "<f4").tobytes())
    assert [tuple(found) for found in rules.check(asked("sampling", biases), BOUNDS)] == [
        ("spec.sampling.logit_bias[100]", "key must be below the vocabulary size, 100"),
        ("spec.sampling.logit_bias[5]", "must be at least -100 and at most 100"),
    ]


def test_the_models_own_ends_do_not_count_as_stop_tokens() -> None:
    assert not rules.check(asked("stop.token_ids", column(2, *range(3, 67))), BOUNDS)


# Checked with another field, or beside the table.
ELSEWHERE = {
    "prompt_token_ids",
    "stop",
    "sampling",
    "stop.include_stop_string",
    "stop.min_tokens",
    "sampling.logit_bias_ids",
    "sampling.logit_bias_values",
    "best_of",
    "beam_search",
}


def test_every_field_has_a_rule() -> None:
    checked = {row.path or row.field.removeprefix("spec.") for row in rules.TABLE}
    fields = {
        prefix + field
        for struct, prefix in ((Request, ""), (Stop, "stop."), (Sampling, "sampling."))
        for field in struct.__struct_fields__
    }
    assert fields - ELSEWHERE == checked - {"stop", "sampling"}


def test_a_bound_counts_as_float32_has_it() -> None:
    rule = Range(0.01, 0.7)
    for bound in (0.01, 0.7):
        assert not rule.broken("x", float(np.float32(bound)), BOUNDS)
    assert rule.broken("x", float(np.nextafter(np.float32(0.7), np.float32(1))), BOUNDS)
