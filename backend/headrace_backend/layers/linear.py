"""Linear layers, split over ranks by outputs (column-parallel) or by inputs (row-parallel).

Weights are [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headrace_backend.layers.norm import RmsNorm
from headrace_backend.layers.sharded_module import CheckpointPart, ShardedModule
from headrace_backend.quantization.make_weight import make_weight
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_kernels.rounded_tokens import Activations


class ColumnLinear(ShardedModule):
    """One or several projections of the same input, in one weight so that one multiplication
    computes all.
    """

    def __init__(self, input_size: int, outputs: Sequence[range], bias: bool, placement: Placement) -> None:
        """Allocates the weight.

        Args:
            input_size: Columns.
            outputs: Per projection, the rows of its checkpoint tensor that this rank keeps.
            bias: Whether each projection has one.
            placement: Type and device.
        """
        super().__init__()
        self._outputs = tuple(outputs)
        size = sum(len(rows) for rows in outputs)
        self.weight = make_weight(self._outputs, range(input_size), placement)
        self.bias = placement.empty(size) if bias else None

    def forward(self, x: Activations) -> Tensor:
        """[num_tokens, input_size] -> [num_tokens, the projections' outputs side by side]."""
        return self.weight.product(x, self.bias)

    def rounds_to(self, num_tokens: int) -> torch.dtype | None:
        """The 8-bit type in which `forward` may be given so many tokens; None: the model's type
        alone.
        """
        return self.weight.rounds_to(num_tokens)

    def after_norm(self, norm: RmsNorm, x: Tensor) -> Tensor:
        """forward(norm(x)) in one operation, for steps that fuse."""
        return self.weight.after_norm(x, norm.weight, norm.eps, self.bias)

    def swiglu_after_norm(self, norm: RmsNorm, x: Tensor) -> Tensor:
        """SwiGLU of the two projections of norm(x) in one operation, for steps that fuse."""
        return self.weight.swiglu_after_norm(x, norm.weight, norm.eps, self.bias)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The projections in order, each with its bias."""
        first = 0
        for index, rows in enumerate(self._outputs):
            kept = range(first, first + len(rows))
            first += len(rows)
            columns = range(self.weight.num_inputs)
            yield CheckpointPart("weight", index, WeightTarget(self.weight.destination(kept), rows, columns))
            if self.bias is not None:
                yield CheckpointPart("bias", index, WeightTarget.of(self.bias[kept.start : kept.stop], rows))


class RowLinear(ShardedModule):
    """A projection whose input is split over ranks.

    The ranks' results add up to the projection; rank 0 holds the bias.
    """

    def __init__(self, inputs: range, output_size: int, bias: bool, placement: Placement) -> None:
        """Allocates the weight.

        Args:
            inputs: The columns of the checkpoint tensor that this rank keeps.
            output_size: Rows.
            bias: Whether the projection has one.
            placement: Type and device.
        """
        super().__init__()
        self._inputs = inputs
        self.weight = make_weight((range(output_size),), inputs, placement)
        self.bias = placement.empty(output_size) if bias and placement.shard.rank == 0 else None

    def forward(self, x: Activations) -> Tensor:
        """[num_tokens, len(inputs)] -> [num_tokens, output_size]."""
        return self.weight.product(x, self.bias)

    def rounds_to(self, num_tokens: int) -> torch.dtype | None:
        """The 8-bit type in which `forward` may be given so many tokens; None: the model's type
        alone.
        """
        return self.weight.rounds_to(num_tokens)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += forward(x)` in one operation, for steps that fuse; one rank only, as the
        ranks' parts are not added up.
        """
        self.weight.add_to(residual, x, self.bias)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The weight, and the bias where this rank has it."""
        rows = range(self.weight.num_outputs)
        yield CheckpointPart("weight", 0, WeightTarget(self.weight.destination(rows), rows, self._inputs))
        if self.bias is not None:
            yield CheckpointPart("bias", 0, WeightTarget.of(self.bias, rows))
