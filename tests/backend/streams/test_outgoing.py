"""Outboxes lose, double and reorder nothing, and a long log arrives whole in parts."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace_backend.engine.answers import AttachSnapshot
from headrace_backend.engine.events import (
    EndReason,
    LogprobColumns,
    OutputEnd,
    OutputSnapshot,
    PromptLogprobs,
    RequestDone,
    Started,
)
from headrace_backend.engine.requests.outbox import Outbox
from headrace_backend.server.streams.log_replay import write_attached
from headrace_backend.server.streams.outgoing import merge_outbox, split_outbox, write_outbox
from headrace_protos.engine.v1 import engine_pb2

# (handle, output, token, top entries or None for a token without log probabilities)
Row = tuple[int, int, int, list[int] | None]
rows = st.lists(
    st.tuples(
        st.integers(1, 2**32 - 1),
        st.integers(0, 127),
        st.integers(0, 2**31 - 1),
        st.none() | st.lists(st.integers(0, 1000), max_size=3),
    ),
    max_size=12,
)


def outbox_of(entries: list[Row], step_id: int) -> Outbox:
    outbox = Outbox(step_id=step_id)
    for row, (handle, output, token, tops) in enumerate(entries):
        outbox.handles.append(handle)
        outbox.output_indices.append(output)
        outbox.tokens.append(token)
        if tops is not None:
            outbox.logprob_rows.append(row)
            add_logprobs(outbox.logprobs, token, tops)
    outbox.events.append((step_id, Started(0)))
    return outbox


def add_logprobs(columns: LogprobColumns, token: int, tops: list[int]) -> None:
    columns.sampled.append(-0.25 * (token % 7))
    columns.ranks.append(1 + token % 3)
    columns.top_counts.append(len(tops))
    columns.top_token_ids.extend(tops)
    columns.top_logprobs.extend([-1.0] * len(tops))


def read_rows(step: engine_pb2.StepOutputs) -> list[Row]:
    columns = zip(
        np.frombuffer(step.handles, "<u4").tolist(),
        np.frombuffer(step.output_indices, "<u2").tolist(),
        np.frombuffer(step.tokens, "<u4").tolist(),
        strict=True,
    )
    tops = iter(np.frombuffer(step.logprobs.top_token_ids, "<u4").tolist())
    counts = np.frombuffer(step.logprobs.top_counts, "<u2").tolist()
    found = {
        row: [next(tops) for _ in range(count)]
        for row, count in zip(np.frombuffer(step.logprob_rows, "<u4").tolist(), counts, strict=True)
    }
    return [(*entry, found.get(row)) for row, entry in enumerate(columns)]


@given(st.lists(rows, min_size=1, max_size=5))
def test_merged_outboxes_carry_every_row_in_order(steps: list[list[Row]]) -> None:
    merged = outbox_of(steps[0], 1)
    for number, entries in enumerate(steps[1:], start=2):
        merge_outbox(merged, outbox_of(entries, number))
    step = write_outbox(merged, now_ns=0).step
    assert read_rows(step) == [row for entries in steps for row in entries]
    assert [event.handle for event in step.events] == list(range(1, len(steps) + 1))
    assert step.step_id == len(steps)


@given(rows, st.integers(1, 2000))
def test_an_outbox_in_parts_carries_all_that_the_whole_does(entries: list[Row], max_bytes: int) -> None:
    outbox = outbox_of([(1 + handle % 4, *rest) for handle, *rest in entries], 3)
    outbox.events += [(handle, OutputEnd(0, EndReason.STOP)) for handle in (2, 9)]
    parts = [write_outbox(part, now_ns=0).step for part in split_outbox(outbox, max_bytes)]
    handles = [{handle for handle, *_ in read_rows(part)} | {event.handle for event in part.events} for part in parts]
    assert sum(map(len, handles)) == len(set().union(*handles)), "all of a handle is in one part"
    whole = write_outbox(outbox, now_ns=0).step
    for handle in set().union(*handles):
        rows_there = [row for part in parts for row in read_rows(part) if row[0] == handle]
        assert rows_there == [row for row in read_rows(whole) if row[0] == handle]
        events_there = [event for part in parts for event in part.events if event.handle == handle]
        assert events_there == [event for event in whole.events if event.handle == handle]
    for part, has in zip(parts, handles, strict=True):
        assert len(has) == 1 or part.ByteSize() <= max_bytes + 100
        assert part.step_id == 3


@given(
    st.lists(st.lists(st.none() | st.lists(st.integers(0, 9), max_size=3), max_size=40), min_size=1, max_size=3),
    st.lists(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=9), max_size=4),
    st.integers(1, 300),
    st.booleans(),
)
def test_replay_is_the_same_in_one_message_and_in_parts(
    outputs: list[list[list[int] | None]], prompt: list[list[list[int]]], max_bytes: int, ended: bool
) -> None:
    snapshot = snapshot_of(outputs, prompt, ended)
    [whole] = write_attached(7, snapshot, now_ns=5, max_bytes=1 << 30)
    parts = list(write_attached(7, snapshot, now_ns=5, max_bytes=max_bytes))
    assert read_replay([whole]) == read_replay(parts)
    assert parts[0].attached.service_state == b"state"
    # No part is much larger than asked: one token, 24 bytes and its top entries, always fits.
    largest = max((part.columns.num_bytes for part in snapshot.prompt_logprobs), default=0)
    assert all(part.ByteSize() < 3 * max_bytes + largest + 400 for part in parts)


def snapshot_of(outputs: list[list[list[int] | None]], prompt: list[list[list[int]]], ended: bool) -> AttachSnapshot:
    snapshots = []
    parts: list[PromptLogprobs] = []
    for tops_of_part in prompt:
        parts.append(PromptLogprobs(parts[-1].end if parts else 1, LogprobColumns()))
        for token, tops_of_token in enumerate(tops_of_part):
            add_logprobs(parts[-1].columns, token, tops_of_token)
    for index, tops_of in enumerate(outputs):
        with_logprobs = index % 2 == 0
        columns = LogprobColumns()
        for token, tops in enumerate(tops_of):
            add_logprobs(columns, token, tops or [])
        end = OutputEnd(index, EndReason.LENGTH) if ended else None
        tokens = array("I", range(len(tops_of)))
        snapshots.append(OutputSnapshot(index, tokens, columns if with_logprobs else None, end))
    done = RequestDone(*[1] * 13, ended_at_ns=3) if ended else None
    return AttachSnapshot(b"state", 4, True, 2, snapshots, done, parts)


def read_replay(messages: list[engine_pb2.FromEngine]) -> tuple[object, ...]:
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    tops: dict[int, list[int]] = {}
    ends: list[int] = []
    done: list[int] = []
    prompt: list[tuple[list[float], list[int]]] = []

    def add_prompt(part: engine_pb2.PromptLogprobColumns) -> None:
        assert not any(tokens.values()) and part.first_token_index == 1 + sum(len(sampled) for sampled, _ in prompt)
        columns = part.columns
        prompt.append(
            (np.frombuffer(columns.sampled, "<f4").tolist(), np.frombuffer(columns.top_token_ids, "<u4").tolist())
        )

    def add(output: int, ids: list[int], columns: engine_pb2.LogprobColumns) -> None:
        tokens.setdefault(output, []).extend(ids)
        logprobs.setdefault(output, []).extend(np.frombuffer(columns.sampled, "<f4").tolist())
        tops.setdefault(output, []).extend(np.frombuffer(columns.top_token_ids, "<u4").tolist())

    for message in messages:
        for part in message.attached.prompt_logprobs:
            add_prompt(part)
        for log in message.attached.outputs:
            add(log.output_index, np.frombuffer(log.token_ids, "<u4").tolist(), log.logprobs)
            ends += [log.end.output_index] if log.HasField("end") else []
        done += [message.attached.done.ended_ago_ns] if message.attached.HasField("done") else []
        step = message.step
        for output in set(np.frombuffer(step.output_indices, "<u2").tolist()):
            add(output, np.frombuffer(step.tokens, "<u4").tolist(), step.logprobs)
        for event in step.events:
            assert event.handle == 7
            if event.HasField("prompt_logprobs"):
                add_prompt(event.prompt_logprobs)
            ends += [event.output_end.output_index] if event.HasField("output_end") else []
            done += [event.done.ended_ago_ns] if event.HasField("done") else []
    return tokens, logprobs, tops, ends, done, prompt
