"""The ring between engine and workers, with real processes at the other end where it matters."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.descriptors import settled_descriptors, stay_open
from tests.support.examples import examples

from headrace_backend.step.ring import RingCorrupt, RingDescriptors, RingFull, RingReader, RingWriter, create_ring

PAGE = 4096

# Reads from ring `sys.argv[1]`, writes every record's kind + 1 and payload reversed to ring
# `sys.argv[2]`, ends at kind 0.
ECHO = """
import sys
from headrace_backend.step.ring import RingDescriptors, RingReader, RingWriter
memory, data, space, index = map(int, sys.argv[1].split(","))
reader = RingReader(memory, data, space, index)
memory, data, space = map(int, sys.argv[2].split(","))
writer = RingWriter(RingDescriptors(memory, (data,), space))
while True:
    kind, payload = reader.read(60.0, spin_s=0.0005)
    if kind == 0:
        break
    writer.write(kind + 1, payload[::-1], 60.0)
"""


@pytest.fixture
def nothing_stays_open() -> Iterator[None]:
    """Fails the test that leaves descriptors open."""
    before = settled_descriptors()
    yield
    assert not stay_open(before)


def reader_of(ring: RingDescriptors, index: int = 0) -> RingReader:
    return RingReader(ring.memory, ring.data_events[index], ring.space_event, index)


def start_echo(plans: RingDescriptors, results: RingDescriptors, index: int = 0) -> subprocess.Popen[bytes]:
    arguments = [
        f"{plans.memory},{plans.data_events[index]},{plans.space_event},{index}",
        f"{results.memory},{results.data_events[0]},{results.space_event}",
    ]
    passed = (
        plans.memory,
        plans.data_events[index],
        plans.space_event,
        results.memory,
        results.data_events[0],
        results.space_event,
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", ECHO, *arguments], pass_fds=passed, env=environment)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(0, 2 * PAGE - 8), max_size=12), st.integers(0, 8))
def test_a_ring_that_was_read_takes_half_of_itself_at_once(before: list[int], less: int) -> None:
    ring = create_ring(2 * PAGE, 1)
    writer, reader = RingWriter(ring), reader_of(ring)
    for size in before:
        try:
            writer.write(1, bytes(size), timeout_s=0)
        except RingFull:
            # Its place is skipped, and read so.
            assert reader.try_read() is None
            writer.write(1, bytes(size), timeout_s=0)
        assert reader.try_read() == (1, bytes(size))
    payload = bytes(writer.max_payload_at_once - less)
    writer.write(2, payload, timeout_s=0)
    assert reader.try_read() == (2, payload)
    for part in (writer, reader, ring):
        part.close()


@pytest.mark.usefixtures("nothing_stays_open")
@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, PAGE - 8)), max_size=60),
    st.integers(1, 8),
)
def test_records_arrive_whole_and_in_order_across_the_wrap(records: list[tuple[int, int]], ahead: int) -> None:
    ring = create_ring(PAGE, 1)
    writer, reader = RingWriter(ring), reader_of(ring)
    pending: list[tuple[int, bytes]] = []
    for number, (kind, size) in enumerate(records):
        payload = bytes((number + i) % 251 for i in range(size))
        while True:
            try:
                writer.write(kind, payload, 0)
                break
            except RingFull:
                if pending:
                    assert reader.try_read() == pending.pop(0)
                else:
                    # Only a skip stood in the way: reading steps over it.
                    assert reader.try_read() is None
        pending.append((kind, payload))
        while len(pending) > ahead:
            assert reader.try_read() == pending.pop(0)
    for record in pending:
        assert reader.try_read() == record
    assert reader.try_read() is None
    writer.close()
    reader.close()
    ring.close()


@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(0, 3 * PAGE), min_size=1, max_size=300), st.randoms(use_true_random=False))
def test_another_process_answers_every_record(sizes: list[int], random: object) -> None:
    plans, results = create_ring(4 * PAGE, 1), create_ring(4 * PAGE, 1)
    child = start_echo(plans, results)
    writer, reader = RingWriter(plans), reader_of(results)
    payloads = [random.randbytes(size) for size in sizes]  # type: ignore[attr-defined]
    answered = 0
    for number, payload in enumerate(payloads):
        while True:
            try:
                writer.write(1 + number, payload, 0)
                break
            except RingFull:
                assert reader.read(60.0) == (2 + answered, payloads[answered][::-1])
                answered += 1
    while answered < len(payloads):
        assert reader.read(60.0, spin_s=0.001) == (2 + answered, payloads[answered][::-1])
        answered += 1
    writer.write(0, b"", 1.0)
    assert child.wait(240) == 0
    for part in (writer, reader, plans, results):
        part.close()


def test_every_reader_sees_every_record() -> None:
    plans = create_ring(PAGE, 3)
    results = [create_ring(PAGE, 1) for _ in range(3)]
    children = [start_echo(plans, result, index) for index, result in enumerate(results)]
    writer, readers = RingWriter(plans), [reader_of(result) for result in results]
    for number in range(1, 200):
        writer.write(number, str(number).encode() * 40, 60.0)
        for reader in readers:
            assert reader.read(60.0) == (number + 1, (str(number).encode() * 40)[::-1])
    writer.write(0, b"", 1.0)
    assert [child.wait(240) for child in children] == [0, 0, 0]


def test_a_dead_reader_fills_its_own_ring_only() -> None:
    plans, results = create_ring(PAGE, 1), create_ring(PAGE, 1)
    other = create_ring(PAGE, 1)
    child = start_echo(plans, results)
    writer, reader, other_writer = RingWriter(plans), reader_of(results), RingWriter(other)
    writer.write(1, b"alive", 1.0)
    assert reader.read(60.0) == (2, b"evila")
    child.send_signal(signal.SIGKILL)
    child.wait()
    writer.write(1, b"x" * 3000, 1.0)
    started = time.monotonic()
    with pytest.raises(RingFull, match="reader"):
        writer.write(1, b"x" * 3000, 0.2)
    assert 0.2 <= time.monotonic() - started < 20.0
    other_writer.write(1, b"fine", 0)
    assert reader_of(other).try_read() == (1, b"fine")


def test_a_failed_write_can_be_repeated_and_order_stays() -> None:
    ring = create_ring(PAGE, 1)
    writer, reader = RingWriter(ring), reader_of(ring)
    writer.write(1, b"a" * 3000, 0)
    for _ in range(3):
        with pytest.raises(RingFull):
            writer.write(2, b"b" * 3000, 0)
    assert reader.try_read() == (1, b"a" * 3000)
    assert reader.try_read() is None  # a skip, at most
    writer.write(2, b"b" * 3000, 0)
    assert reader.try_read() == (2, b"b" * 3000)


def test_a_slow_reader_holds_the_writer_back() -> None:
    ring = create_ring(PAGE, 2)
    writer, fast, slow = RingWriter(ring), reader_of(ring, 0), reader_of(ring, 1)
    written = 0
    while True:
        try:
            writer.write(written, b"r" * 500, 0)
        except RingFull:
            break
        assert fast.try_read() == (written, b"r" * 500)
        written += 1
    assert fast.try_read() is None
    assert [slow.try_read() for _ in range(written)] == [(n, b"r" * 500) for n in range(written)]


def test_limits_are_refused_by_name() -> None:
    ring = create_ring(1, 1)
    writer = RingWriter(ring)
    assert writer.max_payload_bytes == PAGE - 8
    writer.write(0, b"x" * (PAGE - 8), 0)
    with pytest.raises(ValueError, match="payload of 4089 bytes; the ring takes at most 4088"):
        writer.write(0, b"x" * (PAGE - 7), 0)
    with pytest.raises(ValueError, match="kind is -1"):
        writer.write(-1, b"", 0)
    with pytest.raises(ValueError, match="capacity_bytes is 0"):
        create_ring(0, 1)
    with pytest.raises(ValueError, match="num_readers is 63"):
        create_ring(PAGE, 63)
    with pytest.raises(ValueError, match="reader_index is 1"):
        RingReader(ring.memory, ring.data_events[0], ring.space_event, 1)
    with pytest.raises(ValueError, match="2 data events"):
        RingWriter(RingDescriptors(ring.memory, ring.data_events * 2, ring.space_event))


def test_the_event_is_readable_until_all_was_read() -> None:
    ring = create_ring(PAGE, 1)
    writer, reader = RingWriter(ring), reader_of(ring)
    poll = select.poll()
    poll.register(reader.fileno(), select.POLLIN)
    assert poll.poll(0) == []
    writer.write(1, b"", 0)
    writer.write(2, b"", 0)
    assert poll.poll(0)
    assert reader.try_read() == (1, b"")
    assert poll.poll(0)
    assert reader.try_read() == (2, b"")
    assert reader.try_read() is None
    assert poll.poll(0) == []


def test_read_gives_up_after_its_time() -> None:
    reader = reader_of(create_ring(PAGE, 1))
    started = time.monotonic()
    assert reader.read(0.1, spin_s=0.02) is None
    assert 0.09 <= time.monotonic() - started < 20.0


def test_foreign_bytes_in_the_ring_are_noticed() -> None:
    ring = create_ring(PAGE, 1)
    writer, reader = RingWriter(ring), reader_of(ring)
    writer.write(1, b"abc", 0)
    os.pwrite(ring.memory, (10**6).to_bytes(4, "little"), PAGE)
    with pytest.raises(RingCorrupt):
        reader.try_read()


def test_other_memory_is_no_ring() -> None:
    ring = create_ring(PAGE, 1)
    os.pwrite(ring.memory, b"\0" * 8, 0)
    with pytest.raises(ValueError, match="no ring"):
        reader_of(ring)


def test_the_memory_cannot_be_shrunk() -> None:
    ring = create_ring(PAGE, 1)
    with pytest.raises(PermissionError):
        os.ftruncate(ring.memory, 0)
