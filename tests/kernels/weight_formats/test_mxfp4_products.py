"""How a token's numbers become fp16 for products with MXFP4."""

# Triton's decorator has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from tests.support.kernel_case import kernels_on

from headrace_kernels.weight_formats.mxfp4_products import scaled_columns

WARPS, NUMBERS = 2, 512


@triton.jit
def _columns_kernel(x_ptr, scaled_ptr, undone_ptr, WARPS: tl.constexpr):
    """Two steps of each warp."""
    warp = tl.arange(0, WARPS)[None, None, :, None]
    t, g = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 8)[None, :, None, None]
    places = warp * 512 + g * 32 + t * 8 + tl.arange(0, 8)[None, None, None, :]
    scaled, undone = scaled_columns((tl.load(x_ptr + places), tl.load(x_ptr + places + 256)))
    tl.store(scaled_ptr + places, scaled[0].to(tl.float16))
    tl.store(scaled_ptr + places + 256, scaled[1].to(tl.float16))
    tl.store(undone_ptr + warp, undone)


def columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of x [WARPS, NUMBERS] in fp16, and what undoes their scaling [WARPS, 1]."""
    scaled, undone = torch.full_like(x, torch.nan, dtype=torch.float16), torch.full((WARPS, 1), torch.nan)
    with kernels_on("cpu"):
        _columns_kernel[(1,)](x.contiguous(), scaled, undone, WARPS=WARPS)
    return scaled, undone


# The largest numbers that bf16 holds, large and usual ones, the smallest normal ones, and smaller.
@pytest.mark.parametrize("magnitude", [2.0**127, 2.0**17, 1.0, 2.0**-126, 2.0**-132])
def test_numbers_of_bf16_are_exact_however_large(magnitude: float) -> None:
    x = torch.rand(WARPS, NUMBERS, generator=torch.Generator().manual_seed(3)) * 0.9 + 0.1
    # Down to 2^-20 of the largest.
    x *= torch.logspace(0, -16, NUMBERS, base=2) * torch.tensor([[1.0], [-1.0]])
    x = (x.double() * magnitude).to(torch.bfloat16)
    scaled, undone = columns(x.float())
    assert scaled.isfinite().all() and scaled.abs().max() < 2**14
    assert torch.equal(scaled.double() * undone.double(), x.double())


def test_rounding_is_that_of_eleven_bits() -> None:
    x = torch.randn(WARPS, NUMBERS, generator=torch.Generator().manual_seed(4)) * torch.tensor([[1e20], [1e-20]])
    scaled, undone = columns(x)
    error = (scaled.double() * undone.double() - x.double()).abs()
    # Numbers far below the largest are off by as much as fp16's smallest: 2^-38 of it.
    assert bool((error <= 2.0**-11 * x.double().abs() + 2.0**-37 * x.double().abs().amax(1, keepdim=True)).all())


def test_nothing_but_zeros_stays_so() -> None:
    scaled, undone = columns(torch.zeros(WARPS, NUMBERS))
    assert not scaled.any() and undone.isfinite().all()


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so_and_leaves_other_warps_alone(value: float) -> None:
    x = torch.randn(WARPS, NUMBERS, generator=torch.Generator().manual_seed(5))
    expected, _ = columns(x)
    x[0, 7] = value
    scaled, undone = columns(x)
    assert not scaled[0, 7].isfinite() and undone.isfinite().all()
    assert torch.equal(scaled[1], expected[1])
