"""Products of INT4 weights and tokens rounded to e4m3, by the kernel emulated without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.linear.test_quantized_linear import Product, assert_close
from tests.support.gluon_emulation import emulating
from tests.support.kernel_case import kernels_on, poisoned_memory
from torch import Tensor

from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.linear.w4a8 import gemm_sm90
from headrace_kernels.linear.w4a8.gemm_sm90 import W4A8Tile, multiply_w4a8
from headrace_kernels.linear.w4a8.token_sums import token_sums_reference
from headrace_kernels.rounded_tokens import RoundedTokens, round_tokens_reference
from headrace_kernels.weight_formats.quantized_weight import QuantKind, plane_inputs

# Rows, outputs, inputs, group, tile: rows and outputs that fill no tile, planes of 128 and of 64,
# groups of two planes and of all inputs, tokens in parts, whole tiles, splits, and equal shares
# that begin and end within a tile (the card of a CPU has two multiprocessors).
CASES = (
    (40, 144, 1024, 128, W4A8Tile(64, 64, 64, 4, False, 1)),
    (70, 80, 512, 64, W4A8Tile(64, 64, 32, 4, True, 2)),
    (33, 192, 1536, 128, W4A8Tile(128, 32, 16, 8, True, 0)),
    (9, 320, 768, 128, W4A8Tile(64, 32, 32, 4, False, 0)),
    (20, 64, 1024, 1024, W4A8Tile(64, 32, 16, 4, True, 1)),
)


def tokens_of(product: Product) -> RoundedTokens:
    return round_tokens_reference(product.x, InputRounding(torch.float8_e4m3fn))


def assembly(source: str, operands: list[Any], kind: Any) -> Tensor:
    """What the kernel's pieces of assembly say."""
    if source.startswith("fma"):
        product, scales, total = operands
        return total + product * scales
    (values,) = operands
    if source.startswith("mov"):
        return torch.as_tensor(values)
    if source.startswith("prmt"):
        high = "0x7531" in source
        return ((values.to(torch.int32) >> (8 if high else 0)) & 255).to(torch.uint8).view(torch.int8)
    nibbles = (values.view(torch.uint8).to(torch.int32) >> (4 if "shr" in source else 0)) & 15
    return nibbles.to(torch.uint8).view(kind.dtype)


def emulated(product: Product, tile: W4A8Tile, eager: bool = False, careless: str | None = None) -> Tensor:
    out, tokens = product.poison(), tokens_of(product)
    sums = token_sums_reference(tokens.numbers, plane_inputs(product.weight.num_inputs, product.weight.group_size))
    with (
        kernels_on("cpu"),
        poisoned_memory("cpu"),
        emulating(gemm_sm90, "_gemm_w4a8_kernel", assembly, eager, careless),
    ):
        multiply_w4a8(tokens, sums, product.weight, product.bias, out, tile)
    return out


def check(product: Product, found: Tensor) -> None:
    """Both sides are given exactly, so that only fp32's sums are between the result and fp64."""
    tokens = tokens_of(product)
    x = tokens.numbers.double() * tokens.scales.double()
    assert_close(found, product.expected(x), product.spread(x) / 100)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "group", "tile"), CASES)
def test_what_the_kernel_says_agrees_with_fp64(
    rows: int, outputs: int, inputs: int, group: int, tile: W4A8Tile, eager: bool
) -> None:
    product = Product(QuantKind.INT4, rows, outputs, inputs, group, torch.bfloat16, "cpu")
    check(product, emulated(product, tile, eager))
