"""The weight of a linear layer as the layer sees it, and its plain form.

Owns the interface. There are three kinds: plain, scaled (`low_bit_weight`: numbers with scales) and
in blocks (`block_linear_weight`: a file's own blocks), and `mixed_format_weight` puts several side
by side. Each has a `destination` that a checkpoint's rows go to, a `finish` that checks it once it
is filled, and a `report` of its bits. A plain weight gives the operations that
`headrace_kernels.linear.dense` and `small_linear` gave before there were others.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from headrace_backend.weights.destination import Destination, TensorRows
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.launch_kind import launch_kind
from headrace_kernels.linear import dense
from headrace_kernels.linear import dense_small_batch as small_linear
from headrace_kernels.linear.gated.dense import gated_linear
from headrace_kernels.rounded_tokens import Activations, RoundedTokens
from headrace_kernels.swiglu import Activation, swiglu


class WeightReport(NamedTuple):
    """What a weight, or several, take in few bits."""

    # Scales and zero points included; plain parts are left out.
    num_bytes: int = 0
    # Kind of number or block -> how many weights are of it.
    num_weights: Mapping[str, int] = {}


class ReportedWeight(Protocol):
    """A weight that is checked once it is filled, and says what it takes."""

    def finish(self, layer: str) -> None:
        """Checks it. Raises QuantizationRefused, naming the layer."""

    def report(self) -> WeightReport:
        """What it takes in few bits."""


class LinearWeight(nn.Module, abc.ABC):
    """[num_outputs, num_inputs], in whatever form.

    A bias is the layer's own and given to each product.
    """

    num_outputs: int
    num_inputs: int

    @abc.abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[num_tokens, num_inputs] -> [num_tokens, num_outputs] in the type of x."""

    @abc.abstractmethod
    def after_norm(self, x: Tensor, norm_weight: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        """The product of x's RMS norm, in one operation where `fuses` says so."""

    @abc.abstractmethod
    def swiglu_after_norm(self, x: Tensor, norm_weight: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        """SwiGLU of the halves of `after_norm`: [num_tokens, num_outputs / 2]."""

    @abc.abstractmethod
    def add_to(self, residual: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """`residual += multiply(x, bias)`."""

    @abc.abstractmethod
    def fuses(self, num_tokens: int) -> bool:
        """Whether products of so many tokens are faster with norm, SwiGLU and addition inside."""

    def adds(self, num_tokens: int) -> bool:
        """Whether `add_to` without a bias is the faster one for so many tokens that do not fuse."""
        return False

    @abc.abstractmethod
    def launch_kind(self) -> Hashable:
        """What decides, beside tokens and bias, which kernels this weight's products launch.

        Weights with the same fuse and round alike, too.
        """

    def rounds_to(self, num_tokens: int) -> InputRounding | None:
        """How the operation before may round so many tokens, for `multiply_rounded`.

        None: it may not, and the product takes them in the model's type.
        """
        return None

    def multiply_rounded(self, tokens: RoundedTokens, bias: Tensor | None) -> Tensor:
        """`multiply` of tokens rounded as `rounds_to` says, in the model's type."""
        raise AssertionError("rounds nothing")

    def product(self, x: Activations, bias: Tensor | None) -> Tensor:
        """The product of what the operation before gave."""
        return self.multiply(x, bias) if isinstance(x, Tensor) else self.multiply_rounded(x, bias)

    def gated(self, x: Activations, bias: Tensor | None, activation: Activation) -> Tensor:
        """activation(gate) * up of the halves of `product`: [num_tokens, num_outputs / 2]."""
        return swiglu(self.product(x, bias), activation)

    @abc.abstractmethod
    def destination(self, outputs: range) -> Destination:
        """What fills these outputs from one checkpoint tensor."""

    @abc.abstractmethod
    def finish(self, layer: str) -> None:
        """Checks the weight once it is filled, before any request is computed with it.

        Raises:
            QuantizationRefused: A product differs from its reference; the layer is named.
        """

    @abc.abstractmethod
    def report(self) -> WeightReport:
        """What it takes in few bits."""

    @property
    def num_weights(self) -> int:
        """Number of weights that the checkpoint has for this matrix."""
        return self.num_outputs * self.num_inputs


class PlainWeight(LinearWeight):
    """A tensor in the model's type."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.num_outputs, self.num_inputs = tensor.shape
        self.tensor = nn.Parameter(tensor, requires_grad=False)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Implements `LinearWeight.multiply`."""
        return dense.linear(x, self.tensor, bias)

    def gated(self, x: Activations, bias: Tensor | None, activation: Activation) -> Tensor:
        """Implements `LinearWeight.gated`."""
        assert isinstance(x, Tensor), "a plain weight rounds nothing"
        return gated_linear(x, self.tensor, bias, activation)

    def after_norm(self, x: Tensor, norm_weight: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        """Implements `LinearWeight.after_norm`."""
        return small_linear.norm_linear(x, norm_weight, eps, self.tensor, bias)

    def swiglu_after_norm(self, x: Tensor, norm_weight: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        """Implements `LinearWeight.swiglu_after_norm`."""
        return small_linear.norm_swiglu(x, norm_weight, eps, self.tensor, bias)

    def add_to(self, residual: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """Implements `LinearWeight.add_to`."""
        if bias is None and self.adds(len(x)):
            dense.linear_add(x, self.tensor, residual)
        else:
            small_linear.linear_add(x, self.tensor, bias, residual)

    def fuses(self, num_tokens: int) -> bool:
        """Implements `LinearWeight.fuses`."""
        return small_linear.fuses(num_tokens, self.tensor)

    def adds(self, num_tokens: int) -> bool:
        """Implements `LinearWeight.adds`."""
        return not self.fuses(num_tokens) and dense.adds(num_tokens, self.tensor)

    def launch_kind(self) -> Hashable:
        """Implements `LinearWeight.launch_kind`."""
        return type(self), launch_kind(self.tensor)

    def destination(self, outputs: range) -> Destination:
        """Implements `LinearWeight.destination`."""
        return TensorRows(self.tensor[outputs.start : outputs.stop])

    def finish(self, layer: str) -> None:
        """Implements `LinearWeight.finish`. Numbers were checked while they were read."""

    def report(self) -> WeightReport:
        """Implements `LinearWeight.report`."""
        return WeightReport()


def total_report(weights: Iterable[ReportedWeight]) -> WeightReport:
    """The reports of several weights in one."""
    num_bytes, num_weights = 0, Counter[str]()
    for report in (weight.report() for weight in weights):
        num_bytes += report.num_bytes
        num_weights.update(report.num_weights)
    return WeightReport(num_bytes, num_weights)
