"""Linear layers, split over ranks by outputs (column-parallel) or by inputs (row-parallel).

Weights are [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from headrace_backend.layers.norm import RmsNorm
from headrace_backend.layers.sharded_module import CheckpointPart, ShardedModule
from headrace_backend.quantization.make_weight import make_weight
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rounded_tokens import Activations
from headrace_kernels.swiglu import Activation
from headrace_model_folder.description import Linear


class ColumnLinear(ShardedModule):
    """One or several projections of the same input, in one weight.

    One multiplication computes all.
    """

    def __init__(self, projections: Sequence[Linear], outputs: Sequence[range], placement: Placement) -> None:
        """Allocates the weight.

        Args:
            projections: Projections of one input; all have a bias, or none has.
            outputs: Per projection, the rows of its checkpoint tensor that this rank keeps.
            placement: Type and device.
        """
        super().__init__()
        (num_inputs,), (bias,) = {part.inputs for part in projections}, {part.bias for part in projections}
        self._names = tuple(part.name for part in projections)
        self._outputs = tuple(outputs)
        size = sum(len(rows) for rows in outputs)
        self.weight = make_weight(self._outputs, range(num_inputs), placement.of(*self._names))
        self.bias = placement.empty(size) if bias else None

    def forward(self, x: Activations, activation: Activation | None = None) -> Tensor:
        """[num_tokens, input_size] -> [num_tokens, the projections' outputs side by side].

        With an activation, of a gate and an up projection: activation(gate) * up, half as wide.
        """
        if activation is not None:
            return self.weight.gated(x, self.bias, activation)
        return self.weight.product(x, self.bias)

    def rounds_to(self, num_tokens: int) -> InputRounding | None:
        """How what makes so many tokens may round them for `forward`; None: not at all."""
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
        for name, rows in zip(self._names, self._outputs, strict=True):
            kept = range(first, first + len(rows))
            first += len(rows)
            columns = range(self.weight.num_inputs)
            yield CheckpointPart(f"{name}.weight", WeightTarget(self.weight.destination(kept), rows, columns))
            if self.bias is not None:
                yield CheckpointPart(f"{name}.bias", WeightTarget.of(self.bias[kept.start : kept.stop], rows))


class RowLinear(ShardedModule):
    """A projection whose input is split over ranks.

    The ranks' results add up to the projection; rank 0 holds the bias.
    """

    def __init__(self, projection: Linear, inputs: range, placement: Placement) -> None:
        """Allocates the weight.

        Args:
            projection: The projection, whole.
            inputs: The columns of the checkpoint tensor that this rank keeps.
            placement: Type and device.
        """
        super().__init__()
        self._name, self._inputs = projection.name, inputs
        self.weight = make_weight((range(projection.outputs),), inputs, placement.of(projection.name))
        self.bias = placement.empty(projection.outputs) if projection.bias and placement.shard.rank == 0 else None

    def forward(self, x: Activations) -> Tensor:
        """[num_tokens, len(inputs)] -> [num_tokens, output_size]."""
        return self.weight.product(x, self.bias)

    def rounds_to(self, num_tokens: int) -> InputRounding | None:
        """How what makes so many tokens may round them for `forward`; None: not at all."""
        return self.weight.rounds_to(num_tokens)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += forward(x)` in one operation, for steps that fuse or where it `adds`.

        One rank only, as the ranks' parts are not added up.
        """
        self.weight.add_to(residual, x, self.bias)

    def adds(self, num_tokens: int) -> bool:
        """Whether `add_to` is faster than a sum behind the product, of steps that do not fuse."""
        return self.bias is None and self.weight.adds(num_tokens)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The weight, and the bias where this rank has it."""
        rows = range(self.weight.num_outputs)
        yield CheckpointPart(f"{self._name}.weight", WeightTarget(self.weight.destination(rows), rows, self._inputs))
        if self.bias is not None:
            yield CheckpointPart(f"{self._name}.bias", WeightTarget.of(self.bias, rows))
