"""What every value of a request must be: one table of field, rule and limit.

Owns the table (the kinds of rule and their words are `rule_kinds`). It is used twice: a service
checks by it what callers send, and the engine checks by it what services send. Fields are named as
headrace.v1 names them both times, because a refusal of the engine reaches the same caller; whoever
speaks another wire gives them its own names. Not here: rules about bytes of a wire, and limits that
depend on the engine's state.
"""

from __future__ import annotations

import operator
from typing import Final, NamedTuple

from headrace_request import limits
from headrace_request.reasoning_rules import ReasoningSection
from headrace_request.request import Request
from headrace_request.rule_kinds import (
    TOKEN_BYTES,
    Bounds,
    ByteLength,
    LogitBias,
    MaxDrafts,
    MinTokens,
    Range,
    Rule,
    Texts,
    TokenIds,
    TokenSequences,
    Violation,
    Whole,
)
from headrace_request.structured_rules import StructuredText

_PENALTY = Range(-limits.MAX_PENALTY, limits.MAX_PENALTY)
_REPORTED = Whole(-1, limits.MAX_LOGPROBS, unsigned=True)
_BAD_WORD_TOKENS = TokenSequences(limits.MAX_BAD_WORD_SEQUENCES, limits.MAX_BAD_WORD_TOKENS)
BAD_WORDS: Final = Texts(limits.MAX_BAD_WORDS, limits.MAX_BAD_WORD_BYTES)
"""What a caller's words must be before they are encoded."""


class Row(NamedTuple):
    """One row of the table.

    Attributes:
        field: Path in headrace.v1.
        rule: What the value must be.
        path: Attribute path of the value in `Request`; "": as the field is called behind "spec.".
    """

    field: str
    rule: Rule
    path: str = ""


# In the order in which callers hear of broken rules.
TABLE: Final = (
    Row("spec.sampling.temperature", Range(limits.MIN_TEMPERATURE, limits.MAX_TEMPERATURE, zero="greedy")),
    Row("spec.sampling.top_k", Whole(-1, lambda bounds: bounds.vocabulary_size)),
    Row("spec.sampling.top_p", Range(0, 1, above_low=True)),
    Row("spec.sampling.min_p", Range(0, 1)),
    Row("spec.sampling.top_n_sigma", Range(0, limits.MAX_TOP_N_SIGMA)),
    Row("spec.sampling.repetition_penalty", Range(limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY)),
    Row("spec.sampling.presence_penalty", _PENALTY),
    Row("spec.sampling.frequency_penalty", _PENALTY),
    Row("spec.sampling.seed", Whole(0, limits.MAX_SEED)),
    Row("spec.sampling.logit_bias", LogitBias(limits.MAX_LOGIT_BIAS, limits.MAX_BIAS), "sampling"),
    Row("spec.stop.strings", Texts(limits.MAX_STOP_STRINGS, limits.MAX_STOP_STRING_BYTES)),
    Row("spec.stop.bad_words", _BAD_WORD_TOKENS, "sampling.bad_words"),
    Row("spec.stop.token_ids", TokenIds(limits.MAX_STOP_TOKEN_IDS)),
    Row("spec.stop.max_tokens", Whole(1, lambda bounds: bounds.max_context_tokens - 1)),
    Row("spec.stop.min_tokens", MinTokens(), "stop"),
    Row("spec.n", Whole(1, lambda bounds: min(limits.MAX_OUTPUTS, bounds.max_outputs))),
    Row("spec.logprobs", _REPORTED, "num_logprobs"),
    Row("spec.prompt_logprobs", _REPORTED, "num_prompt_logprobs"),
    Row("spec.priority", Whole(-limits.MAX_PRIORITY, limits.MAX_PRIORITY)),
    Row("spec.speculation.max_drafts", MaxDrafts(), "max_drafts"),
    Row("spec.cache_salt", ByteLength(limits.MAX_CACHE_SALT_BYTES)),
    Row("spec.structured_output", StructuredText(limits.MAX_STRUCTURED_BYTES, limits.MAX_STRUCTURED_DEPTH)),
    Row("spec.reasoning", ReasoningSection(limits.MAX_MARKER_TOKENS)),
)

_CHECKS: Final = tuple(
    (row.field, operator.attrgetter(row.path or row.field.removeprefix("spec.")), row.rule.broken) for row in TABLE
)


def check(request: Request, bounds: Bounds) -> list[Violation]:
    """Returns every rule of the table that a request breaks.

    The prompt has its own (`check_prompt`, `check_lengths`), because a service knows it later.
    """
    found: list[Violation] = []
    for field, value_of, broken in _CHECKS:
        found += broken(field, value_of(request), bounds)
    return found


def check_prompt(request: Request, bounds: Bounds, field: str) -> list[Violation]:
    """Returns what is wrong with a prompt's tokens, and with its length beside that of an output.

    Args:
        request: The request, prompt included.
        bounds: The model's limits.
        field: Path by which the prompt is named.
    """
    found = list(_PROMPT.broken(field, request.prompt_token_ids, bounds))
    num_tokens = len(request.prompt_token_ids) // TOKEN_BYTES
    return found or check_lengths(num_tokens, request.stop.max_tokens, 0, bounds, field)


_PROMPT: Final = TokenIds()


def check_lengths(
    num_prompt_tokens: int, max_tokens: int, min_tokens: int, bounds: Bounds, field: str
) -> list[Violation]:
    """Returns what is wrong with the lengths of prompt and output: at most one rule.

    Args:
        num_prompt_tokens: Length of the prompt.
        max_tokens: Most tokens of an output.
        min_tokens: Fewest tokens of an output.
        bounds: The model's limits.
        field: Path by which the prompt is named.
    """
    context = bounds.max_context_tokens
    room = context - num_prompt_tokens
    if num_prompt_tokens == 0:
        return [Violation(field, "must give at least 1 token")]
    if room < 1:
        rule = f"must have at most {context - 1}, so that a context of {context} tokens leaves room for output"
        return [Violation(field, f"has {num_prompt_tokens} tokens; {rule}")]
    if max_tokens > room:
        rule = f"must be at most {room}: the prompt has {num_prompt_tokens} tokens and the context {context}"
        return [Violation("spec.stop.max_tokens", rule)]
    if min_tokens > max(max_tokens, 0):
        return [Violation("spec.stop.min_tokens", f"must be at most max_tokens, {max_tokens}")]
    return []
