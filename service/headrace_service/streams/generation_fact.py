"""The fact of a generation that has ended, put together of its stream.

Owns what of a stream, an engine's Done and a trace becomes which field of `facts.Generation`.
"""

from __future__ import annotations

import grpc
import msgspec

from headrace.v1 import generation_pb2
from headrace_facts import facts
from headrace_protos.engine.v1 import engine_pb2
from headrace_service.streams import ledger
from headrace_service.streams.generation_stream import GenerationStream
from headrace_service.tracing.generation_trace import GenerationTrace

_REASONS = {
    engine_pb2.OUTPUT_END_REASON_STOP: "stop",
    engine_pb2.OUTPUT_END_REASON_LENGTH: "length",
    engine_pb2.OUTPUT_END_REASON_CANCELLED: "cancelled",
    engine_pb2.OUTPUT_END_REASON_DEADLINE: "deadline",
}
_ERROR = "error"
# Of an output that ended with an error which is the request's.
_INVALID = "invalid"
_INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT
_RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
_PARTS = (
    "queued",
    "prefill",
    "decode",
    "preempted",
    "engine_restart",
    "detokenize_and_send",
    "blocked_on_reader",
    "end_to_end",
)
_FIELDS = [(part, f"{part}_ns") for part in _PARTS]


def of(stream: GenerationStream, trace: GenerationTrace, now_ns: int, unix_offset_ns: int) -> facts.Generation:
    """Returns the fact of a stream that has ended, or failed.

    Args:
        stream: of the generation; nothing comes on it any more.
        trace: what was known from the start on.
        now_ns: when its last message was taken.
        unix_offset_ns: what takes times of this process to UNIX time.
    """
    done = stream.done or engine_pb2.RequestDone(
        prompt_tokens=trace.prompt_tokens, output_tokens=stream.num_tokens, step_count=0
    )
    closed = stream.ledger or ledger.close(done, stream.clock, now_ns)
    return facts.Generation(
        request_id=stream.request_id,
        model=trace.model,
        model_revision=trace.model_revision,
        operation=trace.operation,
        wire=trace.wire,
        unix_offset_ns=unix_offset_ns,
        arrival_ns=stream.clock.arrival_ns,
        end_ns=now_ns,
        ttft_ns=done.ttft_ns,
        prompt_tokens=done.prompt_tokens,
        output_tokens=done.output_tokens,
        cached_tokens=done.cached_tokens,
        finish_reasons=[_reason(stream.ends.get(index)) for index in range(trace.num_outputs)],
        error_type=_error_type(stream, trace),
        ledger=_parts(closed),
        step_count=done.step_count,
        preemptions=done.preemptions,
        draft_tokens=done.draft_tokens,
        accepted_tokens=done.accepted_tokens,
        parameters=dict(trace.parameters),
        streamed=not stream.is_whole,
        first_chunk_ns=_first_chunk_ns(stream),
        span=trace.span,
        detail=trace.detail,
        trace=_engine_trace(done),
        emissions=stream.recording.emissions(trace.num_outputs) if stream.recording is not None else [],
    )


def _reason(end: engine_pb2.OutputEnd | None) -> str:
    if end is None:
        return _ERROR
    return _INVALID if _is_invalid(end) else _REASONS.get(end.reason, _ERROR)


def _is_invalid(end: engine_pb2.OutputEnd) -> bool:
    """Returns whether an output ended because its request can't be met."""
    return bool(end.error.code == _INVALID_ARGUMENT.value[0])


def _error_type(stream: GenerationStream, trace: GenerationTrace) -> str:
    failed = [end for end in stream.ends.values() if end.reason == engine_pb2.OUTPUT_END_REASON_ERROR]
    if failed:
        return _graver_error_type({end.error.code for end in failed})
    failure = stream.failure or trace.failure
    if failure is not None:
        return failure.code.name
    return "DEADLINE_EXCEEDED" if stream.hit_deadline and stream.deadline_is_status else ""


def _graver_error_type(codes: set[int]) -> str:
    """Whose error outputs of these codes ended by; the server's is the graver one."""
    callers = {code.value[0]: code.name for code in (_INVALID_ARGUMENT, _RESOURCE_EXHAUSTED)}
    return callers[max(codes)] if codes <= callers.keys() else "engine_error"


def _first_chunk_ns(stream: GenerationStream) -> int:
    """Returns how long after its arrival the first message with a token had left; 0: none did."""
    return max(stream.clock.first_left_ns - stream.clock.arrival_ns, 1) if stream.clock.first_left_ns else 0


def _parts(closed: generation_pb2.Ledger) -> dict[str, int]:
    return {part: getattr(closed, field) for part, field in _FIELDS}


def _engine_trace(done: engine_pb2.RequestDone) -> facts.EngineTrace | None:
    """Returns what the engine noted.

    None if it noted nothing, or what a newer one means by it is not known here.
    """
    if not done.engine_trace:
        return None
    try:
        return facts.decode_trace(done.engine_trace)
    except msgspec.MsgspecError:
        return None
