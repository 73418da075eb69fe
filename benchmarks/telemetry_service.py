"""What telemetry costs a service process, in CPU time of its thread.

It is measured per token on its way out, per generation and per call; with telemetry off, on for a
generation that nobody records, and recorded.

The service's own code runs here on streams without gRPC: tokens are pushed, taken as messages, and
written by a coroutine that returns at once, so that what differs between the modes is the recording
alone. Modes take turns of some milliseconds in random order, so that whatever else the machine does
meets all of them alike; differences are of the turns of one round, with the interval of their
median (bootstrap, 95%).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from headrace_facts import facts, token_steps
from headrace_facts.facts import Detail
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.api import event_wire
from headrace_service.api.session_batch import SessionBatch, SessionWire
from headrace_service.streams import delivery, generation_fact
from headrace_service.streams.generation_stream import GenerationStream
from headrace_service.streams.ledger import DeliveryClock
from headrace_service.streams.render_state import RenderState
from headrace_service.text.detokenizer import PieceTable
from headrace_service.tracing.call_trace import CallTrace, Policy
from headrace_service.tracing.context import RootSampler, of_metadata
from headrace_service.tracing.generation_trace import GenerationTrace

MODES = ("off", "not recorded", "recorded")
_METADATA = (("user-agent", "bench"), ("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01"), ("x-other", "value"))
_ROUNDS = 300
_TOKENS_PER_TURN = 2000
_STREAMS = 64
_CALLS_PER_TURN = 200
_OUTPUT_TOKENS = 128
_ENOUGH = errors.cancelled()
_SPAN = facts.SpanContext("ab" * 16, "cd" * 8, sampled=True)
_PIECES = PieceTable([f"word{index} ".encode() for index in range(512)], frozenset(), False, 512)
_RENDER = RenderState(skip_special=True, with_logprobs=False)


def run() -> dict[str, Any]:
    """Microseconds by way and mode, and what a mode costs above `off`."""
    # The writer wants to know its task.
    return asyncio.run(_run())


async def _run() -> dict[str, Any]:
    return {
        "us_per_token": {
            "generate, 1 token a message": _compared(lambda mode: generate_turn(mode, 1, lags=False)),
            "generate, 1 token a message, more always waits": _compared(lambda mode: generate_turn(mode, 1, lags=True)),
            "generate, 16 tokens a message": _compared(lambda mode: generate_turn(mode, 16, lags=False)),
            "session, 64 generations a message": _compared(_session_turn),
        },
        "us_per_generation": _compared(_generation_turn),
        "us_per_call": _compared(_call_turn),
    }


def _trace(mode: str) -> GenerationTrace | None:
    if mode == "off":
        return None
    span = _SPAN if mode == "recorded" else None
    return GenerationTrace(
        "demo", "0" * 16, "text_completion", "generate", {"max_tokens": 8}, 1, 16, span, Detail.ARRAY
    )


def _stream(mode: str, wire: Any = event_wire) -> GenerationStream:
    clock = DeliveryClock(time.monotonic_ns(), subscribed=False)
    return GenerationStream(1, "0" * 26, _PIECES, _RENDER, clock, wire, trace=_trace(mode))


def _compared(turn: Callable[[str], float]) -> dict[str, Any]:
    """Medians of all modes, and the median differences to `off`, each with its interval."""
    for mode in MODES:
        turn(mode)
    rounds: list[dict[str, float]] = []
    for _ in range(_ROUNDS):
        rounds.append({mode: turn(mode) for mode in random.sample(MODES, len(MODES))})
    result: dict[str, Any] = {mode: round(statistics.median(one[mode] for one in rounds), 3) for mode in MODES}
    for mode in MODES[1:]:
        result[f"{mode} - off"] = _interval([one[mode] - one["off"] for one in rounds])
    return result


def _interval(differences: list[float], resamples: int = 1000) -> dict[str, float]:
    medians = sorted(statistics.median(random.choices(differences, k=len(differences))) for _ in range(resamples))
    low, high = medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]
    return {"median": round(statistics.median(differences), 3), "low": round(low, 3), "high": round(high, 3)}


def generate_turn(mode: str, per_message: int, lags: bool, num_tokens: int = _TOKENS_PER_TURN) -> float:
    """Microseconds of CPU time per token of Generate.

    Args:
        mode: of `MODES`.
        per_message: tokens of each message.
        lags: whether more is there whenever the transport has taken a message.
        num_tokens: of the generation that makes a turn.
    """
    stream = _stream(mode)
    num_messages = num_tokens // per_message
    deliver = _deliver_lagging if lags else _deliver
    began_ns = time.thread_time_ns()
    deliver(stream, num_messages, per_message)
    return (time.thread_time_ns() - began_ns) / (num_messages * per_message) / 1e3


def _deliver(stream: GenerationStream, num_messages: int, per_message: int = 1) -> None:
    """The writer's loop over so many messages.

    The transport takes each at once, and the next tokens come when the writer waits for them.
    """

    async def write(message: bytes) -> None:
        pass

    writer = delivery.deliver(stream, write)
    for number in range(num_messages):
        for _ in range(per_message):
            stream.push(0, number & 511)
        writer.send(None)
    stream.failure = _ENOUGH
    try:
        writer.send(None)
    except errors.ServiceError as end:
        assert end is _ENOUGH
        stream.failure = None


def _deliver_lagging(stream: GenerationStream, num_messages: int, per_message: int = 1) -> None:
    """The writer's loop where the next tokens are there when the transport has taken a message."""
    left = num_messages

    async def write(message: bytes) -> None:
        nonlocal left
        left -= 1
        if left:
            for _ in range(per_message):
                stream.push(0, left & 511)
        else:
            stream.failure = _ENOUGH

    for _ in range(per_message):
        stream.push(0, 0)
    try:
        delivery.deliver(stream, write).send(None)
    except errors.ServiceError as end:
        assert end is _ENOUGH
        stream.failure = None


