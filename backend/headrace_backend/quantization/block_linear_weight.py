"""A weight whose bits come from a file in blocks, kept as they are.

    rows of a file, bytes -store_file_rows-> BlockWeight

Owns how projections of one input lie together when they have different types, as files mix them:
those that follow each other with one type make one weight, and each weight is a product of its own.
A projection may also be plain. Nothing is rounded here, so there is no distance to state.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from headrace_backend.quantization.linear_weight import LinearWeight, WeightReport
from headrace_backend.quantization.product_check import check_block_product
from headrace_backend.weights.destination import Destination, TensorRows
from headrace_backend.weights.placement import Placement
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_kernels.launch_kind import launch_kind
from headrace_kernels.linear import block_quantized as block_linear
from headrace_kernels.linear.dense import linear
from headrace_kernels.rms_norm import rms_norm
from headrace_kernels.swiglu import swiglu
from headrace_kernels.weight_formats.block_weight import NF4_KINDS, BlockKind, BlockWeight, allocate, store_numbers
from headrace_kernels.weight_formats.gguf_blocks import FILE_BLOCKS, store_file_rows
from headrace_kernels.weight_formats.nf4 import BITSANDBYTES_NESTED, GROUP, pieces_of_bytes


class BlockLinearWeight(LinearWeight):
    """One or several projections in blocks."""

    def __init__(
        self,
        kinds: Sequence[BlockKind | None],
        sizes: Sequence[int],
        num_inputs: int,
        placement: Placement,
        nested: int = BITSANDBYTES_NESTED,
    ) -> None:
        """Allocates the weight, empty.

        Args:
            kinds: Kind of blocks of each projection; None: plain, in the placement's type.
            sizes: Number of outputs of each projection.
            num_inputs: Number of inputs, the same for all projections.
            placement: Type and device.
            nested: NF4: groups that share a nested scale; 0: all groups of a row.

        Raises:
            QuantizationRefused: Blocks that the inputs do not fill.
        """
        super().__init__()
        self.num_outputs, self.num_inputs = sum(sizes), num_inputs
        self.parts: list[BlockWeight | Tensor] = []
        self.outputs: list[range] = []
        first = 0
        for (kind, _), run in itertools.groupby(enumerate(zip(kinds, sizes, strict=True)), key=_run_of):
            size = sum(part[1] for _, part in run)
            self.outputs.append(range(first, first + size))
            self.parts.append(self._made(kind, size, placement, nested))
            first += size

    @classmethod
    def of_file(cls, sizes: Sequence[int], num_inputs: int, placement: Placement) -> BlockLinearWeight:
        """Makes an empty weight that keeps the blocks of the placement's file.

        Args:
            sizes: Number of outputs of each projection.
            num_inputs: Number of inputs, the same for all projections.
            placement: Device of the weight, and the blocks of each projection.

        Raises:
            QuantizationRefused: Blocks that the inputs do not fill.
        """
        assert placement.block_kinds is not None
        nested = BITSANDBYTES_NESTED
        if placement.shard.world_size > 1:
            # Nested scales are counted along the file's rows: in pieces that end with a rank's
            # rows, each piece has one.
            nested = math.gcd(nested, num_inputs // GROUP)
        return cls(placement.block_kinds, sizes, num_inputs, placement, nested)

    def _made(self, kind: BlockKind | None, size: int, placement: Placement, nested: int) -> BlockWeight | Tensor:
        if kind is not None:
            try:
                nested = nested if kind is BlockKind.NF4 else 0
                return allocate(kind, size, self.num_inputs, placement.dtype, placement.device, nested)
            except ValueError as error:
                raise QuantizationRefused(str(error)) from None
        tensor = placement.empty(size, self.num_inputs)
        self.register_parameter(f"plain_{len(self.parts)}", tensor)
        return tensor

    @property
    def blocks(self) -> list[BlockWeight]:
        """The parts of this weight that are in blocks."""
        return [part for part in self.parts if isinstance(part, BlockWeight)]

    @property
    def num_bytes(self) -> int:
        """What the parts in blocks take, scales and all."""
        return sum(part.num_bytes for part in self.blocks)

    @property
    def num_block_weights(self) -> int:
        """How many weights are in blocks."""
        return sum(part.num_outputs * part.num_inputs for part in self.blocks)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Implements `LinearWeight.multiply`."""
        return self.multiply_to(x, bias, x.dtype)

    def multiply_to(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """`multiply` in a type of its own, into `out` if it is given."""
        if out is None:
            out = x.new_empty(x.shape[0], self.num_outputs, dtype=out_dtype)
        for part, outputs in zip(self.parts, self.outputs, strict=True):
            place = slice(outputs.start, outputs.stop)
            part_bias = None if bias is None else bias[place]
            if isinstance(part, BlockWeight):
                block_linear.linear(x, part, part_bias, out=out[:, place])
            else:
                out[:, place] = linear(x, part, part_bias, out_dtype)
        return out

    def after_norm(self, x: Tensor, norm_weight: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        """Implements `LinearWeight.after_norm`."""
        return self.multiply(rms_norm(x, norm_weight, eps), bias)

    def swiglu_after_norm(self, x: Tensor, norm_weight: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        """Implements `LinearWeight.swiglu_after_norm`."""
        return swiglu(self.after_norm(x, norm_weight, eps, bias))

    def add_to(self, residual: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """Implements `LinearWeight.add_to`."""
        residual.add_(self.multiply(x, bias))

    def fuses(self, num_tokens: int) -> bool:
        """Implements `LinearWeight.fuses`.

        Norm, SwiGLU and addition are operations of their own around these products.
        """
        return False

    def launch_kind(self) -> Hashable:
        """Implements `LinearWeight.launch_kind`."""
        return type(self), tuple(map(launch_kind, self.parts))

    def rows(self, indices: Tensor) -> Tensor:
        """Returns the weights [n, num_inputs] of the outputs `indices`, int64 [n].

        It serves an embedding table, which has one part.
        """
        (part,) = self.parts
        assert isinstance(part, BlockWeight)
        return block_linear.embedding(indices, part)

    def destination(self, outputs: range) -> Destination:
        """Implements `LinearWeight.destination`."""
        for part, held in zip(self.parts, self.outputs, strict=True):
            if outputs.start in held:
                within = range(outputs.start - held.start, outputs.stop - held.start)
                assert within.stop <= len(held)
                if isinstance(part, BlockWeight):
                    return BlockRows(part, within)
                return TensorRows(part[within.start : within.stop])
        raise AssertionError(f"no outputs {outputs}")

    def finish(self, layer: str) -> None:
        """Implements `LinearWeight.finish`."""
        for part in self.blocks:
            check_block_product(layer, part)

    def report(self) -> WeightReport:
        """Implements `LinearWeight.report`."""
        kinds: Counter[str] = Counter()
        for part in self.blocks:
            kinds[part.kind.value] += part.num_outputs * part.num_inputs
        return WeightReport(self.num_bytes, kinds)


def _run_of(part: tuple[int, tuple[BlockKind | None, int]]) -> tuple[BlockKind | None, int]:
    """What projections have in common that make one weight.

    NF4's never do: their nested scales are counted within each tensor.
    """
    index, (kind, _) = part
    return kind, index if kind in NF4_KINDS else -1


class BlockRows(Destination):
    """Some outputs of a weight, as a file has them."""

    def __init__(self, weight: BlockWeight, outputs: range) -> None:
        self.weight = weight
        self.outputs = outputs
        self.shape, self.dtype, self.device = (len(outputs), weight.num_inputs), weight.dtype, weight.device
        # bitsandbytes has two numbers a byte, and the scales elsewhere (`nf4_states`).
        self.block = (2, 1) if weight.kind in NF4_KINDS else FILE_BLOCKS[weight.kind]

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`; rows are bytes."""
        begin, rows = self.outputs.start + first, rows.to(self.device)
        if self.weight.kind in NF4_KINDS:
            store_numbers(pieces_of_bytes(rows), self.weight, slice(begin, begin + len(rows)))
        else:
            store_file_rows(rows, self.weight, begin)
