"""The way of weights to a GPU.

Several readers fill a few pinned buffers, and copies from them run while others are filled.

Owns the buffers, their turn and the check for values that are not finite. A buffer is allocated
once; it is read into again only when the event behind its last copy has come. All copies run on one
stream beside the device's own. The check runs there too and leaves one flag per tensor; the flags
are read once, at the end, so that nothing waits in between.

    file -preadv, cut to the rank's part-> pinned buffer -copy-> piece on the device -cast or
    quantize-> target

The calls into CUDA are those of `CudaTransfer`, and the rest is tested without a card.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headrace_backend.weights.checkpoint_files import (
    ByteCounter,
    CheckpointFiles,
    RowSpan,
    all_finite,
    not_finite,
    read_as,
    reading_order,
    row_pieces,
)
from headrace_backend.weights.placement import WeightTarget
from headrace_model_folder import TensorRecord

# One read: large enough for full bandwidth of file and bus, small enough that few buffers keep all
# readers busy.
_PIECE_BYTES = 16 << 20
# One reader copies out of the page cache at 5 to 10 GB/s; the bus takes 50.
_NUM_READERS = 8
# Twice as many as readers: one is filled while another is copied.
_NUM_BUFFERS = 2 * _NUM_READERS
# All of the host memory that is pinned, whatever the model's size. It is given back when the
# weights are there.
PINNED_BYTES = _NUM_BUFFERS * _PIECE_BYTES


class Event(Protocol):
    """Something that the device was asked to do."""

    def synchronize(self) -> None:
        """Returns when it is done."""


class Transfer(Protocol):
    """The calls that differ between a card and a test's stand-in."""

    device: torch.device

    def begin_thread(self) -> None:
        """Called once by each thread that uses it."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Host memory that the device can copy from, uint8 [num_bytes]."""

    def submit(self, work: Callable[[], object]) -> Event:
        """Has the device do the work's copies after those of all work before; waits for none."""

    def finish(self) -> None:
        """Returns when all of it is done; buffers may be given back."""


class CudaTransfer:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Targets were allocated, and may still be in use, there.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        # Streams and inference mode are the thread's: what one thread launches in between another's
        # copy and event would be waited for too.
        self._lock = threading.Lock()

    def begin_thread(self) -> None:
        """Implements `Transfer.begin_thread`.

        A new thread stands on card 0: without this, what it waits for would make a context there.
        """
        torch.cuda.set_device(self.device)

    def buffer(self, num_bytes: int) -> Tensor:
        """Implements `Transfer.buffer`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def submit(self, work: Callable[[], object]) -> Event:
        """Implements `Transfer.submit`."""
        # Sleeps while it waits: readers outnumber idle cores.
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with self._lock, torch.inference_mode(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            work()
            event.record(self._stream)
        return event

    def finish(self) -> None:
        """Implements `Transfer.finish`."""
        self._stream.synchronize()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def give_back_buffers(self) -> None:
        """Unpins what nobody holds any more.

        torch keeps pinned memory for its next use, which would be much for what steps copy.
        """
        torch._C._host_emptyCache()


class _Piece(NamedTuple):
    """Some rows of a tensor: one read and one copy."""

    name: str
    # Of the tensor's flag.
    flag: int
    first: int
    end: int


class _BufferPool:
    """Buffers that wait for their turn, each with the event behind its last copy."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._free: queue.SimpleQueue[tuple[Tensor, Event | None]] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put((buffer, None))

    def take(self) -> Tensor:
        """A buffer that nothing reads from any more. Waits for one."""
        buffer, last_use = self._free.get()
        if last_use is not None:
            last_use.synchronize()
        return buffer

    def give(self, buffer: Tensor, last_use: Event | None) -> None:
        self._free.put((buffer, last_use))


