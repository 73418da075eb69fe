"""Products of rounded tokens by the library: how many rows it is given, and what comes of them."""

from __future__ import annotations

import pytest
import torch
from tests.support.kernel_case import poisoned_memory

from headrace_kernels import card
from headrace_kernels.linear.gemm_fp8 import can_scale, library_product, scaled_linear
from headrace_kernels.rounded_tokens import RoundedTokens, round_tokens
from headrace_kernels.weight_formats.quantized_weight import QuantKind, allocate, quantize_rows

E4M3 = torch.float8_e4m3fn


def tokens_of(num_tokens: int, size: int) -> RoundedTokens:
    """Tokens behind which NaN lies, as it may."""
    tokens = RoundedTokens.empty((num_tokens, size), E4M3, torch.device("cpu"))
    everything = tokens.filled_up(128)
    everything.numbers.view(torch.int8).fill_(0x7F)
    everything.scales.fill_(torch.nan)
    tokens.numbers.copy_(torch.randn(num_tokens, size))
    tokens.scales.copy_(torch.rand(num_tokens, 1) + 0.5)
    return tokens


@pytest.mark.parametrize("is_sm_90", [True, False])
@pytest.mark.parametrize("rows", [1, 64, 65, 127, 128, 129, 200, 256, 300, 1000, 5121])
def test_rows_fill_the_tiles_of_the_library(rows: int, is_sm_90: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def scaled_mm(
        left: torch.Tensor, right: torch.Tensor, *, scale_a: torch.Tensor, scale_b: torch.Tensor,
        bias: torch.Tensor, out_dtype: torch.dtype, use_fast_accum: bool,
    ) -> torch.Tensor:  # fmt: skip
        assert not use_fast_accum and len(scale_a) == len(left)
        given.append(len(left))
        return ((left.float() @ right.float()) * scale_a * scale_b + bias.float()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(card, "has_warpgroup_instructions", lambda device: is_sm_90)
    tokens, numbers = tokens_of(rows, 48), torch.randn(32, 48).to(E4M3)
    scales, bias = torch.rand(32), torch.randn(32, dtype=torch.bfloat16)
    found = library_product(tokens, numbers, scales, bias)
    expected = (tokens.numbers.float() @ numbers.float().t()) * tokens.scales * scales + bias.float()
    assert found.is_contiguous() and torch.allclose(found.float(), expected, rtol=2**-8, atol=2**-8)
    assert given == [-(-rows // 128) * 128 if is_sm_90 and 64 < rows <= 5120 else rows]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 100, 130, 160, 300, 448, 1000])
def test_a_card_multiplies_rows_that_fill_no_tile(rows: int) -> None:
    weight = allocate(QuantKind.FP8, 28_672, 4096, 4096, torch.bfloat16, torch.device("cuda"))
    if not can_scale(weight):
        pytest.skip("needs FP8 tensor cores")
    quantize_rows(torch.randn(28_672, 4096, device="cuda"), weight, 0)
    with poisoned_memory("cuda"):
        tokens = round_tokens(torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16), E4M3)
        found = scaled_linear(tokens, weight, None)
    wide = (tokens.numbers.double() @ weight.packed.double().t()) * tokens.scales.double() * weight.scales.double()
    assert found.shape == (rows, 28_672) and float((found.double() - wide).norm() / wide.norm()) < 3e-3
