"""A resolved generation as the engine's AddRequest.

Owns what completes a request once its prompt is known, the seed that the service draws where the caller gave none, and the digest that
idempotency keys are compared by. The digest covers what the caller asked for, resolved (prompt ids,
sampling, stops, limits), and not what differs between two sendings of the same request: request id,
drawn seed (an absent seed counts as "absent"), time already spent, trace context, the call's own
deadline.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from headrace_facts.facts import SpanContext
from headrace_protos.engine.v1 import engine_pb2
from headrace_request.request import Request
from headrace_service import errors
from headrace_service.calls.call import Call
from headrace_service.resolved_spec import ResolvedSpec
from headrace_service.streams.render_state import RenderState
from headrace_service.text.text_model import TextModel
from headrace_service.text.tokenization import TokenIds


def build(
    spec: ResolvedSpec, prompt: TokenIds, max_tokens: int, model: TextModel, request_id: str, call: Call
) -> tuple[engine_pb2.AddRequest, RenderState]:
    """Returns the request, without handle and without remaining time, and the state that renders
    it.
    """
    asked = _completed(spec, prompt, max_tokens, model)
    strings = tuple([string.decode() for string in asked.stop.strings])
    render = RenderState(spec.skip_special_tokens, asked.num_logprobs >= 0, strings, spec.token_ids_only)
    encoded, state = asked.encode(), render.encode()
    digest = _digest(encoded, state, spec, model)
    if spec.draws_seed:
        sampling = msgspec.structs.replace(asked.sampling, seed=secrets.randbits(64))
        encoded = msgspec.structs.replace(asked, sampling=sampling).encode()
    request = engine_pb2.AddRequest(
        request=encoded, service_state=state, spec_digest=digest, request_id=request_id, tenant=call.tenant
    )
    set_limits(request, call)
    return request, render


def record(request: engine_pb2.AddRequest, render: RenderState, span: SpanContext) -> RenderState:
    """Has who joins the generation later know its span; returns the state that says so.

    Not part of the digest: it differs between two sendings.
    """
    render = msgspec.structs.replace(render, span=span)
    request.service_state = render.encode()
    return render


def set_limits(request: engine_pb2.AddRequest | engine_pb2.AttachRequest, call: Call) -> None:
    """Fills in what the caller may take; the engine keeps the books, for all services.

    Nobody limits callers without a key.

    Raises:
        ServiceError: UNAUTHENTICATED; the caller's key is not valid any more.
    """
    limits = call.caller.limits
    if call.tenant:
        request.limits.CopyFrom(
            engine_pb2.TenantLimits(
                requests_per_minute=limits.requests_per_minute,
                concurrent_streams=limits.concurrent_streams,
                tokens_per_minute=limits.tokens_per_minute,
                kv_cache_share=limits.kv_cache_share,
            )
        )


def token_column(ids: Sequence[int]) -> TokenIds:
    """Returns a message's token ids, all of them checked, as an array."""
    return np.array(ids, dtype=np.uint32)


def set_times(request: engine_pb2.AddRequest, call: Call, time_limit_ns: int | None, bounded_by_call: bool) -> bool:
    """Fills in how long the request has been here and may still take.

    Args:
        request: to be sent at once.
        call: the call behind it.
        time_limit_ns: from acceptance on; None: only the call's deadline bounds it.
        bounded_by_call: whether the request ends with its call.

    Returns:
        Whether the call's deadline comes first.

    Raises:
        ServiceError: DEADLINE_EXCEEDED; the caller waits no more.
    """
    now_ns = time.monotonic_ns()
    request.service_ns = now_ns - call.arrival_ns
    limits = [time_limit_ns] if time_limit_ns is not None else []
    call_ns = call.deadline_ns - now_ns if bounded_by_call and call.deadline_ns is not None else None
    if call_ns is not None:
        if call_ns <= 0:
            raise errors.deadline_exceeded()
        limits.append(call_ns)
    request.remaining_ns = min(limits, default=0)
    return call_ns is not None and request.remaining_ns == call_ns


def _digest(encoded: bytes, state: bytes, spec: ResolvedSpec, model: TextModel) -> bytes:
    """Returns the digest of a request in which a seed that the service draws is not drawn yet."""
    digest = hashlib.sha256(model.engine.revision.encode())
    digest.update(f"|draws_seed={spec.draws_seed}|time_limit={spec.time_limit_ns}|{len(encoded)}|".encode())
    digest.update(encoded)
    digest.update(state)
    return digest.digest()


def _completed(spec: ResolvedSpec, prompt: TokenIds, max_tokens: int, model: TextModel) -> Request:
    """Returns the request with what is known once its prompt is; a drawn seed is missing."""
    asked, sampling = spec.request, spec.request.sampling
    if spec.bad_words:
        sequences = [sequence for word in spec.bad_words for sequence in model.tokenizer.encode_word(word)]
        words = tuple([array("I", sequence).tobytes() for sequence in sequences])
        sampling = msgspec.structs.replace(sampling, bad_words=words)
    token_ids = set() if spec.ignore_eos else set(model.engine.end_of_text_token_ids)
    token_ids.update(array("I", asked.stop.token_ids))
    ending = array("I", sorted(token_ids)).tobytes()
    stop = msgspec.structs.replace(asked.stop, max_tokens=max_tokens, token_ids=ending)
    return msgspec.structs.replace(
        asked, prompt_token_ids=prompt.astype("<u4", copy=False).tobytes(), sampling=sampling, stop=stop
    )
