"""The columns of a recording: entries keep step with messages, whatever is written when."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_facts.facts import Detail, Emission, SpanContext
from headrace_service import errors
from headrace_service.api import event_wire
from headrace_service.streams import delivery
from headrace_service.streams.generation_stream import GenerationStream
from headrace_service.streams.ledger import DeliveryClock
from headrace_service.streams.render_state import RenderState
from headrace_service.text.detokenizer import PieceTable
from headrace_service.tracing.generation_trace import GenerationTrace
from headrace_service.tracing.recording import OUTPUT_SHIFT, WAITING_CHANGED, Recording

Message = tuple[int, int]
# Tokens, when made, when written.
Row = tuple[int, int, int]

_PIECES = PieceTable([f"w{index} ".encode() for index in range(16)], frozenset(), False, 16)


def rows_of(emission: Emission) -> list[Row]:
    made = np.frombuffer(emission.made_at_ns, "<u8").tolist()
    counts = np.frombuffer(emission.counts, "<u4").tolist() or [1] * len(made)
    written = np.frombuffer(emission.written_at_ns, "<u8").tolist() or made
    return list(zip(counts, made, written, strict=True))


@given(
    st.integers(1, 4).flatmap(
        lambda outputs: st.tuples(
            st.just(outputs),
            st.lists(st.lists(st.tuples(st.integers(0, outputs - 1), st.sampled_from((0, 1, 2, 300))), max_size=4)),
        )
    ),
    st.booleans(),
)
def test_what_was_written_is_reported_per_output_and_nothing_else(
    case: tuple[int, list[list[Message]]], last_is_written: bool
) -> None:
    num_outputs, writes = case
    recording = Recording()
    expected: dict[int, list[Row]] = {index: [] for index in range(num_outputs)}
    for number, messages in enumerate(writes, 1):
        for output, num_tokens in messages:
            if num_tokens:
                recording.entries.append((output << OUTPUT_SHIFT) + num_tokens)
            else:
                recording.skip(1)
        if number < len(writes) or last_is_written:
            recording.wrote_all(10 * number, 10 * number + 5)
            for output, num_tokens in messages:
                if num_tokens:
                    expected[output].append((num_tokens, 10 * number, 10 * number + 5))
    emissions = recording.emissions(num_outputs)
    assert (
        emissions == [] if not any(expected.values()) else [rows_of(each) for each in emissions] == [*expected.values()]
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1), st.integers(0, 2))
def test_a_message_that_more_waited_behind_was_written_when_the_next_one_began(
    messages: list[tuple[int, bool]], num_unwritten: int
) -> None:
    recording = Recording()
    recording.entries = [num_tokens for num_tokens, _ in messages] + [1] * num_unwritten
    for time, (before, (_, waits)) in enumerate(
        zip([True, *(waits for _, waits in messages)], messages, strict=False), 100
    ):
        recording.began_ns += [time] if waits is before else [WAITING_CHANGED, time]
    expected = [
        (num_tokens, time, time + 1 if after is not None and not after[1] else time)
        for time, ((num_tokens, _), after) in enumerate(zip(messages, [*messages[1:], None], strict=True), 100)
        if num_tokens
    ]
    assert [row for emission in recording.emissions(1) for row in rows_of(emission)] == expected


@given(st.lists(st.sampled_from((0, 0, 1)), max_size=2), st.integers(1, 300), st.integers(0, 2), st.integers(0, 2))
def test_a_reader_that_kept_up_is_reported_in_one_column(
    before: list[int], num_tokens: int, num_after: int, num_unwritten: int
) -> None:
    sizes = before + [1] * num_tokens + [0] * num_after
    recording = Recording()
    recording.entries = sizes + [7] * num_unwritten
    recording.began_ns = list(range(100, 100 + len(sizes)))
    (emission,) = recording.emissions(1)
    rows = [(size, time, time) for time, size in enumerate(sizes, 100) if size]
    assert rows_of(emission) == rows
    if before == sorted(before):
        assert emission == Emission(b"", np.array([time for _, time, _ in rows], "<u8").tobytes(), b"")


@pytest.mark.parametrize("num_outputs", [1, 2])
async def test_a_writer_notes_each_message_and_how_long_a_reader_held_it_up(
    monkeypatch: pytest.MonkeyPatch, num_outputs: int
) -> None:
    clock_ns = 1000
    monkeypatch.setattr("time.monotonic_ns", lambda: clock_ns)
    span = SpanContext("ab" * 16, "cd" * 8, sampled=True)
    trace = GenerationTrace("m", "r", "chat", "generate", {}, num_outputs, 1, span, Detail.SPAN)
    render = RenderState(skip_special=True, with_logprobs=False)
    clock = DeliveryClock(clock_ns, subscribed=False)
    stream = GenerationStream(1, "0" * 26, _PIECES, render, clock, event_wire, trace=trace)
    stream.announce("r", 1)
    num_written = 0

    async def write(message: bytes) -> None:
        nonlocal clock_ns, num_written
        num_written += 1
        # The transport takes the third message 500 ns later; by then more has come.
        if num_written == 3:
            clock_ns += 500
            stream.push(0, 3)

    writer = asyncio.create_task(delivery.deliver(stream, write))
    for token in (1, 2):
        await asyncio.sleep(0)
        clock_ns += 10
        stream.push(num_outputs - 1, token)
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    stream.fail(errors.cancelled())
    with pytest.raises(errors.ServiceError):
        await writer
    assert stream.recording is not None
    emissions = [rows_of(emission) for emission in stream.recording.emissions(num_outputs)]
    first, second, third = (1, 1010, 1010), (1, 1020, 1520), (1, 1520, 1520)
    assert emissions == ([[first, second, third]] if num_outputs == 1 else [[third], [first, second]])
