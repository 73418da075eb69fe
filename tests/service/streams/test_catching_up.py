"""A reader whose engine is lost, at the log of another: shorter, longer, or of other tokens."""

from __future__ import annotations

import grpc
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.v1 import generation_pb2, inference_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.api import event_wire
from headrace_service.engines.step_dealing import deal
from headrace_service.streams.catching_up import CatchingUp
from headrace_service.streams.engine_reader import EngineReader
from headrace_service.streams.generation_stream import GenerationStream
from headrace_service.streams.ledger import DeliveryClock
from headrace_service.streams.render_state import RenderState
from headrace_service.text.detokenizer import PieceTable

TABLE = PieceTable([b" a", b" b", b" c", b" d"], (), False, 2)
HANDLE = 7
STATE = RenderState(skip_special=False, with_logprobs=False).encode()
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def u32(values: list[int]) -> bytes:
    return np.array(values, "<u4").tobytes()


def attached(tokens: list[int], started: bool = True) -> engine_pb2.Attached:
    log = engine_pb2.OutputLog(output_index=0, token_ids=u32(tokens))
    return engine_pb2.Attached(handle=HANDLE, service_state=STATE, started=started, outputs=[log])


def step(tokens: list[int], *events: engine_pb2.RequestEvent) -> engine_pb2.StepOutputs:
    return engine_pb2.StepOutputs(
        handles=u32([HANDLE] * len(tokens)),
        output_indices=np.zeros(len(tokens), "<u2").tobytes(),
        tokens=u32(tokens),
        events=events,
    )


def event(**kind: object) -> engine_pb2.RequestEvent:
    return engine_pb2.RequestEvent(handle=HANDLE, **kind)  # type: ignore[arg-type]


def reader_of(tokens: list[int], from_token: int = 0) -> GenerationStream:
    """A reader that has these tokens, and has just lost their engine."""
    stream = GenerationStream(HANDLE, "id", TABLE, None, DeliveryClock(1, subscribed=True), event_wire, from_token)
    stream.rescue = lambda failure: True
    stream.begin_attached(attached(tokens))
    return stream


def events_of(messages: list[bytes]) -> list[generation_pb2.GenerationEvent]:
    return [inference_pb2.GenerateResponse.FromString(message).event for message in messages]


def ids_of(events: list[generation_pb2.GenerationEvent]) -> list[int]:
    return [token for one in events for token in one.delta.token_ids]


def caught_up(stream: GenerationStream, log: list[int], rest: list[list[int]], started: bool) -> None:
    """Goes on at an engine that has `log`, and computes the rest step by step."""
    readers: dict[int, EngineReader] = {}
    readers[HANDLE] = reader = CatchingUp(stream, readers, lost_ns=1)
    reader.begin_attached(attached(log, started))
    if not started:
        deal(step([], event(started=engine_pb2.RequestStarted())), readers)
    for tokens in rest:
        deal(step(tokens), readers)
    end = engine_pb2.OutputEnd(output_index=0, reason=engine_pb2.OUTPUT_END_REASON_LENGTH)
    deal(step([], event(output_end=end)), readers)
    if stream.failure is None:
        assert readers[HANDLE] is stream, "it is level, and reads by itself"
    deal(step([], event(done=engine_pb2.RequestDone())), readers)


@given(TOKENS, st.data())
def test_each_token_comes_once_however_much_the_other_engine_has(whole: list[int], data: st.DataObject) -> None:
    known = data.draw(st.integers(0, len(whole)))
    from_token = data.draw(st.integers(0, known))
    log = data.draw(st.integers(0, len(whole)))
    border = data.draw(st.integers(log, len(whole)))
    stream = reader_of(whole[:known], from_token)
    before = events_of(stream.take()) if data.draw(st.booleans()) else []
    caught_up(stream, whole[:log], [whole[log:border], whole[border:]], data.draw(st.booleans()))
    events = [*before, *events_of(stream.take())]
    assert stream.failure is None and stream.done is not None
    assert ids_of(events) == whole[from_token:]
    assert sum(one.HasField("resumed") for one in events) == 1
    assert sum(one.HasField("started") for one in events) == 1
    assert sum(one.HasField("output_finished") for one in events) == 1


@given(TOKENS, st.data())
def test_other_tokens_than_those_that_were_read_fail_the_reader(whole: list[int], data: st.DataObject) -> None:
    changed = data.draw(st.integers(0, len(whole) - 1))
    other = [*whole[:changed], (whole[changed] + 1) % 4, *whole[changed + 1 :]]
    log = data.draw(st.integers(0, len(whole)))
    stream = reader_of(whole)
    stream.take()
    caught_up(stream, other[:log], [other[log:]], started=True)
    assert stream.failure is not None and stream.failure.code is grpc.StatusCode.DATA_LOSS
    assert ids_of(events_of(stream.take())) == []


def test_an_output_that_ends_before_what_was_read_fails_the_reader() -> None:
    stream = reader_of([0, 1, 2])
    caught_up(stream, [0, 1], [], started=True)
    assert isinstance(stream.failure, errors.ServiceError)
    assert stream.failure.code is grpc.StatusCode.DATA_LOSS
