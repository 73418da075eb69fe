"""What receives the rows of a checkpoint tensor: part of a parameter, or something that makes fewer bits of them.

Owns the interface that loaders see, and its plain form. Rows come whole, in pieces of any number, each once, from several threads at a time.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor


class Destination(abc.ABC):
    """Takes the rows that a rank keeps of one checkpoint tensor."""

    shape: tuple[int, ...]
    # Of the model's plain weights. Rows may come in another type.
    dtype: torch.dtype
    device: torch.device

    @abc.abstractmethod
    def put(self, first: int, rows: Tensor) -> None:
        """Takes some rows; on a card launched, not waited for.

        Args:
            first: The first one's index.
            rows: [num_rows] or [num_rows, num_columns] in a checkpoint's type, on the device or not.
        """

    @property
    def in_place(self) -> Tensor | None:
        """The whole as a tensor that may be filled directly; None if there is none."""
        return None


class TensorRows(Destination):
    """A view of a parameter. Rows are cast while they are copied."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device

    def put(self, first: int, rows: Tensor) -> None:
        """See Destination."""
        self.tensor[first : first + len(rows)].copy_(rows)

    @property
    def in_place(self) -> Tensor | None:
        """See Destination."""
        return self.tensor
