"""Products of rounded tokens by the library: how many rows it is given, and what comes of them."""

from __future__ import annotations

import pytest
import torch
from tests.support.kernel_case import poisoned_memory
from torch.nn import functional

from headrace_kernels import card
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.linear.cublas.bindings import LibraryProduct, ProductShape, TileName, cublas_lt
from headrace_kernels.linear.cublas.fp8 import block_product, library_product
from headrace_kernels.linear.cublas.plain import tiled_linear
from headrace_kernels.linear.cublas.tiled import tiled_product
from headrace_kernels.linear.cublas.tiles import tile_rule
from headrace_kernels.linear.dense import linear
from headrace_kernels.linear.gemm_fp8 import can_scale, scaled_linear
from headrace_kernels.rounded_tokens import RoundedTokens, round_tokens, round_tokens_reference
from headrace_kernels.weight_formats.quantized_weight import (
    Arrangement,
    QuantKind,
    allocate,
    dequantize,
    quantize_rows,
)

E4M3 = torch.float8_e4m3fn
PER_TOKEN, IN_GROUPS = InputRounding(E4M3), InputRounding(E4M3, 128)


def tokens_of(num_tokens: int, size: int) -> RoundedTokens:
    """Tokens behind which NaN lies, as it may."""
    tokens = RoundedTokens.empty((num_tokens, size), PER_TOKEN, torch.device("cpu"))
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
        assert len(scale_a) == len(left)
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


def groups_of(num_tokens: int, size: int) -> RoundedTokens:
    return round_tokens_reference(torch.randn(num_tokens, size), IN_GROUPS)


@pytest.mark.parametrize("rows", [1, 128, 130, 5121])
def test_rows_of_products_in_blocks_fill_the_tiles_of_the_library(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def scaled_mm(
        left: torch.Tensor, right: torch.Tensor, scale_a: torch.Tensor, recipe_a: object, scale_b: torch.Tensor,
        recipe_b: object, swizzle_a: object, swizzle_b: object, bias: torch.Tensor, output_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        # The library knows no other layouts of scales.
        assert scale_a.stride() == (1, len(left)) and scale_b.shape == (4, 2) and scale_b.stride() == (1, 4)
        given.append(len(left))
        tokens = left.float() * scale_a.repeat_interleave(128, 1)
        of_outputs = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight = right.float() * of_outputs[: right.shape[0], : right.shape[1]]
        return (tokens @ weight + bias.float()).to(output_dtype)

    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    arrangement = Arrangement(scale_outputs=128)
    weight = allocate(QuantKind.FP8, 192, 384, 128, torch.bfloat16, torch.device("cpu"), arrangement)
    weight.packed.copy_(torch.randn(192, 384))
    weight.scales.uniform_(0.5, 1.5)
    bias, tokens = torch.randn(192, dtype=torch.bfloat16), groups_of(rows, 384)
    # All tokens, a piece of them, and some that nothing lies behind.
    first = rows // 3
    piece = RoundedTokens(tokens.numbers[first:], tokens.scales[first:], None, 128)
    alone = RoundedTokens(tokens.numbers.clone(), tokens.scales.clone(), None, 128)
    for each in (tokens, piece, alone):
        found = block_product(each, weight.packed, weight.scales, bias)
        expected = each.values() @ dequantize(weight, torch.empty(192, 384)).t() + bias.float()
        assert torch.allclose(found.float(), expected, rtol=2**-8, atol=2**-7)
        assert given.pop() == -(-len(each) // 64) * 64


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 64, 128, 130, 1000])
def test_a_card_multiplies_blocks_of_fp8(rows: int) -> None:
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("the library has products in blocks on sm_90")
    # Blocks along the inputs that are and are no multiple of four, and a last block of few outputs.
    for outputs, inputs in ((4096, 4096), (576, 2688), (16, 128), (6144, 768)):
        arrangement = Arrangement(scale_outputs=128)
        weight = allocate(QuantKind.FP8, outputs, inputs, 128, torch.bfloat16, torch.device("cuda"), arrangement)
        assert can_scale(weight)
        weight.packed.copy_(torch.randn(outputs, inputs, device="cuda"))
        weight.scales.uniform_(0.5, 1.5)
        bias = torch.randn(outputs, device="cuda", dtype=torch.bfloat16) * 50
        with poisoned_memory("cuda"):
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            tokens = round_tokens(x * torch.logspace(-1, 1, inputs, device="cuda").bfloat16(), IN_GROUPS)
            found = [scaled_linear(tokens, weight, each) for each in (None, bias)]
        wide = tokens.values().double() @ dequantize(weight, torch.empty(outputs, inputs, device="cuda")).double().t()
        for each, expected in zip(found, (wide, wide + bias.double()), strict=True):
            assert float((each.double() - expected).norm() / expected.norm()) < 3e-3


@pytest.mark.parametrize(
    ("inputs", "is_sm_90", "is_fast"), [(4096, True, True), (4112, True, False), (4096, False, False)]
)
def test_sums_of_few_inputs_are_the_tensor_cores_alone(
    inputs: int, is_sm_90: bool, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def scaled_mm(left: torch.Tensor, right: torch.Tensor, *, use_fast_accum: bool, **others: object) -> torch.Tensor:
        asked.append(use_fast_accum)
        return (left.float() @ right.float()).bfloat16()

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(card, "has_warpgroup_instructions", lambda device: is_sm_90)
    library_product(tokens_of(64, inputs), torch.randn(32, inputs).to(E4M3), torch.rand(32), None)
    assert asked == [is_fast]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 100, 130, 160, 300, 448, 1000])
