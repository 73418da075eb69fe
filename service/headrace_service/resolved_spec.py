"""A generation as the engine is asked for it: every default filled in, every rule checked.

Owns the plain data between validation and the engine's protocol. No absent value here means a
default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Ranges as in generation.proto; `top_k` 0 keeps all."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    logit_bias: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """When an output ends. `max_tokens` None: what the context leaves, known once the prompt is."""

    strings: tuple[str, ...]
    token_ids: tuple[int, ...]
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    bad_words: tuple[str, ...]
    include_stop_string: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedSpec:
    """All of a GenerationSpec but its prompt."""

    sampling: Sampling
    stop: Stop
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int
    time_limit_ns: int | None
    cache_salt: bytes
    skip_special_tokens: bool
    token_ids_only: bool
    # Of headrace.v1.TraceDetail; 0: the server's.
    trace_detail: int = 0
    # What the caller gave, by its name in gen_ai.request; for traces.
    given: Mapping[str, int | float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFacts:
    """What validation must know of the model.

    Attributes:
        name: what requests call it.
        vocabulary_size: token ids are below it.
        max_context_tokens: of prompt and output together.
        max_outputs: largest n.
        max_text_bytes: longest prompt; what is longer cannot fit the context, or is too long to be
            encoded.
        defaults: what absent sampling parameters become.
    """

    name: str
    vocabulary_size: int
    max_context_tokens: int
    max_outputs: int
    max_text_bytes: int
    defaults: Sampling