def load_through_buffers(
    files: CheckpointFiles,
    records: Mapping[str, TensorRecord],
    targets: Mapping[str, WeightTarget],
    counter: ByteCounter,
    transfer: Transfer,
    piece_bytes: int = _PIECE_BYTES,
    num_readers: int = _NUM_READERS,
) -> None:
    """Fills every target through pinned buffers.

    Raises what `load_weights` raises.

    Args:
        files: Files of the checkpoint.
        records: File and offset of each tensor, by name.
        targets: Checkpoint tensor name -> where it goes; all on the transfer's device.
        counter: Counts bytes.
        transfer: Copies to the device.
        piece_bytes: Bytes of one read; a longer row of a tensor is read at once all the same.
        num_readers: Threads; there are twice as many buffers.

    Raises:
        InvalidModelFolder: As for `load_weights`.
    """
    spans = {name: RowSpan.of(target, records[name]) for name, target in targets.items()}
    longest = max(span.num_bytes for span in spans.values())
    buffers = [transfer.buffer(max(piece_bytes, longest)) for _ in range(2 * num_readers)]
    loader = _Loader(files, records, targets, spans, counter, transfer, _BufferPool(buffers))
    pool = concurrent.futures.ThreadPoolExecutor(num_readers, "weights", initializer=transfer.begin_thread)
    try:
        pieces = _Shared(_pieces(records, targets, spans, piece_bytes))
        for reader in [pool.submit(loader.run, pieces) for _ in range(num_readers)]:
            reader.result()
    finally:
        loader.stopped.set()
        pool.shutdown()
        # Before the buffers go: copies may still be reading from them.
        transfer.finish()
    loader.check_finite()


class _Loader:
    """What the readers share."""

    def __init__(
        self,
        files: CheckpointFiles,
        records: Mapping[str, TensorRecord],
        targets: Mapping[str, WeightTarget],
        spans: Mapping[str, RowSpan],
        counter: ByteCounter,
        transfer: Transfer,
        buffers: _BufferPool,
    ) -> None:
        self._spans = spans
        self._files = files
        self._records = records
        self._targets = targets
        self._counter = counter
        self._transfer = transfer
        self._buffers = buffers
        # [num_tensors] true where a value is not finite.
        self._flags = torch.empty(len(targets), dtype=torch.bool, device=transfer.device)
        transfer.submit(lambda: self._flags.zero_())
        self.stopped = threading.Event()

    def run(self, pieces: Iterator[_Piece]) -> None:
        """One reader: takes pieces until there are none, or until another reader has failed."""
        for piece in pieces:
            if self.stopped.is_set():
                return
            try:
                self._load(piece)
            except BaseException:
                self.stopped.set()
                raise

    def check_finite(self) -> None:
        """Refuses the first tensor that holds a value that is not finite. Waits for the device."""
        for name, is_bad in zip(self._targets, self._flags.tolist(), strict=True):
            if is_bad:
                raise not_finite(self._records[name].file, name)

    def _load(self, piece: _Piece) -> None:
        record = self._records[piece.name]
        span = self._spans[piece.name]
        num_bytes = (piece.end - piece.first) * span.num_bytes
        whole = self._buffers.take()
        last_use: Event | None = None
        try:
            buffer = whole[:num_bytes]
            self._files.read_rows(buffer, record.offset + piece.first * span.row_bytes, span, record.file, piece.name)
            last_use = self._transfer.submit(lambda: self._copy(piece, buffer.view(read_as(record))))
        finally:
            # Also after a failure: other readers may be waiting for a buffer.
            self._buffers.give(whole, last_use)
        self._counter.add(_counted_bytes(record, self._targets[piece.name].rows, piece))

    def _copy(self, piece: _Piece, buffer: Tensor) -> None:
        """Launches the copy of a flat buffer to the piece's rows of the target without waiting."""
        target = self._targets[piece.name]
        values = buffer.to(self._transfer.device, non_blocking=True)
        if values.numel():
            self._flags[piece.flag].logical_or_(~all_finite(values))
        target.put(values, piece.first, piece.end)


def _counted_bytes(record: TensorRecord, rows: range, piece: _Piece) -> int:
    """A piece's share of the whole tensor, in bytes.

    Bytes that other ranks keep count as done with this one's, so that the total is the
    checkpoint's.
    """
    before, after = (record.num_bytes * (row - rows.start) // len(rows) for row in (piece.first, piece.end))
    return after - before


def _pieces(
    records: Mapping[str, TensorRecord],
    targets: Mapping[str, WeightTarget],
    spans: Mapping[str, RowSpan],
    piece_bytes: int,
) -> Iterator[_Piece]:
    """All pieces, in reading order."""
    indices = {name: index for index, name in enumerate(targets)}
    for name in reading_order(records, targets):
        rows_per_piece = max(piece_bytes // max(spans[name].num_bytes, 1), 1)
        for first, end in row_pieces(targets[name].rows, rows_per_piece):
            yield _Piece(name, indices[name], first, end)


class _Shared(Iterator[_Piece]):
    """An iterator that several threads may take from."""

    def __init__(self, pieces: Iterator[_Piece]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()

    def __next__(self) -> _Piece:
        with self._lock:
            return next(self._pieces)
