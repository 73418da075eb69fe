"""What receives the rows of a checkpoint tensor: part of a parameter, or a quantizer of rows.

Owns the interface that loaders see, and its plain form. Rows come whole, in pieces of any number,
each once, from several threads at a time.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace_model_folder.safetensors_header import RowOrder


class Destination(abc.ABC):
    """Takes the rows that a rank keeps of one checkpoint tensor."""

    shape: tuple[int, ...]
    # Of the model's plain weights. Rows may come in another type.
    dtype: torch.dtype
    device: torch.device
    # Inputs and bytes of a block, where rows come as the bytes that a file has; None: they come as
    # numbers.
    block: tuple[int, int] | None = None

    @abc.abstractmethod
    def put(self, first: int, rows: Tensor) -> None:
        """Takes some rows; on a card launched, not waited for.

        Args:
            first: The first one's index.
            rows: [num_rows] or [num_rows, num_columns] in a checkpoint's type, on the device or
                not.
        """

    @property
    def in_place(self) -> Tensor | None:
        """The whole as a tensor that may be filled directly; None if there is none."""
        return None

    @property
    def num_elements(self) -> int:
        """Numbers that are kept of the rows."""
        return math.prod(self.shape)


class TensorRows(Destination):
    """A view of a parameter. Rows are cast while they are copied."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        self.tensor[first : first + len(rows)].copy_(rows)

    @property
    def in_place(self) -> Tensor | None:
        """Implements `Destination.in_place`."""
        return self.tensor


class RaisedRows(TensorRows):
    """A view of a parameter in fp32 that holds 1 more than the checkpoint's numbers."""

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        self.tensor[first : first + len(rows)].copy_(rows).add_(1.0)

    @property
    def in_place(self) -> Tensor | None:
        """Implements `Destination.in_place`: what is filled directly would not be raised."""
        return None


class PickedRows(Destination):
    """A parameter that holds several pieces of a tensor's rows, one after the other.

    It is given all of them.
    """

    def __init__(self, tensor: Tensor, num_rows: int, kept: Sequence[range]) -> None:
        """Takes the rows of each of these ranges out of `num_rows`."""
        self._tensor, self._kept = tensor, kept
        self.shape, self.dtype, self.device = (num_rows, *tensor.shape[1:]), tensor.dtype, tensor.device

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        place = 0
        for kept in self._kept:
            begin, end = max(kept.start, first), min(kept.stop, first + len(rows))
            if begin < end:
                into = self._tensor[place + begin - kept.start : place + end - kept.start]
                into.copy_(rows[begin - first : end - first])
            place += len(kept)

    @property
    def num_elements(self) -> int:
        """Implements `Destination.num_elements`."""
        return self._tensor.numel()


class CopiedRows(Destination):
    """Two destinations of the same rows: a tied tensor that is kept in two forms."""

    def __init__(self, into: Destination, copy: Destination) -> None:
        assert into.shape == copy.shape and into.block is None and copy.block is None
        self.into, self.copy = into, copy
        self.shape, self.dtype, self.device = into.shape, into.dtype, into.device

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        self.into.put(first, rows)
        self.copy.put(first, rows)


class LoggedRates(TensorRows):
    """A view of a parameter that holds the logarithms of rates, which a checkpoint has negated."""

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        self.tensor[first : first + len(rows)].copy_(rows).neg_().log_()

    @property
    def in_place(self) -> Tensor | None:
        """Implements `Destination.in_place`: what is filled directly would be rates."""
        return None


class PickedColumns(Destination):
    """A destination of some pieces of a tensor's columns, side by side. It is given all of them."""

    def __init__(self, into: Destination, num_columns: int, kept: Sequence[range]) -> None:
        """Takes the columns of each of these ranges, which end where blocks do."""
        assert sum(map(len, kept)) == into.shape[1]
        inputs, num_bytes = into.block or (1, 1)
        assert all(columns.start % inputs == columns.stop % inputs == 0 for columns in kept)
        self.into = into
        self._kept = [
            slice(columns.start // inputs * num_bytes, columns.stop // inputs * num_bytes) for columns in kept
        ]
        self.shape, self.dtype, self.device = (into.shape[0], num_columns), into.dtype, into.device
        self.block = into.block

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        self.into.put(first, torch.cat([rows[:, columns] for columns in self._kept], dim=1))

    @property
    def num_elements(self) -> int:
        """Implements `Destination.num_elements`."""
        return self.into.num_elements


class OrderedRows(Destination):
    """A destination that is given rows in a file's order, and puts them into that of modules."""

    def __init__(self, into: Destination, order: RowOrder, kept: range, num_rows: int) -> None:
        """Takes the rows that lie in a range once they are in order.

        Args:
            into: Destination of the rows of that range.
            order: How the file has them.
            kept: Rows that are kept, as modules count them.
            num_rows: Rows of the tensor.
        """
        self.into, self._order, self._kept = into, order, kept
        # Rows that are given: whole groups, and what comes before them.
        start = kept.start if kept.start < order.first else kept.start - (kept.start - order.first) % order.size
        self.read = range(start, kept.stop + (order.first - kept.stop) % order.size)
        assert self.read.stop <= num_rows
        self.shape = (len(self.read), *into.shape[1:])
        self.dtype, self.device, self.block = into.dtype, into.device, into.block

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        order, size, first = self._order, self._order.size, self.read.start + first
        before = min(max(order.first - first, 0), len(rows))
        self._keep(first, rows[:before])
        first, rows = first + before, rows[before:]
        place = first - order.first
        begin = min(-place % size, len(rows))
        end = begin + (len(rows) - begin) // size * size
        self._put_part(place, rows[:begin])
        if end > begin:
            # Whole groups: [groups, outer, inner, run] -> [groups, inner, outer, run].
            groups = rows[begin:end].reshape(-1, order.outer, order.inner, order.run, *rows.shape[1:])
            self._keep(first + begin, groups.transpose(1, 2).flatten(0, 3))
        self._put_part(place + end, rows[end:])

    def _put_part(self, place: int, rows: Tensor) -> None:
        """Some rows of one group: those with one place in `inner` follow each other."""
        if not len(rows):
            return
        order = self._order
        group, offset = divmod(place, order.size)
        runs = torch.arange(offset, offset + len(rows)) // order.run
        for inner in range(order.inner):
            own = (runs % order.inner == inner).nonzero().flatten()
            if len(own):
                within = offset + int(own[0])
                outer = within // (order.run * order.inner)
                first = (inner * order.outer + outer) * order.run + within % order.run
                self._keep(order.first + group * order.size + first, rows[own.to(rows.device)])

    def _keep(self, first: int, rows: Tensor) -> None:
        """Hands on those of some rows in order that are kept."""
        begin, end = max(first, self._kept.start), min(first + len(rows), self._kept.stop)
        if begin < end:
            self.into.put(begin - self._kept.start, rows[begin - first : end - first])

    @property
    def num_elements(self) -> int:
        """Implements `Destination.num_elements`."""
        return self.into.num_elements
