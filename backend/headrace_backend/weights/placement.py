"""Where weights live and which part of each a rank keeps. The one place that slices: layers state sizes, this states ranges."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a tensor-parallel group."""

    rank: int = 0
    world_size: int = 1

    def split(self, size: int, unit: int = 1) -> range:
        """The contiguous part of [0, size) that this rank keeps, in whole units (a head, for instance).

        Raises:
            ValueError: the units can't be dealt evenly.
        """
        units = size // unit
        if units % self.world_size:
            raise ValueError(f"{units} can't be split evenly over {self.world_size} ranks")
        share = units // self.world_size * unit
        return range(self.rank * share, (self.rank + 1) * share)

    def split_kv_heads(self, num_kv_heads: int, head_dim: int) -> range:
        """As `split` by heads, but with more ranks than heads each head is kept by several ranks."""
        if self.world_size <= num_kv_heads:
            return self.split(num_kv_heads * head_dim, head_dim)
        if self.world_size % num_kv_heads:
            raise ValueError(f"{num_kv_heads} key/value heads can't be repeated evenly over {self.world_size} ranks")
        head = self.rank * num_kv_heads // self.world_size
        return range(head * head_dim, (head + 1) * head_dim)


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Type and device of the parameters, and the rank's part of them."""

    dtype: torch.dtype
    device: torch.device
    shard: Shard = Shard()

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """A parameter that is still to be filled."""
        return torch.nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


@dataclasses.dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where one checkpoint tensor goes: `tensor` (a view of a parameter) receives these rows and columns of it."""

    tensor: Tensor
    # Along dimension 0 of the checkpoint tensor.
    rows: range
    # Along dimension 1; None if the checkpoint tensor has one dimension.
    columns: range | None = None

    def __post_init__(self) -> None:
        shape = (len(self.rows),) if self.columns is None else (len(self.rows), len(self.columns))
        assert tuple(self.tensor.shape) == shape
