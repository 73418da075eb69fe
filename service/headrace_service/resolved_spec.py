"""A generation as a caller asked for it: every default filled in, every rule checked.

Owns the plain data between validation and the engine's protocol. What the engine is asked for
stands in one `headrace_request.Request`, beside it what only services know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headrace_request.request import Request
from headrace_request.rule_kinds import Bounds
from headrace_request.sampling import Sampling


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedSpec:
    """All of a GenerationSpec but its prompt.

    Attributes:
        request: what the engine is asked for, as far as it is known before the prompt: it lacks the
            prompt's tokens, those of bad words, the model's end-of-text tokens and a drawn seed,
            and its max_tokens is the largest possible one where the caller gave none.
        max_tokens: most tokens of an output; None: what the prompt leaves of the context.
        draws_seed: whether the caller gave no seed, so that the service draws one.
        ignore_eos: whether the model's end-of-text tokens end nothing.
        bad_words: words that are never generated, as text.
        time_limit_ns: longest time from acceptance to the last token; None: the caller gave none.
        skip_special_tokens: whether special tokens are left out of the text.
        token_ids_only: whether deltas have no text.
        max_reasoning_tokens: most tokens of an output's reasoning; None: no limit of its own.
        trace_detail: a number of headrace.v1.TraceDetail; 0: the server's setting.
        given: what the caller gave, by its name in gen_ai.request; for traces.
    """

    request: Request
    max_tokens: int | None
    draws_seed: bool
    ignore_eos: bool
    bad_words: tuple[str, ...]
    time_limit_ns: int | None
    skip_special_tokens: bool
    token_ids_only: bool
    max_reasoning_tokens: int | None = None
    trace_detail: int = 0
    given: Mapping[str, int | float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFacts:
    """What validation must know of the model.

    Attributes:
        name: what requests call it.
        bounds: limits of requests that the model and the engine's configuration set.
        max_text_bytes: longest prompt; what is longer cannot fit the context, or is too long to be
            encoded.
        defaults: what absent sampling parameters become.
        reasons: whether its conversations may have reasoning.
        takes_effort: whether its chat template says how much the model is to reason.
    """

    name: str
    bounds: Bounds
    max_text_bytes: int
    defaults: Sampling
    reasons: bool = False
    takes_effort: bool = False
