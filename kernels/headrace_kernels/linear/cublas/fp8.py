"""Products of FP8 weights and tokens rounded to e4m3 by cuBLAS.

Owns how many rows the library is given, whether it is given the tile (`cublas.tiles`) or takes its
own by way of PyTorch, and how products are added up. Both ways return the same bits.

Weights in blocks of 128 by 128 take tokens rounded in groups of 128 inputs. The library multiplies
the sums of each 128 inputs by both scales, and adds them up in fp32.

Tensor cores keep 14 bits of a sum. Where fp32 takes over every 128 products, a card that is at its
power limit, as it is with 128 rows and more, needs 2 to 14% more time. So on sm_90 sums of up to
4,096 inputs are the tensor cores' alone. What that cuts off, relative to outputs, beside what
rounding to e4m3 costs them (docs/experiments.md, "sums of FP8 by the tensor cores alone"):

    inputs    outputs: rounding, cut off    of 10 deviations    numbers of one sign: cut off
     1,024              3.73%, 0.06%                                                   1.5%
     2,048              3.72%, 0.08%        0.40%, 0.22%                               3.3%
     4,096              3.74%, 0.13%        0.47%, 0.38%                               6.6%
     8,192              3.73%, 0.21%                                                  12.9%
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

from headrace_kernels import card
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.linear.cublas.bindings import ProductShape, Scales, loaded_library
from headrace_kernels.linear.cublas.tiled import tiled_product
from headrace_kernels.linear.cublas.tiles import OWN_FP8_ROWS
from headrace_kernels.rounded_tokens import MOST_FAST_INPUTS, RoundedTokens
from headrace_kernels.weight_formats.quantized_weight import BLOCKS_ROOM

# Rows up to which the library is given the tile. Steps of 640 to 700 tokens took no less time with
# it, and with 2,048 and 8,192 rows the card's power limit decides.
_MOST_TILED_ROWS = 512
# The library multiplies whole tiles faster than parts of them. Those that are given have multiples
# of 64 rows, or next to: an 8B Llama's down projection takes an H200 26.2 us with 96 rows, and 20.7
# with 128.
_WHOLE_ROWS = 64
# Its own has 128: a layer of that model takes 163 us with 160 rows, 128 with 256. With 6,300 rows
# filling up takes as long or longer, and fewer than these were not measured (docs/experiments.md,
# "rows that fill the library's tiles").
_FILLED_ROWS = range(65, 5121)


def has_block_products() -> bool:
    """Whether the library of this PyTorch knows scales of blocks."""
    return loaded_library() is not None


def block_product(tokens: RoundedTokens, numbers: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """X W^T + b of tokens in groups of 128 inputs and weights in blocks of 128 by 128.

    Args:
        tokens: [num_tokens, K] in e4m3, on sm_90.
        numbers: [N, K] e4m3.
        scales: [K / 128, ceil(N / 128)] fp32, as `quantized_weight` lays them out.
        bias: [N] bf16.

    Returns:
        [num_tokens, N] bf16.
    """
    filled = tokens.filled_up(_WHOLE_ROWS)
    if len(filled) % _WHOLE_ROWS or filled.scales.stride(1) != len(filled):
        # Some of more tokens: the library knows no room between groups.
        rounding = InputRounding(tokens.numbers.dtype, tokens.group_size)
        whole = RoundedTokens.empty(tokens.numbers.shape, rounding, numbers.device)
        whole.numbers.copy_(tokens.numbers)
        whole.scales.copy_(tokens.scales)
        filled = whole.filled_up(_WHOLE_ROWS)
    # With the room that they have, which the library counts.
    room = math.ceil(len(scales) / BLOCKS_ROOM) * BLOCKS_ROOM
    scales = scales.as_strided((room, scales.shape[1]), scales.stride())
    if len(filled) <= _MOST_TILED_ROWS and numbers.is_contiguous():
        outputs, inputs = numbers.shape
        shape = ProductShape(len(filled), outputs, inputs, numbers.dtype, bias is not None, in_blocks=True)
        tiled = tiled_product(numbers.device, shape)
        if tiled is not None:
            out = torch.empty(len(filled), len(numbers), dtype=torch.bfloat16, device=numbers.device)
            tiled.launch(filled.numbers, numbers, bias, out, Scales(filled.scales.t(), scales.t()))
            return out[: len(tokens)]
    product: Tensor = functional.scaled_mm(
        filled.numbers,
        numbers.t(),
        filled.scales,
        ScalingType.BlockWise1x128,
        scales,
        ScalingType.BlockWise128x128,
        SwizzleType.NO_SWIZZLE,
        SwizzleType.NO_SWIZZLE,
        bias,
        torch.bfloat16,
    )
    return product[: len(tokens)]


def library_product(tokens: RoundedTokens, numbers: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """X W^T + b of tokens [num_tokens, K] in e4m3, bf16 [num_tokens, N].

    Args:
        tokens: On a GPU.
        numbers: [N, K] e4m3.
        scales: [N] fp32.
        bias: [N].
    """
    num_tokens, device = len(tokens), numbers.device
    outputs, inputs = numbers.shape
    is_sm_90 = card.has_warpgroup_instructions(device)
    has_fast_sums = is_sm_90 and inputs <= MOST_FAST_INPUTS
    # No row of a product depends on another one, so that what fills up is left out of the result.
    if num_tokens <= _MOST_TILED_ROWS and numbers.is_contiguous() and scales.is_contiguous():
        filled = tokens.filled_up(_WHOLE_ROWS)
        shape = ProductShape(len(filled), outputs, inputs, numbers.dtype, bias is not None, has_fast_sums)
        tiled = tiled_product(device, shape)
        if tiled is not None:
            out = torch.empty(len(filled), outputs, dtype=torch.bfloat16, device=device)
            tiled.launch(filled.numbers, numbers, bias, out, Scales(filled.scales, scales))
            return out[:num_tokens]
    if is_sm_90 and num_tokens in _FILLED_ROWS:
        tokens = tokens.filled_up(OWN_FP8_ROWS)
    product: Tensor = torch._scaled_mm(
        tokens.numbers,
        numbers.t(),
        scale_a=tokens.scales,
        scale_b=scales[None, :],
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=has_fast_sums,
    )
    return product[:num_tokens]
