"""A stream's queue: order, merging while the writer is busy, and the bound."""

from __future__ import annotations

import asyncio
import gc
from array import array

import grpc
import msgspec
import numpy as np
import pytest
from tests.backend.streams.test_outgoing import add_logprobs, outbox_of, read_rows

from headrace_backend.engine.events import EndReason, LogprobColumns, OutputEnd, PromptLogprobs, RequestDone
from headrace_backend.engine.requests.outbox import Outbox
from headrace_backend.engine.step_log import RECORDS_EVERY_NS, StepLog
from headrace_backend.server.streams.outgoing import write_outbox
from headrace_backend.server.streams.service_stream import ServiceStream
from headrace_backend.server.streams.statuses import StreamEnded, ended, status_code
from headrace_protos.engine.v1 import engine_pb2


class Reader:
    """What the service receives; it reads only while `open` is set."""

    def __init__(self) -> None:
        self.received: list[engine_pb2.FromEngine] = []
        self.open = asyncio.Event()

    async def write(self, message: engine_pb2.FromEngine) -> None:
        await self.open.wait()
        self.received.append(message)

    @property
    def kinds(self) -> list[str | None]:
        return [message.WhichOneof("message") for message in self.received]


def make_stream(max_backlog_bytes: int = 1 << 20, max_message_bytes: int = 1 << 20) -> ServiceStream:
    return ServiceStream(1, max_message_bytes, max_backlog_bytes, clock=lambda: 0)


def tokens(count: int, step_id: int) -> Outbox:
    return Outbox(array("I", [1] * count), array("H", [0] * count), array("I", [step_id] * count), step_id=step_id)


def added(handle: int) -> engine_pb2.FromEngine:
    return engine_pb2.FromEngine(added=engine_pb2.Added(handle=handle))


async def run(stream: ServiceStream, reader: Reader) -> None:
    reader.open.set()
    writer = asyncio.ensure_future(stream.run_writer(reader.write))
    await stream.wait_idle(60)
    writer.cancel()


async def test_steps_merge_only_with_their_neighbours() -> None:
    stream, reader = make_stream(), Reader()
    for step in (1, 2, 3):
        stream.send_outbox(tokens(2, step))
    stream.send(added(9))
    stream.send_outbox(tokens(1, 4))
    await run(stream, reader)
    assert reader.kinds == ["step", "added", "step"]
    assert np.frombuffer(reader.received[0].step.tokens, "<u4").tolist() == [1, 1, 2, 2, 3, 3]
    assert reader.received[0].step.step_id == 3
    assert reader.received[2].step.step_id == 4


async def test_merged_steps_stay_within_a_message() -> None:
    stream, reader = make_stream(max_message_bytes=4000), Reader()
    for step in range(50):
        stream.send_outbox(tokens(50, step))
    await run(stream, reader)
    assert len(reader.received) > 10
    assert max(message.ByteSize() for message in reader.received) < 4000
    sent = np.concatenate([np.frombuffer(message.step.tokens, "<u4") for message in reader.received])
    assert sent.tolist() == [step for step in range(50) for _ in range(50)]


async def test_one_step_for_many_readers_stays_within_messages() -> None:
    """Two hundred readers of one prompt's logprobs get more in one step than a message holds."""
    stream, reader = make_stream(max_message_bytes=40_000), Reader()
    columns = LogprobColumns()
    for _ in range(100):
        add_logprobs(columns, 5, [1, 2, 3])
    outbox = outbox_of([(handle, output, 5, [1, 2]) for handle in range(1, 201) for output in range(4)], 7)
    outbox.events = [(handle, PromptLogprobs(1, columns)) for handle in range(1, 201)]
    outbox.events += [(handle, OutputEnd(0, EndReason.STOP)) for handle in range(1, 201)]
    stream.send_outbox(outbox)
    stream.send(added(9))
    await run(stream, reader)
    *steps, last = reader.received
    assert last.WhichOneof("message") == "added"
    assert len(steps) > 10 and max(message.ByteSize() for message in steps) < 40_000
    assert [row for message in steps for row in read_rows(message.step)] == read_rows(write_outbox(outbox, 0).step)
    for message in steps:
        # An output's end is with its tokens, and they are behind their prompt.
        rows, events = read_rows(message.step), message.step.events
        assert [event.handle for event in events] == 2 * sorted({handle for handle, *_ in rows})
        assert message.step.step_id == 7


