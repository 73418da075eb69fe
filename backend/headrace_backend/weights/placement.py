"""Places weights: the device that holds them, and which part of each a rank keeps.

The one place that slices: layers state sizes, this states ranges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from headrace_backend.parallel.collectives import Collectives
from headrace_backend.weights.destination import Destination, TensorRows
from headrace_backend.weights.scheme import Scheme
from headrace_kernels.weight_formats.block_weight import BlockKind
from headrace_model_folder import LayerFormat


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a tensor-parallel group."""

    rank: int = 0
    world_size: int = 1
    # What the ranks compute together; None where there is one rank, or where weights are placed and
    # nothing is computed.
    collectives: Collectives | None = None
    # Whether each rank has some experts of a mixture whole, in place of a part of every one.
    whole_experts: bool = False

    @property
    def together(self) -> Collectives:
        """The collectives of a rank that computes with others."""
        assert self.collectives is not None, "a part of a model computes nothing without the other parts"
        return self.collectives

    def split(self, size: int, unit: int = 1) -> range:
        """The contiguous part of [0, size) that this rank keeps, in whole units (such as a head).

        Raises:
            ValueError: the units can't be dealt evenly.
        """
        units = size // unit
        if units % self.world_size:
            raise ValueError(f"{units} can't be split evenly over {self.world_size} ranks")
        share = units // self.world_size * unit
        return range(self.rank * share, (self.rank + 1) * share)

    def split_vocabulary(self, size: int) -> range:
        """The tokens of this rank: as many as every other one's, so that the last may be none.

        Raises:
            ValueError: a rank would have none of the vocabulary's tokens.
        """
        share = -(-size // self.world_size)
        if share * (self.world_size - 1) >= size:
            raise ValueError(f"{size} tokens leave one of {self.world_size} ranks none")
        return range(self.rank * share, (self.rank + 1) * share)

    def split_experts(self, count: int) -> range:
        """The experts of a mixture that this rank has, whole or a part of each.

        Raises:
            ValueError: whole ones can't be dealt evenly.
        """
        return self.split(count) if self.whole_experts else range(count)

    def split_inner(self, size: int) -> range:
        """The inner elements that this rank keeps of an expert that it has.

        Raises:
            ValueError: they can't be dealt evenly.
        """
        return range(size) if self.whole_experts else self.split(size)

    def split_kv_heads(self, num_kv_heads: int, head_dim: int) -> range:
        """Splits by heads as `split` does; more ranks than heads keep each head several times."""
        if self.world_size <= num_kv_heads:
            return self.split(num_kv_heads * head_dim, head_dim)
        if self.world_size % num_kv_heads:
            raise ValueError(f"{num_kv_heads} key/value heads can't be repeated evenly over {self.world_size} ranks")
        head = self.rank * num_kv_heads // self.world_size
        return range(head * head_dim, (head + 1) * head_dim)


ALONE = Shard()


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Type and device of the parameters, the rank's part, and the bits of layers' weights."""

    dtype: torch.dtype
    device: torch.device
    shard: Shard = ALONE
    # None: all of `dtype`.
    scheme: Scheme | None = None
    # Of the output layer, which has one of its own; None: as the embedding, of `dtype` or as the
    # file has it.
    head_scheme: Scheme | None = None
    # Names of the projections in the weight that is being made, such as
    # model.layers.0.self_attn.q_proj.
    names: tuple[str, ...] = ()
    # Name of a projection -> its format, where another tool quantized the folder's layers.
    # Projections that are not here are plain.
    formats: Mapping[str, LayerFormat] = dataclasses.field(default_factory=dict)
    # Name of a projection, embedding or head -> the blocks that the file has it in. What is not
    # here is plain.
    blocks: Mapping[str, BlockKind] = dataclasses.field(default_factory=dict)

    def of(self, *names: str) -> Placement:
        """Returns the same placement for the weight of these projections."""
        return dataclasses.replace(self, names=names)

    @property
    def layer_formats(self) -> tuple[LayerFormat | None, ...]:
        """The format of each projection in the weight; None: plain."""
        return tuple(self.formats.get(name) for name in self.names)

    @property
    def block_kinds(self) -> tuple[BlockKind | None, ...] | None:
        """The blocks that the file has each projection in the weight in; None: all plain."""
        kinds = tuple(self.blocks.get(name) for name in self.names)
        return kinds if any(kinds) else None

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """A parameter that is still to be filled."""
        return torch.nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


@dataclasses.dataclass(frozen=True, slots=True)
class WeightTarget:
    """Target of one checkpoint tensor: the rows and columns of it that this rank keeps."""

    destination: Destination
    # Along dimension 0 of the checkpoint tensor.
    rows: range
    # Along dimension 1; None if the checkpoint tensor has one dimension.
    columns: range | None = None
    # Tensors of one batch are read together, because nothing of them is done before all are there.
    batch: str = ""

    def __post_init__(self) -> None:
        shape = (len(self.rows),) if self.columns is None else (len(self.rows), len(self.columns))
        assert self.destination.shape == shape

    @classmethod
    def of(cls, tensor: Tensor, rows: range, columns: range | None = None) -> WeightTarget:
        """A target that is a view of a parameter."""
        return cls(TensorRows(tensor), rows, columns)

    @property
    def tensor(self) -> Tensor:
        """The parameter view that this target fills. Only plain (unquantized) targets have one."""
        assert isinstance(self.destination, TensorRows)
        return self.destination.tensor

    @property
    def device(self) -> torch.device:
        """Device that the target lies on."""
        return self.destination.device

    @property
    def num_elements(self) -> int:
        """Weights of the part."""
        return self.destination.num_elements

    @property
    def kept(self) -> range | None:
        """The columns, in numbers or, for a destination that takes such, in bytes."""
        if self.destination.block is None or self.columns is None:
            return self.columns
        inputs, num_bytes = self.destination.block
        return range(self.columns.start // inputs * num_bytes, self.columns.stop // inputs * num_bytes)

    def put(self, values: Tensor, first: int, end: int) -> None:
        """Hands rows over, cut to the columns.

        Args:
            values: All columns of the rows, or those that are kept, flat; bytes for a destination
                that takes such.
            first: The first row, counted in the checkpoint tensor.
            end: The row after the last.
        """
        if (kept := self.kept) is not None:
            values = values.view(end - first, -1)
            if values.shape[1] != len(kept):
                values = values[:, kept.start : kept.stop]
        self.destination.put(first - self.rows.start, values)
