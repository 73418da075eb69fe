"""The weight of all experts of a layer: that of one projection, or of gate and up, side by side.

To loaders it is a weight like any other, with each projection's rows at their place, so whatever is
quantized while it is read is quantized here as well. Products are those of experts alone
(`headrace_kernels.experts`), which take it as `experts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable

import torch
from torch import nn

from headrace_backend.quantization.block_linear_weight import BlockLinearWeight
from headrace_backend.quantization.linear_weight import PlainWeight, WeightReport
from headrace_backend.quantization.low_bit_weight import LowBitWeight, RoundedWeight
from headrace_backend.quantization.nf4_weight import Nf4Weight
from headrace_backend.quantization.stored_weight import StoredWeight, input_rounding
from headrace_backend.quantization.summaries import StoredSummary
from headrace_backend.weights.expert_block_rows import EXPERT_BLOCKS, ExpertBlockRows
from headrace_backend.weights.mxfp4_rows import Mxfp4Rows
from headrace_backend.weights.placement import Placement
from headrace_backend.weights.scheme import QuantizationRefused, Scheme
from headrace_kernels.experts import mixture
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.launch_kind import launch_kind
from headrace_kernels.weight_formats.block_weight import BlockKind
from headrace_kernels.weight_formats.gguf_blocks import FILE_BLOCKS
from headrace_kernels.weight_formats.mxfp4 import GROUP, allocate_mxfp4, has_large_scales
from headrace_kernels.weight_formats.quantized_weight import allocate
from headrace_model_folder import LayerFormat


class PlainExpertWeight(PlainWeight):
    """The experts' weights in the model's type."""

    def __init__(self, num_outputs: int, num_inputs: int, num_experts: int, placement: Placement) -> None:
        """Allocates it, empty; `num_outputs` are those of all experts together."""
        super().__init__(torch.empty(num_outputs, num_inputs, dtype=placement.dtype, device=placement.device))
        self.num_experts = num_experts

    @property
    def experts(self) -> ExpertWeights:
        """The weight as products of experts take it."""
        return ExpertWeights(self.tensor, self.num_experts)


class RoundedExpertWeight(RoundedWeight):
    """The experts' weights, quantized by a scheme of the settings."""

    def __init__(
        self, num_outputs: int, num_inputs: int, num_experts: int, scheme: Scheme, placement: Placement
    ) -> None:
        """Allocates it, empty; `num_outputs` are those of all experts together.

        Raises:
            QuantizationRefused: The scheme's groups do not divide the inputs.
        """
        super().__init__(num_outputs, num_inputs, scheme, placement)
        self.num_experts = num_experts

    @property
    def experts(self) -> ExpertWeights:
        """The weight as products of experts take it."""
        return ExpertWeights(self.quantized, self.num_experts)

    def input_rounding(self, num_tokens: int) -> InputRounding | None:
        """Overrides `LowBitWeight.input_rounding`: experts' products have a rule of their own."""
        return mixture.input_rounding(num_tokens, self.experts)


class StoredExpertWeight(StoredWeight):
    """The experts' weights with the numbers and scales that another tool gave them.

    Inputs are rounded where the folder says so of FP8 and the card's products do just that, with a
    scale for each token or, beside weights in blocks, for as many inputs as a block has. They are
    multiplied as they are elsewhere, whatever the folder says.
    """

    def __init__(
        self, form: LayerFormat, outputs: range, inputs: range, num_projections: int, num_experts: int, to: Placement
    ) -> None:
        """Allocates it, empty.

        Args:
            form: Format of all projections.
            outputs: Outputs of each projection that this rank keeps.
            inputs: Inputs of each projection that this rank keeps.
            num_projections: Projections of all experts.
            num_experts: Number of experts.
            to: Type and device.

        Raises:
            QuantizationRefused: No group that there is divides a rank's inputs.
        """
        kept = dataclasses.replace(form, inputs=None)
        super().__init__(kept, [outputs] * num_projections, inputs, to)
        self.num_experts = num_experts
        self.stated_inputs = stated = input_rounding(form)
        group = self.quantized.group_size if self.quantized.is_grouped else 0
        if stated is not None and stated.scale is None and stated.is_symmetric and stated.group_size == group:
            self.quantized = dataclasses.replace(self.quantized, keeps_activations=False)

    @property
    def experts(self) -> ExpertWeights:
        """The weight as products of experts take it."""
        return ExpertWeights(self.quantized, self.num_experts)

    def input_rounding(self, num_tokens: int) -> InputRounding | None:
        """Overrides `LowBitWeight.input_rounding`: experts' products have a rule of their own."""
        return mixture.input_rounding(num_tokens, self.experts)


