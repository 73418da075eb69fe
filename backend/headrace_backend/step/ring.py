"""A ring of byte records in shared memory.

Step plans and results cross in it between the engine and its workers.

Owns the memory's layout, the cursors and the waiting. Does not own what a record means: a record is
a kind (`messages.RecordKind`) and a payload. One process writes, one or more read, and every reader
sees every record in order. The memory is an anonymous file (memfd) and its descriptors are
inherited: no names that could outlive a crash, nothing to clean up. One eventfd per reader says
"there is data", one says "there is space", so that both sides can sleep in poll() or in an event
loop.

Layout: a header page with the geometry and, on a cache line each, the write cursor and every
reader's cursor; then `capacity` bytes of records. Cursors are int64 counts of bytes since the
start, never wrapped; `cursor % capacity` is the place. A record is `int32 length, int32 kind,
payload, padding to 8`. A record never wraps around: where it does not fit before the end, a skip
record takes the rest.

Why readers never see half a record. The writer copies the payload, then publishes it by storing the
write cursor; a reader loads the cursor, then copies the payload out, then stores its own cursor,
which is what lets the writer reuse the place. A cursor is one aligned 8-byte store, so it is never
torn. x86 keeps the order of stores and of loads by itself. ARM does not, so `_fence` stands between
payload and cursor on both sides: the release of a lock (no earlier access may move below it)
followed by its acquisition (no later one may move above it).

Why no wake-up is lost. The writer signals after it published, always. A reader that finds the ring
empty first clears its event and then looks again; whatever was published before the clearing is
seen by that look, whatever came later sets the event again. The same holds for space.

A reader that died stops its cursor: the writer then gets `RingFull`, and no other ring is touched.
Noticing the death is the owner's task.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import struct
import threading
import time
from typing import NamedTuple

_MAGIC = 0x48524E47
_VERSION = 1
_HEADER_BYTES = 4096
_CACHE_LINE = 64
_GEOMETRY = struct.Struct("<IIqI")  # magic, version, capacity, number of readers
_RECORD = struct.Struct("<ii")  # payload length, kind
_ALIGNMENT = 8
_SKIP = -1  # kind of the record that fills the end of the ring
_MAX_READERS = _HEADER_BYTES // _CACHE_LINE - 2
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RingFull(Exception):  # the state has a name, as queue.Full does
    """The readers left no space within the time allowed."""


class RingCorrupt(Exception):
    """A record's length can't be right: something else wrote into the memory."""


class RingDescriptors(NamedTuple):
    """A ring's descriptors, all close-on-exec: hand them on with subprocess's `pass_fds`."""

    memory: int
    # One eventfd per reader.
    data_events: tuple[int, ...]
    space_event: int

    def close(self) -> None:
        """Closes all of them. Writers and readers made from them hold their own duplicates."""
        for descriptor in (self.memory, *self.data_events, self.space_event):
            os.close(descriptor)


def create_ring(capacity_bytes: int, num_readers: int) -> RingDescriptors:
    """Makes an empty ring.

    Args:
        capacity_bytes: Space for records, rounded up to whole pages. A record takes its payload and
            up to 15 bytes more.
        num_readers: How many readers there will be, 1 to 62. All must read, or the ring fills.

    Raises:
        ValueError: One of the two is out of range.
        OSError: There are no descriptors left, or no memory; nothing is left open.
    """
    if capacity_bytes < 1:
        raise ValueError(f"capacity_bytes is {capacity_bytes}; at least 1 is needed")
    if not 1 <= num_readers <= _MAX_READERS:
        raise ValueError(f"num_readers is {num_readers}; it must be 1 to {_MAX_READERS}")
    capacity = -(-capacity_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
    with contextlib.ExitStack() as made:
        memory = os.memfd_create("headrace-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        made.callback(os.close, memory)
        os.ftruncate(memory, _HEADER_BYTES + capacity)
        # Sealed, nobody can shrink the file under the others (SIGBUS).
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        os.pwrite(memory, _GEOMETRY.pack(_MAGIC, _VERSION, capacity, num_readers), 0)
        events = []
        for _ in range(num_readers + 1):
            events.append(os.eventfd(0, flags))
            made.callback(os.close, events[-1])
        made.pop_all()
    return RingDescriptors(memory, tuple(events[:-1]), events[-1])


class _Memory:
    """The mapping: cursors and record space.

    Cursor 0 is the writer's, cursor 1 + i is reader i's.
    """

    def __init__(self, descriptor: int) -> None:
        magic, version, capacity, num_readers = _GEOMETRY.unpack(os.pread(descriptor, _GEOMETRY.size, 0))
        if (magic, version) != (_MAGIC, _VERSION):
            raise ValueError(f"descriptor {descriptor} is no ring of version {_VERSION}")
        self.capacity: int = capacity
        self.num_readers: int = num_readers
        self._map = mmap.mmap(descriptor, _HEADER_BYTES + capacity)
        self._view = memoryview(self._map)
        self.cursors = self._view[_CACHE_LINE:_HEADER_BYTES].cast("q")
        self.records = self._view[_HEADER_BYTES:]
        self._lock = threading.Lock()
        self._lock.acquire()

    @staticmethod
    def index(cursor: int) -> int:
        """Index of cursor number `cursor` in `cursors`."""
        return cursor * (_CACHE_LINE // 8)

    def fence(self) -> None:
        """Keeps every earlier memory access before every later one (see the module's text)."""
        self._lock.release()
        self._lock.acquire()

    def close(self) -> None:
        self.cursors.release()
        self.records.release()
        self._view.release()
        self._map.close()


class _Event:
    """Our duplicate of an eventfd: signal it, clear it, wait for it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = os.dup(descriptor)
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)

    def signal(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def wait(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1000)

    def close(self) -> None:
        os.close(self.descriptor)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class RingWriter:
    """The one writer of a ring. Not safe for several threads."""

    def __init__(self, descriptors: RingDescriptors) -> None:
        """Maps the ring; duplicates the descriptors, which the caller may close.

        Raises:
            ValueError: The memory is no ring, or the number of events is not its number of readers.
        """
        self._memory = _Memory(descriptors.memory)
        if len(descriptors.data_events) != self._memory.num_readers:
            raise ValueError(
                f"{len(descriptors.data_events)} data events given; the ring has {self._memory.num_readers} readers"
            )
        self._reader_indices = [_Memory.index(1 + reader) for reader in range(self._memory.num_readers)]
        self._data_events = [_Event(descriptor) for descriptor in descriptors.data_events]
        self._space_event = _Event(descriptors.space_event)
        self._cursor = self._memory.cursors[0]

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that can be written, given readers that read."""
        return self._memory.capacity - _RECORD.size

    @property
    def max_payload_at_once(self) -> int:
        """The largest payload that a ring always takes once its readers have read all of it.

        It does not depend on where in the ring its end is.

        A larger one may need a skip before it, and the place of the skip.
        """
        return self._memory.capacity // 2 // _ALIGNMENT * _ALIGNMENT - _RECORD.size

    def write(self, kind: int, payload: bytes | memoryview, timeout_s: float) -> None:
        """Appends one record and wakes the readers.

        Args:
            kind: What the record is, 0 to 2**31 - 1.
            payload: Its bytes, possibly none; of a memoryview the items are bytes.
            timeout_s: How long to wait for space; 0 does not wait.

        Raises:
            ValueError: The kind is out of range, or the payload could never fit.
            RingFull: There was no space in time. Nothing was written; the same record may be tried
                again.
        """
        if not 0 <= kind < 1 << 31:
            raise ValueError(f"kind is {kind}; it must be 0 to {2**31 - 1}")
        if len(payload) > self.max_payload_bytes:
            raise ValueError(f"payload of {len(payload)} bytes; the ring takes at most {self.max_payload_bytes}")
        deadline = time.monotonic() + timeout_s
        needed = _padded(_RECORD.size + len(payload))
        left = self._memory.capacity - self._cursor % self._memory.capacity
        if left < needed:
            # Published by itself: a record longer than half the ring only fits once the readers
            # have passed the skip.
            self._await_space(left, deadline)
            self._publish(_SKIP, b"", left)
        self._await_space(needed, deadline)
        self._publish(kind, payload, needed)

    def _publish(self, kind: int, payload: bytes | memoryview, size: int) -> None:
        offset = self._cursor % self._memory.capacity
        records = self._memory.records
        length = len(payload) if kind != _SKIP else size - _RECORD.size
        _RECORD.pack_into(records, offset, length, kind)
        start = offset + _RECORD.size
        records[start : start + len(payload)] = payload
        self._memory.fence()
        self._cursor += size
        self._memory.cursors[0] = self._cursor
        for event in self._data_events:
            event.signal()

    def _free(self) -> int:
        cursors = self._memory.cursors
        slowest = min(cursors[index] for index in self._reader_indices)
        return self._memory.capacity - (self._cursor - slowest)

    def _await_space(self, size: int, deadline: float) -> None:
        while self._free() < size:
            self._space_event.clear()
            if self._free() >= size:
                break
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise RingFull(
                    f"no space for {size} bytes in a ring of {self._memory.capacity}; a reader is behind or gone"
                )
            self._space_event.wait(remaining)
        # What follows overwrites memory that the readers have left.
        self._memory.fence()

    def close(self) -> None:
        """Gives back mapping and duplicates. Records that were written stay readable."""
        self._memory.close()
        for event in (*self._data_events, self._space_event):
            event.close()


class RingReader:
    """One of a ring's readers. Not safe for several threads."""

    def __init__(self, memory_fd: int, data_event_fd: int, space_event_fd: int, reader_index: int) -> None:
        """Maps the ring; duplicates the descriptors, which the caller may close.

        Raises:
            ValueError: The memory is no ring, or it has no reader of this index.
        """
        self._memory = _Memory(memory_fd)
        if not 0 <= reader_index < self._memory.num_readers:
            raise ValueError(f"reader_index is {reader_index}; the ring has {self._memory.num_readers} readers")
        self._data_event = _Event(data_event_fd)
        self._space_event = _Event(space_event_fd)
        self._index = _Memory.index(1 + reader_index)
        self._cursor = self._memory.cursors[self._index]

    def fileno(self) -> int:
        """The data event, readable when there may be records.

        An event loop that waits for it calls `try_read` until that returns None.
        """
        return self._data_event.descriptor

    def try_read(self) -> tuple[int, bytes] | None:
        """The next record as (kind, payload), or None, which also clears the data event.

        Raises:
            RingCorrupt: A record's length can't be right.
        """
        record = self._take()
        if record is None:
            self._data_event.clear()
            record = self._take()
            if record is not None:
                # There may be more, and the event no longer says so.
                self._data_event.signal()
        return record

    def read(self, timeout_s: float, spin_s: float = 0.0) -> tuple[int, bytes] | None:
        """The next record, or None if none came in time.

        Args:
            timeout_s: Longest wait in all, in seconds.
            spin_s: For how much of it to look again and again, before sleeping: saves the wake-up
                (tens of microseconds), costs a core.

        Raises:
            RingCorrupt: A record's length can't be right.
        """
        record = self._take()
        if record is not None:
            return record
        start = time.monotonic()
        spin_end = start + min(spin_s, timeout_s)
        while time.monotonic() < spin_end:
            if (record := self._take()) is not None:
                return record
            os.sched_yield()
        deadline = start + timeout_s
        while (record := self.try_read()) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            self._data_event.wait(remaining)
        return record

    def _take(self) -> tuple[int, bytes] | None:
        """The next record without looking at the event; steps over skips."""
        memory = self._memory
        while (written := memory.cursors[0]) != self._cursor:
            memory.fence()
            offset = self._cursor % memory.capacity
            length, kind = _RECORD.unpack_from(memory.records, offset)
            size = _padded(_RECORD.size + length)
            if not 0 <= length <= memory.capacity - _RECORD.size - offset or size > written - self._cursor:
                raise RingCorrupt(f"a record of {length} bytes at offset {offset} in a ring of {memory.capacity}")
            start = offset + _RECORD.size
            payload = b"" if kind == _SKIP else bytes(memory.records[start : start + length])
            memory.fence()
            self._cursor += size
            memory.cursors[self._index] = self._cursor
            self._space_event.signal()
            if kind != _SKIP:
                return kind, payload
        return None

    def close(self) -> None:
        """Gives back mapping and duplicates. The ring goes on waiting for this reader."""
        self._memory.close()
        self._data_event.close()
        self._space_event.close()
