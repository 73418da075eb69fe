"""What a service asks of the engine: a request, on whose behalf, who listens.

Owns the plain data that crosses from the server into the engine; what the caller wants stands in it
as one `headrace_request.Request`. Does not own rules (`validation`) nor state (`live_request`):
these objects are written once by the server and only read afterwards. Names follow
protos/headrace_engine/v1/engine.proto.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace_backend.cache_groups import ONE_GROUP, CacheGroup, SequenceBlocks
from headrace_backend.engine.events import LogprobColumns, OutputEnd, PromptLogprobs, RequestDone
from headrace_backend.engine.output_grammar import Grammar
from headrace_facts import facts
from headrace_request.request import Request

TokenIds = npt.NDArray[np.int32]

# Of one token and of one of its top entries, as `events.LogprobColumns` keeps them.
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


class RequestState(enum.IntEnum):
    """The state of a request, as listings show it.

    The values are those of the protocol; ALL is only a filter.
    """

    ALL = 0
    QUEUED = 1
    RUNNING = 2
    FINISHED = 3


class Recording(NamedTuple):
    """How a request is described in what the engine itself reports.

    A request with a span is also recorded.
    """

    # gen_ai.operation.name.
    operation: str = "text_completion"
    # How it came.
    wire: str = "submit"
    detail: facts.Detail = facts.Detail.DEFAULT


class Earlier(NamedTuple):
    """What an earlier attempt at a detached request has come to, in nanoseconds and counts."""

    # Its parts lie within `service_ns`.
    done: RequestDone
    # How long ago it ended, if all of its outputs did.
    ended_ago_ns: int


class TenantLimits(NamedTuple):
    """What one tenant may take, over all services and engines. 0: no such limit."""

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
    """One request with all that a service says of it."""

    # Chosen by the service: unique, at most 64 of [A-Za-z0-9_-].
    request_id: str
    # Prompt, sampling, stop conditions, outputs: as the caller asked for them.
    asked: Request
    # On whose behalf; a request is visible to its tenant only.
    tenant: str = ""
    # On the engine's clock. None: the engine's own limit applies.
    deadline_ns: int | None = None
    # Time spent in the service before it came here; counted as queued.
    service_ns: int = 0
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
    # Log probabilities of those tokens, per output; None, or no entries: they are not known.
    emitted_logprobs: tuple[LogprobColumns | None, ...] = ()
    # Those of the prompt that the earlier attempt reported.
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    # How outputs ended that the earlier attempt brought to their ends.
    ends: tuple[OutputEnd, ...] = ()
    earlier: Earlier | None = None
    # A continuation of a request that was admitted, and charged, by an engine that is lost.
    admitted: bool = False
    # The tenant's, as the service knows them that asks: they hold for all of its requests.
    limits: TenantLimits = NO_LIMITS
    # That service's stream, for a request without a subscription.
    source: int = 0
    # What `asked.structured_output` and `asked.reasoning` were compiled to; None: they leave every
    # token of an output to be drawn.
    grammar: Grammar | None = None
    # [num_prompt_tokens] int32, a view of the request's column.
    prompt_ids: TokenIds = dataclasses.field(init=False)
    # Tokens that end an output, the model's own among them.
    stop_token_ids: frozenset[int] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Reads the columns, as far as they are whole ids; `validation` refuses others."""
        self.prompt_ids = _column(self.asked.prompt_token_ids)
        self.stop_token_ids = frozenset(_column(self.asked.stop.token_ids).tolist())

    def without_tokens(self) -> EngineRequest:
        """The request without prompt, earlier tokens and grammar, as it is kept after its end."""
        asked = msgspec.structs.replace(self.asked, prompt_token_ids=b"", structured_output=None)
        return dataclasses.replace(
            self, asked=asked, emitted=(), emitted_logprobs=(), prompt_logprobs=(), ends=(), grammar=None
        )

    def most_blocks(self, blocks: SequenceBlocks) -> int:
        """Most blocks that an output needs at a time, or all beams of a search together.

        The last token's KV is never needed.
        """
        num_tokens = len(self.prompt_ids) + self.asked.stop.max_tokens - 1
        width = self.asked.beam_search.width if self.asked.beam_search is not None else 1
        if width == 1:
            return blocks.most_blocks(num_tokens)
        # Beams that go on in each other's places hold what one of them looks back to.
        return len(blocks.groups) * beam_blocks(width, len(self.prompt_ids), num_tokens, blocks.block_size)

    @property
    def has_ended(self) -> bool:
        """Whether the earlier attempt brought all outputs to their ends."""
        return bool(self.emitted) and len(self.ends) == self.asked.n

    @property
    def recorded(self) -> bool:
        """Whether the way of its tokens is noted."""
        return self.span is not None and self.recording is not None

    @property
    def prompt_logprob_bytes(self) -> int:
        """Most bytes of the prompt's log probabilities while they are kept; 0 if not asked for."""
        num_tops = self.asked.num_prompt_logprobs
        if num_tops < 0:
            return 0
        return (len(self.prompt_ids) - 1) * (LOGPROB_BYTES + TOP_LOGPROB_BYTES * num_tops)


def beam_blocks(width: int, num_shared: int, num_tokens: int, block_size: int) -> int:
    """Most blocks of so many sequences of `num_tokens` tokens that share the first `num_shared`.

    Full blocks are shared; the one that the shared tokens begin is copied by who goes on in it.
    """
    num_shared_blocks = num_shared // block_size
    return num_shared_blocks + width * (-(-num_tokens // block_size) - num_shared_blocks)


def _column(data: bytes) -> TokenIds:
    return np.frombuffer(data, np.int32, len(data) // 4)


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
    cache_groups: tuple[CacheGroup, ...] = ONE_GROUP
    # Whether recurrent layers keep a state for each row, beside the cache's blocks.
    keeps_states: bool = False