class BlockExpertWeight(LowBitWeight):
    """The experts' weights with the numbers of a GGUF file's blocks, in groups of 32."""

    def __init__(
        self, num_outputs: int, num_inputs: int, num_experts: int, kind: BlockKind, placement: Placement
    ) -> None:
        """Allocates it, empty; `num_outputs` are those of all experts together."""
        sizes = (num_outputs, num_inputs, FILE_BLOCKS[kind].inputs)
        super().__init__(allocate(EXPERT_BLOCKS[kind], *sizes, placement.dtype, placement.device))
        self.num_experts, self._kind = num_experts, kind

    @property
    def experts(self) -> ExpertWeights:
        """The weight as products of experts take it."""
        return ExpertWeights(self.quantized, self.num_experts)

    def destination(self, outputs: range) -> ExpertBlockRows:
        """Implements `LinearWeight.destination`."""
        return ExpertBlockRows(self.quantized, self._kind, outputs)

    def finish(self, layer: str) -> None:
        """Implements `LinearWeight.finish`."""
        if not bool(self.quantized.scales.isfinite().all()):
            raise QuantizationRefused(f"layer {layer!r}: has a scale that is not finite in the model's type")
        super().finish(layer)

    def report(self) -> WeightReport:
        """Implements `LinearWeight.report`, in the file's words."""
        return WeightReport(self.num_bytes, {self._kind.value: self.num_weights})


class FileBlockExpertWeight(BlockLinearWeight):
    """The experts' weights in a GGUF file's blocks as they are: K types, types with minimums."""

    def __init__(
        self, num_outputs: int, num_inputs: int, num_experts: int, kind: BlockKind, placement: Placement
    ) -> None:
        """Allocates it, empty; `num_outputs` are those of all experts together.

        Raises:
            QuantizationRefused: Blocks that the inputs do not fill.
        """
        super().__init__([kind], [num_outputs], num_inputs, placement)
        self.num_experts = num_experts

    @property
    def experts(self) -> ExpertWeights:
        """The weight as products of experts take it."""
        (weight,) = self.blocks
        return ExpertWeights(weight, self.num_experts)

    def finish(self, layer: str) -> None:
        """Implements `LinearWeight.finish`: nothing is checked but scales, by who loads."""


class Nf4ExpertWeight(Nf4Weight):
    """The experts' weights, rounded to NF4 while they are read."""

    def __init__(self, num_outputs: int, num_inputs: int, num_experts: int, placement: Placement) -> None:
        """Allocates it, empty; `num_outputs` are those of all experts together.

        Raises:
            QuantizationRefused: Blocks do not divide the inputs.
        """
        super().__init__(num_outputs, num_inputs, placement)
        self.num_experts = num_experts

    @property
    def experts(self) -> ExpertWeights:
        """The weight as products of experts take it."""
        (weight,) = self.blocks
        return ExpertWeights(weight, self.num_experts)

    def finish(self, layer: str) -> None:
        """Implements `LinearWeight.finish`: rows were compared with originals as they came."""


