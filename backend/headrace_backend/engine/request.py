"""What a caller asks of the engine: the request, how to sample, when to stop, who listens.

Owns the plain data that crosses from the server into the engine. Does not own rules (`validation`)
nor state (`live_request`): these objects are written once by the server and only read afterwards.
Names follow protos/headrace_engine/v1/engine.proto.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_facts import facts

TokenIds = npt.NDArray[np.int32]

# Of one token and of one of its top entries, as `outbox.LogprobColumns` keeps them.
LOGPROB_BYTES = 10
TOP_LOGPROB_BYTES = 8


class Subscriber(NamedTuple):
    """One subscription: the service's stream and the handle that the service chose on it."""

    stream_id: int
    handle: int


class AbortCause(enum.IntEnum):
    """Why a request is ended from outside. Values as in the protocol."""

    CANCELLED = 1
    DEADLINE = 2


class EndReason(enum.IntEnum):
    """Why an output ended. Values as in the protocol."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    DEADLINE = 4
    ERROR = 5


class RequestState(enum.IntEnum):
    """Where a request is, as listings show it. Values as in the protocol; ALL is only a filter."""

    ALL = 0
    QUEUED = 1
    RUNNING = 2
    FINISHED = 3


@dataclasses.dataclass(slots=True, frozen=True)
class SamplingSpec:
    """How each next token is drawn. All values are resolved: none stands for "default"."""

    # 0: the most likely token.
    temperature: float = 1.0
    top_p: float = 1.0
    # 0: all.
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    # int32 and float32 little-endian, the same number of entries.
    logit_bias_ids: bytes = b""
    logit_bias_values: bytes = b""
    # Token sequences that must not be completed.
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def needs_history(self) -> bool:
        """Whether the sampler must know the tokens before the one that it draws."""
        return bool(self.bad_words) or (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (
            1,
            0,
            0,
        )


@dataclasses.dataclass(slots=True, frozen=True)
class StopSpec:
    """When an output ends."""

    max_tokens: int
    min_tokens: int = 0
    # UTF-8.
    strings: tuple[bytes, ...] = ()
    # The request's own and, unless end-of-text is ignored, the model's.
    token_ids: frozenset[int] = frozenset()
    include_stop_string: bool = False


class Recording(NamedTuple):
    """How a request is described where the engine itself tells of it; with a span to tell of, it is
    recorded too.
    """

    # gen_ai.operation.name.
    operation: str = "text_completion"
    # How it came.
    wire: str = "submit"
    detail: facts.Detail = facts.Detail.DEFAULT


class TenantLimits(NamedTuple):
    """What one tenant may take, over all services. 0: no such limit."""

    # Accepted requests.
    requests_per_minute: int = 0
    # Requests that wait or run, and readers beside the first of each, at one time.
    concurrent_streams: int = 0
    # Of prompts and outputs.
    tokens_per_minute: int = 0
    # Of the KV cache's blocks, above 0 to 1.
    kv_cache_share: float = 0.0


NO_LIMITS = TenantLimits()


@dataclasses.dataclass(slots=True)
class EngineRequest:
    """One request: a prompt and n outputs."""

    # Chosen by the service: unique, at most 64 of [A-Za-z0-9_-].
    request_id: str
    # [num_prompt_tokens] int32.
    prompt_ids: TokenIds
    stop: StopSpec
    sampling: SamplingSpec = dataclasses.field(default_factory=SamplingSpec)
    # On whose behalf; a request is visible to its tenant only.
    tenant: str = ""
    # Outputs.
    n: int = 1
    # Most likely tokens to report beside the sampled one; -1: no log probabilities at all.
    num_logprobs: int = -1
    # Most likely tokens to report beside each token of the prompt; -1: nothing of the prompt.
    num_prompt_logprobs: int = -1
    # Higher runs first.
    priority: int = 0
    # On the engine's clock. None: the engine's own limit applies.
    deadline_ns: int | None = None
    # Time spent in the service before it came here; counted as queued.
    service_ns: int = 0
    # Salt of the prefix cache; tenants are salted apart besides.
    cache_salt: bytes = b""
    # Outlives its readers.
    detached: bool = False
    # "": none.
    idempotency_key: str = ""
    # SHA-256 of the resolved spec; compared when the key is known.
    spec_digest: bytes = b""
    # Opaque; given back by attach.
    service_state: bytes = b""
    # The inference span that the service made for it; None: nobody traces it.
    span: facts.SpanContext | None = None
    recording: Recording | None = None
    # A continuation: per output, the tokens that an earlier attempt emitted. Empty, or n entries.
    emitted: tuple[TokenIds, ...] = ()
    # The tenant's newest ones: they hold for all of its requests.
    limits: TenantLimits = NO_LIMITS

    @property
    def recorded(self) -> bool:
        """Whether the way of its tokens is noted."""
        return self.span is not None and self.recording is not None

    @property
    def prompt_logprob_bytes(self) -> int:
        """What the log probabilities of the prompt take while they are kept, at most; 0 if none are
        asked for.
        """
        if self.num_prompt_logprobs < 0:
            return 0
        return (len(self.prompt_ids) - 1) * (LOGPROB_BYTES + TOP_LOGPROB_BYTES * self.num_prompt_logprobs)


@dataclasses.dataclass(slots=True, frozen=True)
class ModelLimits:
    """What the engine must know of the model."""

    vocab_size: int
    # Most tokens of prompt and output.
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    # Tokens that a token sees in every layer, itself included: the smallest sliding window of any.
    # None: no layer has one.
    attention_window: int | None = None
