"""Products of FP8 weights and tokens rounded to e4m3 by cuBLAS.

Owns how many rows the library is given, and whether it is given the tile (`cublas.tiles`) or takes
its own by way of `torch._scaled_mm`. Sums never take the fast accumulation that keeps 14 bits of
them only, and both ways return the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.linear.cublas.bindings import ProductShape, Scales
from headrace_kernels.linear.cublas.tiled import tiled_product
from headrace_kernels.linear.cublas.tiles import OWN_FP8_ROWS
from headrace_kernels.rounded_tokens import RoundedTokens

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


def library_product(tokens: RoundedTokens, numbers: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """X W^T + b of tokens [num_tokens, K] in e4m3, bf16 [num_tokens, N].

    Args:
        tokens: On a GPU.
        numbers: [N, K] e4m3.
        scales: [N] fp32.
        bias: [N].
    """
    num_tokens, device = len(tokens), numbers.device
    # No row of a product depends on another one, so that what fills up is left out of the result.
    if num_tokens <= _MOST_TILED_ROWS and numbers.is_contiguous() and scales.is_contiguous():
        filled = tokens.filled_up(_WHOLE_ROWS)
        outputs, inputs = numbers.shape
        tiled = tiled_product(device, ProductShape(len(filled), outputs, inputs, numbers.dtype, bias is not None))
        if tiled is not None:
            out = torch.empty(len(filled), outputs, dtype=torch.bfloat16, device=device)
            tiled.launch(filled.numbers, numbers, bias, out, Scales(filled.scales, scales))
            return out[:num_tokens]
    if num_tokens in _FILLED_ROWS and card.has_warpgroup_instructions(device):
        tokens = tokens.filled_up(OWN_FP8_ROWS)
    product: Tensor = torch._scaled_mm(
        tokens.numbers,
        numbers.t(),
        scale_a=tokens.scales,
        scale_b=scales[None, :],
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return product[:num_tokens]
