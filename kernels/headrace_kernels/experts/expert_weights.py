"""The weights of all experts of a layer, side by side in one matrix.

Expert e's outputs are rows e N to (e + 1) N - 1, in which a gated product has the gates first and
as many ups behind them. So a mixture is stored, filled and rounded as any other weight: plain, a
`QuantizedWeight` of any kind with its inputs in order, in a file's blocks, or in MXFP4; these two
have kernels of their own. A block of FP8 lies within one expert.

Owns how kernels take it (`bits`, `layout`), whether they multiply it by rounded rows, and how one
expert's numbers are read on a CPU.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.triton_runtime import INTERPRETED
from headrace_kernels.weight_formats import block_weight
from headrace_kernels.weight_formats.block_weight import BlockWeight
from headrace_kernels.weight_formats.kernel_layout import WeightLayout, bits_of, layout_of
from headrace_kernels.weight_formats.mxfp4 import Mxfp4Weight, dequantize_mxfp4_rows
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind, dequantize_rows

# Words that a kernel may load at a time where the layout leaves it open.
_PLANE = 1 << 12
# Multiples that FP8 products ask of inputs.
_ALIGNMENT = 16


class ExpertPart(NamedTuple):
    """Which of a layer's experts a rank has, where it has not all: some that follow each other."""

    # Number of the first one, by which a choice names it.
    first: int
    # Experts of the layer, those of all ranks together.
    total: int


@dataclasses.dataclass(slots=True, frozen=True)
class ExpertWeights:
    """One projection, or gate and up, of every expert: [num_experts * num_outputs, num_inputs]."""

    # A plain one has contiguous rows wherever a kernel reads it.
    weight: Tensor | QuantizedWeight | BlockWeight | Mxfp4Weight
    # Experts that are here.
    num_experts: int
    # [num_experts * num_outputs] in the activations' type; None: there is none.
    bias: Tensor | None = None
    # None: all experts of the layer are here.
    part: ExpertPart | None = None

    def __post_init__(self) -> None:
        weight = self.weight
        if isinstance(weight, QuantizedWeight):
            assert weight.order is None and weight.inputs is None, "experts take inputs in order, as they are"
            assert self.num_outputs % weight.scale_outputs == 0, "a block of FP8 lies within one expert"

    @property
    def total_experts(self) -> int:
        """Experts of the layer, of which a choice names some."""
        return self.num_experts if self.part is None else self.part.total

    @property
    def first_expert(self) -> int | None:
        """Number of the first expert that is here; None: all are."""
        return None if self.part is None else self.part.first

    @property
    def num_outputs(self) -> int:
        """Outputs of one expert, of a gated product gates and ups together."""
        weight = self.weight
        rows = weight.shape[0] if isinstance(weight, Tensor) else weight.num_outputs
        return rows // self.num_experts

    @property
    def num_inputs(self) -> int:
        """Inputs of each expert."""
        weight = self.weight
        return weight.shape[1] if isinstance(weight, Tensor) else weight.num_inputs

    @property
    def dtype(self) -> torch.dtype:
        """The activations' type."""
        return self.weight.dtype

    @property
    def storage(self) -> Tensor:
        """The tensor with the numbers or words of all experts; of blocks their scales."""
        if isinstance(self.weight, BlockWeight):
            return self.weight.scales
        return self.weight if isinstance(self.weight, Tensor) else self.weight.packed

    @property
    def takes_rounded_rows(self) -> bool:
        """Whether tensor cores multiply the numbers by rows of e4m3, on sm_90 and later.

        A row has a scale as an output of the weights has one, or one for each group of inputs, as
        published folders of FP8 in blocks have them rounded. On sm_89, which multiplies FP8 too,
        tiles spill registers and nothing was measured.
        """
        weight = self.weight
        if not isinstance(weight, QuantizedWeight) or weight.kind is not QuantKind.FP8 or weight.keeps_activations:
            return False
        fits = weight.num_inputs % (weight.group_size if weight.is_grouped else _ALIGNMENT) == 0
        return fits and (INTERPRETED or card.has_warpgroup_products(self.storage.device))

    @property
    def row_rounding(self) -> InputRounding:
        """How rows are rounded for weights that `takes_rounded_rows`."""
        assert isinstance(self.weight, QuantizedWeight), "FP8"
        return InputRounding(torch.float8_e4m3fn, self.weight.group_size if self.weight.is_grouped else 0)

    def expert(self, index: int) -> Tensor:
        """Numbers [num_outputs, num_inputs] of the index-th expert that is here, dequantized."""
        rows = slice(index * self.num_outputs, (index + 1) * self.num_outputs)
        if isinstance(self.weight, Tensor):
            return self.weight[rows]
        out = torch.empty(self.num_outputs, self.num_inputs, dtype=self.dtype, device=self.weight.device)
        if isinstance(self.weight, Mxfp4Weight):
            dequantize_mxfp4_rows(self.weight, rows, out)
        elif isinstance(self.weight, BlockWeight):
            block_weight.dequantize_rows(self.weight, rows, out)
        else:
            dequantize_rows(self.weight, rows, out)
        return out

    def expert_bias(self, index: int) -> Tensor | None:
        """One expert's bias [num_outputs]; None: there is none."""
        return None if self.bias is None else self.bias.view(self.num_experts, -1)[index]

    def bits(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Words, scales and zeros, as `mixture_kernels` read them."""
        assert not isinstance(self.weight, (Mxfp4Weight, BlockWeight)), "these have kernels of their own"
        return bits_of(self.weight) if isinstance(self.weight, QuantizedWeight) else (self.weight, None, None)

    def layout(self) -> WeightLayout:
        """What `mixture_kernels` are compiled for; a plain weight's kind is "plain"."""
        assert not isinstance(self.weight, (Mxfp4Weight, BlockWeight)), "these have kernels of their own"
        if isinstance(self.weight, QuantizedWeight):
            layout = layout_of(self.weight, self.dtype)
            # What is loaded at a time lies within one group.
            is_open = layout.kind != "int4" and layout.group >= layout.num_inputs
            return layout._replace(plane=_PLANE) if is_open else layout
        return WeightLayout(
            num_inputs=self.num_inputs,
            num_words=self.num_inputs,
            group=self.num_inputs,
            plane=_PLANE,
            kind="plain",
            offset=0,
            is_grouped=False,
            scale_outputs=1,
            is_plain=INTERPRETED,
        )
