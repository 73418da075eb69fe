"""Products of FP8 weights and tokens rounded to e4m3, on the card's FP8 cores.

Owns when they are possible and by what: some tens to hundreds of rows by our own kernel
(`linear.gemm_fp8_sm90`) where a rule names a tile, others by cuBLAS or CUTLASS by way of
`torch._scaled_mm`, without the fast accumulation that keeps 14 bits of a sum only, and with rows
that fill its tiles. The rounding is `rounded_tokens`'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.linear.gemm_fp8_sm90 import Fp8GemmTile, fitted, multiply_gemm_fp8, takes_gemm_fp8
from headrace_kernels.rounded_tokens import RoundedTokens
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind

# Multiples that the card's FP8 products ask of both sizes of a weight.
_ALIGNMENT = 16
# From so many rows on our own kernel may multiply.
_FEWEST_TILED_ROWS = 33
# Its tiles for products whose outputs are few (no more than inputs) and for others, by the most
# rows that they are for: some of `linear.quantized.WARM_ROWS`. Rows beyond the last, and products
# without a tile, are `_scaled_mm`'s. `splits` says here what `fitted` makes of it. An 8B Llama's
# products take 2.5 ms at 64 rows on an H200, by `_scaled_mm` 3.5 (docs/experiments.md, "Launch
# rules of products").
_SCALED_TILES: dict[int, tuple[Fp8GemmTile, Fp8GemmTile | None]] = {
    64: (Fp8GemmTile(128, 64, 64, 8, 8), Fp8GemmTile(128, 64, 64, 4, 4)),
    128: (Fp8GemmTile(128, 128, 64, 8, 6), None),
}

# cuBLAS multiplies whole tiles of so many rows faster than fewer, on sm_90: an 8B Llama's layer
# takes an H200 128 us with 256 rows and 163 with 160, 187 with 512 and 233 with 448. With 6,300
# rows it takes as long or longer (docs/experiments.md, "rows that fill the library's tiles"). Fewer
# rows than these were not measured.
_LIBRARY_ROWS = 128
_FILLED_ROWS = range(65, 5121)


def can_scale(weight: QuantizedWeight) -> bool:
    """Whether the GPU multiplies FP8 by FP8 with scales per token and output.

    Results are bf16 then, and sizes multiples of 16.
    """
    if weight.keeps_activations or (weight.inputs is not None and not weight.inputs.is_per_token):
        return False
    if weight.kind is not QuantKind.FP8 or weight.is_grouped or weight.dtype != torch.bfloat16:
        return False
    aligned = weight.num_inputs % _ALIGNMENT == 0 and weight.num_outputs % _ALIGNMENT == 0
    return aligned and card.has_fp8_products(weight.device)


def scaled_rule(num_rows: int, weight: QuantizedWeight) -> Fp8GemmTile | None:
    """The tile of our own kernel; None: other kernels multiply.

    By sizes and card alone, one for all numbers of rows of a class.
    """
    most = min((each for each in _SCALED_TILES if each >= num_rows), default=0)
    if num_rows < _FEWEST_TILED_ROWS or most == 0 or not can_scale(weight) or not takes_gemm_fp8(weight):
        return None
    few_outputs, others = _SCALED_TILES[most]
    tile = few_outputs if weight.num_outputs <= weight.num_inputs else others
    if tile is None:
        return None
    return fitted(tile, most, weight.num_outputs, weight.num_inputs, card.multiprocessors(weight.device))


def scaled_linear_reference(tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Specification of `scaled_linear`, in plain PyTorch."""
    total = (tokens.numbers.float() @ weight.packed.float().t()) * tokens.scales * weight.scales[None, :]
    return (total if bias is None else total + bias.float()).to(weight.dtype)


def scaled_linear(tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """X W^T + b of tokens [num_tokens, K] in e4m3, bf16 [num_tokens, N].

    The weight is one that `can_scale`.
    """
    if not tokens.numbers.is_cuda:
        return scaled_linear_reference(tokens, weight, bias)
    tile = scaled_rule(len(tokens.numbers), weight)
    if tile is not None:
        out = torch.empty(len(tokens.numbers), weight.num_outputs, dtype=weight.dtype, device=weight.device)
        multiply_gemm_fp8(tokens, weight, bias, out, tile)
        return out
    return library_product(tokens, weight.packed, weight.scales, bias)


def library_product(tokens: RoundedTokens, numbers: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """X W^T + b of tokens [num_tokens, K] in e4m3 by `torch._scaled_mm`, bf16 [num_tokens, N].

    Args:
        tokens: On a GPU.
        numbers: [N, K] e4m3.
        scales: [N] fp32.
        bias: [N].
    """
    num_tokens = len(tokens)
    if num_tokens in _FILLED_ROWS and card.has_warpgroup_instructions(numbers.device):
        tokens = tokens.filled_up(_LIBRARY_ROWS)
    product: Tensor = torch._scaled_mm(
        tokens.numbers,
        numbers.t(),
        scale_a=tokens.scales,
        scale_b=scales[None, :],
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    # No row of a product depends on another one.
    return product[:num_tokens]
