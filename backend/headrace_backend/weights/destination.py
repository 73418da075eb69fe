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


class RotatedRows(Destination):
    """A destination that puts rows into order whose heads' two halves alternate."""

    def __init__(self, into: Destination, head_rows: int) -> None:
        self.into = into
        self._head_rows = head_rows
        self.shape, self.dtype, self.device, self.block = into.shape, into.dtype, into.device, into.block

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        size = self._head_rows
        begin = min(-first % size, len(rows))
        end = begin + (len(rows) - begin) // size * size
        self._put_part(first, rows[:begin])
        if end > begin:
            # Whole heads: [heads, places, halves] -> [heads, halves, places].
            heads = rows[begin:end].reshape(-1, size // 2, 2, *rows.shape[1:]).transpose(1, 2).flatten(0, 2)
            self.into.put(first + begin, heads)
        self._put_part(first + end, rows[end:])

    def _put_part(self, first: int, rows: Tensor) -> None:
        """Some rows of one head: those of each half follow each other."""
        size = self._head_rows
        for offset in range(min(2, len(rows))):
            place, half = divmod((first + offset) % size, 2)
            self.into.put(first // size * size + half * (size // 2) + place, rows[offset::2])
