"""What tells operands apart that are not launched alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.launch_kind import launch_kind
from headrace_kernels.weight_formats.quantized_weight import Arrangement, QuantKind, allocate


def test_operands_of_other_types_sizes_strides_or_alignments_are_of_another_kind() -> None:
    numbers = torch.zeros(8, 64)
    assert launch_kind(numbers) == launch_kind(torch.ones(8, 64))
    # One that begins four bytes behind an allocation.
    shifted = torch.zeros(8 * 64 + 1)[1:].view(8, 64)
    others = (numbers.half(), numbers.view(4, 128), numbers.view(64, 8).t(), shifted)
    assert len({launch_kind(each) for each in (numbers, *others)}) == 5


@pytest.mark.parametrize(
    "change",
    [
        {"kind": QuantKind.FP8},
        {"group_size": 64},
        {"is_ordered": True},
        {"has_zeros": True},
        {"inputs": InputRounding(torch.int8)},
        {"inputs": InputRounding(torch.int8, scale=0.5)},
        {"dtype": torch.float16},
    ],
    ids=lambda change: next(iter(change)),
)
def test_weights_of_few_bits_that_differ_in_anything_are_of_another_kind(change: dict[str, Any]) -> None:
    def made(
        kind: QuantKind = QuantKind.INT8, group_size: int = 128, dtype: torch.dtype = torch.bfloat16, **arranged: Any
    ) -> Any:
        return allocate(kind, 32, 128, group_size, dtype, torch.device("cpu"), Arrangement(**arranged))

    assert launch_kind(made()) == launch_kind(made())
    assert launch_kind(made()) != launch_kind(made(**change))


def test_weights_whose_static_scales_differ_are_of_one_kind() -> None:
    """A kernel is given the number; it is compiled once for all layers."""

    def made(scale: float) -> Any:
        arrangement = Arrangement(inputs=InputRounding(torch.int8, scale=scale))
        return allocate(QuantKind.INT8, 32, 128, 128, torch.bfloat16, torch.device("cpu"), arrangement)

    assert launch_kind(made(0.5)) == launch_kind(made(0.25))