def _session_turn(mode: str) -> float:
    batch = SessionBatch(16 << 20)
    streams = [_stream(mode, SessionWire(batch, number, deltas_are_events=False)) for number in range(_STREAMS)]
    num_steps = _TOKENS_PER_TURN // _STREAMS
    began_ns = time.thread_time_ns()
    for number in range(num_steps):
        for stream in streams:
            stream.push(0, number & 511)
            stream.take()
        write = batch.write
        batch.take()
        if write is not None:
            write.made_ns = time.monotonic_ns()
            write.written_ns = time.monotonic_ns()
    return (time.thread_time_ns() - began_ns) / (num_steps * _STREAMS) / 1e3


def _generation_turn(mode: str) -> float:
    """The fact of a generation of 128 tokens, to its bytes."""
    streams = [_ended_stream(mode) for _ in range(20)]
    began_ns = time.thread_time_ns()
    for stream in streams:
        if stream.trace is not None:
            facts.encode(generation_fact.of(stream, stream.trace, time.monotonic_ns(), 0))
    return (time.thread_time_ns() - began_ns) / len(streams) / 1e3


def _ended_stream(mode: str) -> GenerationStream:
    stream = _stream(mode)
    _deliver(stream, _OUTPUT_TOKENS)
    trace = b""
    if mode == "recorded":
        phases = [facts.PhaseSpan("queued", 1, 2), facts.PhaseSpan("prefill", 2, 3), facts.PhaseSpan("decode", 3, 4)]
        steps = [token_steps.of_runs([(0, 1)], _OUTPUT_TOKENS)]
        trace = facts.encode_trace(facts.EngineTrace("00" * 8, 1, 0, phases, bytes(24), steps))
    stream.done = engine_pb2.RequestDone(output_tokens=_OUTPUT_TOKENS, engine_trace=trace)
    return stream


def _call_turn(mode: str) -> float:
    """What the interceptor does for a call beside grpc's part: context, span, fact."""
    policy = Policy(RootSampler(0.01), record_all=False, detail=Detail.ARRAY, sample_ratio=0.01)
    metadata = _METADATA if mode == "recorded" else _METADATA[::2]
    began_ns = time.thread_time_ns()
    if mode != "off":
        for _ in range(_CALLS_PER_TURN):
            call = CallTrace("headrace.v1.InferenceService/Generate", policy, of_metadata(metadata))
            call.generation_span(policy, None)
            facts.encode(facts.CallEnded(call.method, "OK", 0, 1, 2, "0" * 26, call.span, call.links))
    return (time.thread_time_ns() - began_ns) / _CALLS_PER_TURN / 1e3