async def test_reader_that_never_reads_is_cut_off_and_memory_given_back() -> None:
    stream, reader = make_stream(max_backlog_bytes=100_000), Reader()
    writer = asyncio.ensure_future(stream.run_writer(reader.write))
    steps = 0
    while not stream.ending.done():
        stream.send_outbox(tokens(100, steps))
        steps += 1
        assert steps < 1000
        await asyncio.sleep(0)
    with pytest.raises(StreamEnded, match="reads too slowly") as caught:
        stream.ending.result()
    assert status_code(caught.value.status) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 90 < steps < 120
    writer.cancel()


async def test_the_end_of_a_stream_that_nobody_waits_for_any_more_is_no_error() -> None:
    problems: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context["message"]))
    stream = make_stream()
    stream.end(ended(grpc.StatusCode.UNAVAILABLE, "the backend is ending"))
    del stream
    gc.collect()
    assert problems == []


async def test_only_the_newest_state_waits() -> None:
    stream, reader = make_stream(), Reader()
    for number in range(100):
        stream.send_state(engine_pb2.EngineState(reason=str(number)))
    await run(stream, reader)
    assert [message.state.reason for message in reader.received] == ["99"]


async def test_replay_longer_than_the_bound_arrives() -> None:
    stream, reader = make_stream(max_backlog_bytes=1000), Reader()
    stream.send_replay(iter([added(1), added(2)]), size=1_000_000)
    await run(stream, reader)
    stream.send_outbox(tokens(1, 1))
    await run(stream, reader)
    assert reader.kinds == ["added", "added", "step"]


class Log(StepLog):
    """Steps whose records are given."""

    def settle(self, record: bytes) -> None:
        self.newest.append(record)
        self.num_records += 1


async def test_records_of_all_steps_go_with_an_outbox_now_and_then_merged_or_not() -> None:
    log, now_ns = Log(), 0
    stream, reader = ServiceStream(1, 1 << 20, 1 << 20, clock=lambda: now_ns, steps=log.reader()), Reader()
    for step in (b"1", b"2", b"3"):
        log.settle(step)
        if step != b"2":
            stream.send_outbox(tokens(1, int(step)))
    await run(stream, reader)
    for at_ns, step in ((RECORDS_EVERY_NS - 1, b"4"), (RECORDS_EVERY_NS, b"5")):
        now_ns = at_ns
        log.settle(step)
        stream.send(added(1))
        stream.send_outbox(tokens(1, int(step)))
        await run(stream, reader)
    stream.send_outbox(tokens(1, 4))
    await run(stream, reader)
    records = [message.step.step_records for message in reader.received if message.HasField("step")]
    assert records == [b"123", b"", b"45", b""]


async def test_records_go_at_once_with_what_they_explain_and_before_a_pause() -> None:
    log = Log()
    stream, reader = ServiceStream(1, 1 << 20, 1 << 20, clock=lambda: 0, steps=log.reader()), Reader()
    done = RequestDone(*[0] * 14)
    for step, events in (
        (b"1", []),
        (b"2", [(1, done)]),
        (b"3", [(1, msgspec.structs.replace(done, engine_trace=b"trace"))]),
    ):
        log.settle(step)
        stream.send_outbox(Outbox(events=events))
        await run(stream, reader)
    log.settle(b"4")
    stream.send_state(engine_pb2.EngineState(reason="beat"))
    await run(stream, reader)
    assert [message.step.step_records for message in reader.received] == [b"1", b"", b"23", b"4", b""]
    assert reader.received[-1].state.reason == "beat"


async def test_done_frees_the_handle() -> None:
    stream = make_stream()
    stream.handles = {1, 2}
    stream.send_outbox(Outbox(events=[(1, RequestDone(*[0] * 14))]))
    assert stream.handles == {2}
