"""What the engine answers to the server's calls: plain data, written once.

Owns the shapes only. Names follow protos/headrace_engine/v1/engine.proto.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from headrace_backend.engine.events import EndReason, OutputSnapshot, PromptLogprobs, RequestDone
from headrace_backend.engine.request import EngineRequest, RequestState


class AddOutcome(NamedTuple):
    """The outcome of adding a request: it was taken, or it exists already.

    If `existing` is set, the idempotency key names an earlier request, and nothing was subscribed.
    """

    request_id: str
    existing: bool
    prompt_tokens: int
    # What steps call it.
    number: int = 0


class AbortOutcome(NamedTuple):
    """Whether the request exists for the tenant, and whether it was still waiting or running."""

    found: bool
    was_active: bool


class LossOutcome(NamedTuple):
    """What the loss of a worker shows about the request that makes steps fail, if there is one."""

    # Fewer requests are suspected than before, or the one was found; not if that goes on and on
    # without a step that succeeds.
    closer: bool = False
    # It was found and has ended; "": it was not.
    guilty_request_id: str = ""


class Handover(NamedTuple):
    """What a guardian must know of a request that runs to have another engine go on with it."""

    request: EngineRequest
    # On the engine's clock, in nanoseconds: when the call arrived, and when its time is over.
    asked_at_ns: int
    deadline_ns: int
    # Whether another service guards it too, and is the first to hand it over.
    is_second: bool


class Unguarded(NamedTuple):
    """A detached request that runs and has fewer than two guardians."""

    request: EngineRequest
    # The stream of the one that it has; None: it has none.
    guardian: int | None


@dataclasses.dataclass(slots=True, frozen=True)
class AttachSnapshot:
    """A request when a subscription began; the stream's outbox goes on from there.

    With `done` set nothing follows.
    """

    service_state: bytes
    prompt_tokens: int
    started: bool
    cached_tokens: int
    outputs: list[OutputSnapshot]
    done: RequestDone | None
    # All parts so far, in order.
    prompt_logprobs: list[PromptLogprobs] = dataclasses.field(default_factory=list)
    # For a guardian; None: the request has ended.
    handover: Handover | None = None


@dataclasses.dataclass(slots=True, frozen=True)
class RequestRow:
    """One request in a listing, as plain data."""

    # Newer requests have larger ones; pages go backwards.
    sequence_number: int
    request_id: str
    state: RequestState
    # UNIX time.
    created_at_ns: int
    prompt_tokens: int
    output_tokens: int
    # Of the outputs that ended, by output.
    finish_reasons: list[EndReason]
    detached: bool


class RequestPage(NamedTuple):
    """Newest first. `next_before` asks for the next page; 0: no more."""

    rows: list[RequestRow]
    next_before: int


class LoadReport(NamedTuple):
    """What services send requests by: how long one that comes now would wait."""

    # Prompt tokens to be computed before its own.
    prefill_tokens: int
    # Measured; 0 while nothing was.
    prefill_tokens_per_s: float
    # Requests that have not ended.
    open_requests: int
    # Most sequences that run at once, and how long one keeps its row; 0 while nothing was measured.
    rows: int
    row_time_ns: int


@dataclasses.dataclass(slots=True, frozen=True)
class LoadSnapshot:
    """The engine's load at one moment: queue, rows, blocks and counters."""

    running_sequences: int
    waiting_requests: int
    waiting_tokens: int
    # Share of the blocks that sequences hold, 0 to 1.
    kv_cache_usage: float
    kv_blocks: int
    max_waiting_requests: int
    output_tokens_per_second: float
    expected_wait_ns: int
    # free (neither held nor cached) + cached (reusable, not held) + used = kv_blocks.
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    step_count: int
    preemptions: int
    # Prompt tokens asked of the prefix cache, and found there.
    prefix_query_tokens: int
    prefix_hit_tokens: int
    # Kernels compiled and graphs captured by the workers after they were ready; a warm engine has
    # none.
    late_work: int
    # Steps whose plan was held back until shortly before the step in flight would end, and those of
    # them that the device had to wait for.
    held_plans: int
    late_plans: int
    # Most sequences that the batch holds.
    max_running_sequences: int
    # Requests that have not ended, whether they run, wait for their first step, or were preempted.
    active_requests: int
    # Requests since the engine began: taken, and refused because there was no room for them then.
    taken_requests: int
    refused_requests: int
