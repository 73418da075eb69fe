"""A resolved generation as the engine's AddRequest.

Owns the conversion, the seed that the service draws where the caller gave none, and the digest that
idempotency keys are compared by. The digest covers what the caller asked for, resolved (prompt ids,
sampling, stops, limits), and not what differs between two sendings of the same request: request id,
drawn seed (an absent seed counts as "absent"), time already spent, trace context, the call's own
deadline.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from headrace_facts.facts import SpanContext
from headrace_protos.engine.v1 import engine_pb2
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
    render = RenderState(spec.skip_special_tokens, spec.logprobs is not None, spec.stop.strings, spec.token_ids_only)
    request = engine_pb2.AddRequest(
        prompt_token_ids=prompt.astype("<u4").tobytes(),
        sampling=_sampling(spec, model),
        stop=_stop(spec, max_tokens, model),
        n=spec.n,
        logprobs=spec.logprobs,
        prompt_logprobs=spec.prompt_logprobs,
        priority=spec.priority,
        cache_salt=spec.cache_salt,
        service_state=render.encode(),
        spec_digest=b"",
    )
    request.spec_digest = _digest(request, spec, model)
    if spec.sampling.seed is None:
        request.sampling.seed = secrets.randbits(64)
    request.request_id = request_id
    request.tenant = call.tenant
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


def _digest(request: engine_pb2.AddRequest, spec: ResolvedSpec, model: TextModel) -> bytes:
    """Returns the digest of a request that has neither drawn seed nor anything of its call yet."""
    digest = hashlib.sha256(model.engine.revision.encode())
    digest.update(f"|seed={spec.sampling.seed}|time_limit={spec.time_limit_ns}|".encode())
    digest.update(request.SerializeToString(deterministic=True))
    return digest.digest()


def _sampling(spec: ResolvedSpec, model: TextModel) -> engine_pb2.EngineSampling:
    sampling = spec.sampling
    sequences = [sequence for word in spec.stop.bad_words for sequence in model.tokenizer.encode_word(word)]
    return engine_pb2.EngineSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed or 0,
        logit_bias_ids=np.array([token for token, _ in sampling.logit_bias], dtype="<u4").tobytes(),
        logit_bias_values=np.array([bias for _, bias in sampling.logit_bias], dtype="<f4").tobytes(),
        bad_words=[
            engine_pb2.EmittedTokens(token_ids=np.array(sequence, dtype="<u4").tobytes()) for sequence in sequences
        ],
    )


def _stop(spec: ResolvedSpec, max_tokens: int, model: TextModel) -> engine_pb2.EngineStop:
    stop = spec.stop
    token_ids = set(stop.token_ids)
    if not stop.ignore_eos:
        token_ids.update(model.engine.end_of_text_token_ids)
    return engine_pb2.EngineStop(
        strings=[string.encode() for string in stop.strings],
        token_ids=np.array(sorted(token_ids), dtype="<u4").tobytes(),
        max_tokens=max_tokens,
        min_tokens=stop.min_tokens,
        include_stop_string=stop.include_stop_string,
    )