def test_a_card_multiplies_rows_that_fill_no_tile(rows: int) -> None:
    weight = allocate(QuantKind.FP8, 28_672, 4096, 4096, torch.bfloat16, torch.device("cuda"))
    if not can_scale(weight):
        pytest.skip("needs FP8 tensor cores")
    quantize_rows(torch.randn(28_672, 4096, device="cuda"), weight, 0)
    with poisoned_memory("cuda"):
        tokens = round_tokens(torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16), PER_TOKEN)
        found = scaled_linear(tokens, weight, None)
    wide = (tokens.numbers.double() @ weight.packed.double().t()) * tokens.scales.double() * weight.scales.double()
    assert found.shape == (rows, 28_672) and float((found.double() - wide).norm() / wide.norm()) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", [(6144, 4096), (4096, 14_336), (28_672, 4096), (2560, 8192), (2064, 2064)])
def test_a_tile_that_the_library_is_given_gives_the_bits_of_its_own(sizes: tuple[int, int], has_bias: bool) -> None:
    device = torch.device("cuda")
    if not card.has_warpgroup_instructions(device):
        pytest.skip("tiles are given on sm_90")
    outputs, inputs = sizes
    numbers = torch.randn(outputs, inputs, device=device).to(E4M3)
    scales = torch.rand(outputs, device=device) + 0.5
    bias = torch.randn(outputs, device=device, dtype=torch.bfloat16) if has_bias else None
    for rows in (33, 64, 96, 128, 192, 256, 320, 448, 512):
        tokens = round_tokens(torch.randn(rows, inputs, device=device, dtype=torch.bfloat16), PER_TOKEN)
        # The first launch is inside of a capture, as that of a graph's step may be.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = library_product(tokens, numbers, scales, bias)
        found.fill_(torch.nan)
        graph.replay()
        own = torch._scaled_mm(
            tokens.numbers, numbers.t(), scale_a=tokens.scales, scale_b=scales[None], bias=bias,
            out_dtype=torch.bfloat16, use_fast_accum=inputs <= 4096,
        )  # fmt: skip
        assert torch.equal(found, own) and torch.equal(library_product(tokens, numbers, scales, bias), own)
        filled = ProductShape(-(-rows // 64) * 64, outputs, inputs, E4M3, has_bias, inputs <= 4096)
        is_named = tile_rule(filled, card.multiprocessors(device)) is not None
        assert (tiled_product(device, filled) is not None) == is_named, "an H100 and an H200 have all tiles"


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", [(4096, 4096), (4096, 14_336), (28_672, 4096), (1536, 4096), (4096, 3584)])
def test_plain_weights_are_multiplied_by_a_tile_that_the_library_is_given(
    sizes: tuple[int, int], has_bias: bool
) -> None:
    device = torch.device("cuda")
    if not card.has_warpgroup_instructions(device):
        pytest.skip("tiles are given on sm_90")
    outputs, inputs = sizes
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
    bias = torch.randn(outputs, device=device, dtype=torch.bfloat16) if has_bias else None
    tiled = 0
    for rows in (64, 96, 128, 192, 256, 384):
        x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
        wide = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
        found = tiled_linear(x, weight, bias)
        if found is not None:
            tiled += 1
            assert torch.equal(found, linear(x, weight, bias))
            # One rounding of a sum in fp32.
            assert float(((found.double() - wide).abs() - wide.abs() * 2**-8).max()) < 0.05
            assert float((found.double() - wide).norm() / wide.norm()) < 3e-3
        # Rows that lie apart from each other are the library's business.
        assert tiled_linear(x.repeat(1, 2)[:, :inputs], weight, bias) is None
    assert tiled >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", [1024, 4096])
def test_fast_sums_lose_less_than_rounding_does(inputs: int) -> None:
    """A tenth of it, and twice as much where all numbers have one sign; rounding to bf16 counts."""
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("sums are fast on sm_90")
    scales, rounding = torch.ones(2048, device="cuda"), 0.04
    for rows in (64, 256, 1000):
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        numbers = torch.randn(2048, inputs, device="cuda").to(E4M3)
        for signs, most in ((x, rounding / 10), (x.abs(), 2 * rounding)):
            tokens = round_tokens(signs, PER_TOKEN)
            weight = numbers if signs is x else numbers.float().abs().to(E4M3)
            expected = (tokens.numbers.double() * tokens.scales.double()) @ weight.double().t()
            found = library_product(tokens, weight, scales, None)
            assert float((found.double() - expected).norm() / expected.norm()) < most


@pytest.mark.gpu
def test_given_tiles_keep_more_than_14_bits_of_long_products() -> None:
    """Numbers have one sign, so that their sums grow.

    In the tensor cores' own sums what is added in the end would be cut off.
    """
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("tiles are given on sm_90")
    numbers = torch.randn(4096, 14_336, device="cuda").abs().to(E4M3)
    scales = torch.ones(4096, device="cuda")
    for rows in (64, 256, 512):
        tokens = round_tokens(torch.randn(rows, 14_336, device="cuda", dtype=torch.bfloat16).abs(), PER_TOKEN)
        expected = (tokens.numbers.double() * tokens.scales.double()) @ numbers.double().t()
        found = library_product(tokens, numbers, scales, None)
        # Half a unit of bf16, and what four additions of 32 products each cut off at 14 bits. The
        # cores' own sums would lose a hundred times as much.
        assert float(((found.double() - expected).abs() / expected).max()) < 2**-8 + 2**-10


@pytest.mark.gpu
def test_a_tile_that_the_library_does_not_have_is_not_taken() -> None:
    library = cublas_lt(torch.device("cuda"))
    assert library is not None
    for number in (E4M3, torch.bfloat16):
        assert not LibraryProduct(library, ProductShape(128, 4096, 4096, number, False)).cut(TileName(9999, 4, 2))
    with pytest.raises(RuntimeError, match="cublasLtCreate failed with cublasStatus_t 7"):
        library.call("cublasLtCreate", None)