class Mxfp4ExpertWeight(nn.Module):
    """The experts' weights in MXFP4, as a folder has them."""

    def __init__(self, num_outputs: int, num_inputs: int, num_experts: int, placement: Placement) -> None:
        """Allocates it, empty; `num_outputs` are those of all experts together."""
        super().__init__()
        self._weight = allocate_mxfp4(num_outputs, num_inputs, placement.dtype, placement.device)
        self.num_weights = num_outputs * num_inputs
        self.num_experts = num_experts

    @property
    def experts(self) -> ExpertWeights:
        """The weight as products of experts take it."""
        return ExpertWeights(self._weight, self.num_experts)

    @property
    def num_bytes(self) -> int:
        """What it takes, scales included."""
        return self._weight.num_bytes

    def launch_kind(self) -> Hashable:
        """What decides, beside tokens, which kernels its products launch."""
        return type(self), launch_kind(self._weight)

    def destination(self, outputs: range) -> Mxfp4Rows:
        """What fills these outputs from one checkpoint tensor."""
        return Mxfp4Rows(self._weight, outputs)

    def finish(self, layer: str) -> None:
        """Checks the weight once it is filled.

        Raises:
            QuantizationRefused: It has a scale that no product takes; the layer is named.
        """
        if has_large_scales(self._weight, slice(None)):
            raise QuantizationRefused(f"layer {layer!r}: has an MXFP4 scale above 2, which is not supported, or NaN")

    def report(self) -> WeightReport:
        """What it takes in few bits."""
        return WeightReport(self.num_bytes, {"MXFP4": self.num_weights})


def summarize_mxfp4(weights: Iterable[tuple[str, Mxfp4ExpertWeight]]) -> StoredSummary:
    """Checks all weights in MXFP4 of a model, of which there is at least one.

    Args:
        weights: Path in the model, and weight.

    Raises:
        QuantizationRefused: A weight has a scale that no product takes.
    """
    found = dict(weights)
    for path, weight in found.items():
        weight.finish(path.removesuffix(".weight"))
    num_bytes = sum(weight.num_bytes for weight in found.values())
    num_weights = sum(weight.num_weights for weight in found.values())
    return StoredSummary("mxfp4", GROUP, 8 * num_bytes / num_weights, len(found))


ExpertWeight = (
    PlainExpertWeight
    | RoundedExpertWeight
    | StoredExpertWeight
    | BlockExpertWeight
    | FileBlockExpertWeight
    | Nf4ExpertWeight
    | Mxfp4ExpertWeight
)


def make_expert_weight(outputs: range, inputs: range, num_experts: int, placement: Placement) -> ExpertWeight:
    """Makes an empty weight of the placement's type and scheme, or of the folder's format.

    Args:
        outputs: Outputs of each projection that this rank keeps.
        inputs: Inputs of each projection that this rank keeps.
        num_experts: Number of experts.
        placement: Device, type, names of all experts' projections, and their bits.

    Raises:
        QuantizationRefused: The scheme's groups do not divide the inputs.
    """
    count, formats = len(placement.names), placement.layer_formats
    sizes = (len(outputs) * count, len(inputs), num_experts)
    if (form := formats[0]) is not None:
        if form.number == "mxfp4":
            return Mxfp4ExpertWeight(*sizes, placement)
        return StoredExpertWeight(form, outputs, inputs, count, num_experts, placement)
    if (kinds := placement.block_kinds) is not None:
        assert kinds[0] is not None and len(set(kinds)) == 1
        made = BlockExpertWeight if kinds[0] in EXPERT_BLOCKS else FileBlockExpertWeight
        return made(*sizes, kinds[0], placement)
    if placement.scheme is None:
        return PlainExpertWeight(*sizes, placement)
    if placement.scheme.kind is BlockKind.NF4:
        return Nf4ExpertWeight(*sizes, placement)
    return RoundedExpertWeight(*sizes, placement.scheme, placement)
