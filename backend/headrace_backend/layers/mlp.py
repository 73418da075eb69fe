"""The gated MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor, nn

from headrace_backend.layers.linear import ColumnLinear, RowLinear
from headrace_backend.layers.norm import RmsNorm
from headrace_backend.weights.placement import Placement
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rounded_tokens import Activations
from headrace_kernels.swiglu import rounded_swiglu
from headrace_model_folder.description import Mlp


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one weight."""

    # Whether tokens that are rounded for it are read in the model's type too.
    reads_unrounded = False

    def __init__(self, mlp: Mlp, placement: Placement) -> None:
        super().__init__()
        inner = placement.shard.split(mlp.inner)
        self.gate_up_proj = ColumnLinear((mlp.gate, mlp.up), (inner, inner), placement)
        self.down_proj = RowLinear(mlp.down, inner, placement)
        self._activation = mlp.activation

    def forward(self, x: Activations) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape."""
        rounding = self.down_proj.rounds_to(len(x))
        if rounding is None:
            out: Tensor = self.down_proj(self.gate_up_proj(x, self._activation))
        else:
            out = self.down_proj(rounded_swiglu(self.gate_up_proj(x), rounding, self._activation))
        return out

    def rounds_to(self, num_tokens: int) -> InputRounding | None:
        """How what makes so many tokens may round them for `forward`; None: not at all."""
        return self.gate_up_proj.rounds_to(num_tokens)

    def fuses(self, num_tokens: int) -> bool:
        """Whether products of so many tokens take norm, SwiGLU and addition inside."""
        return self.gate_up_proj.weight.fuses(num_tokens) and self.down_proj.weight.fuses(num_tokens)

    def adds(self, num_tokens: int) -> bool:
        """Whether `add_output` is faster than a sum behind `forward`, of steps that do not fuse."""
        return self.down_proj.adds(num_tokens)

    def add_output(self, residual: Tensor, x: Activations) -> None:
        """`residual += forward(x)`, where the MLP `adds`."""
        self.add_down(residual, self.gate_up_proj(x, self._activation))

    def launch_kind(self) -> Hashable:
        """What decides, beside tokens and biases, which kernels the products launch."""
        return self._activation, self.gate_up_proj.weight.launch_kind(), self.down_proj.weight.launch_kind()

    def add_to(self, residual: Tensor, norm: RmsNorm) -> None:
        """`residual += forward(norm(residual))` in two operations, for steps that fuse."""
        self.add_down(residual, self.gated(residual, norm))

    def gated(self, residual: Tensor, norm: RmsNorm) -> Tensor:
        """The first of them: inner elements of norm(residual), [num_tokens, inner]."""
        return self.gate_up_proj.swiglu_after_norm(norm, residual)

    def add_down(self, residual: Tensor, inner: Tensor) -> None:
        """The second: adds the inner elements' product to the residual stream."""
        self.down_proj.add_to(residual, inner)
