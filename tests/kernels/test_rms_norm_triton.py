"""The kernels of the norms against fp64: odd sizes, strided heads, the residual stream.

They run in the interpreter, and at a model's sizes on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.kernel_case import DEVICES, DTYPES, Numbers, assert_rounded, kernels_on, poisoned_memory

from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rms_norm import add_rms_norm, rms_norm, rounded_add_rms_norm, summed

EPS = 1e-5


def expected_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def check_norm(x: torch.Tensor, weight: torch.Tensor) -> None:
    with kernels_on(x.device.type), poisoned_memory(x.device.type):
        normed = rms_norm(x, weight, EPS)
    assert normed.is_contiguous() and normed.dtype == x.dtype
    # Rounded before the weight, unless that is wider, and after it.
    assert_rounded(normed, expected_norm(x, weight), roundings=2 if weight.dtype is x.dtype else 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(1, 1), (3, 7), (5, 48), (1, 100), (33, 64), (2, 896), (3, 2048), (2, 5120)])
def test_rms_norm_of_any_size(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    numbers = Numbers(device, dtype, seed=rows * size)
    # Rows of very different sizes: a norm taken of another row would show.
    scales = torch.logspace(-2, 2, rows, device=device)[:, None].to(dtype)
    check_norm(numbers.randn(rows, size) * scales, numbers.randn(size))


@pytest.mark.parametrize("device", DEVICES)
def test_behind_wider_weights_a_norm_is_rounded_once(device: str) -> None:
    numbers = Numbers(device, torch.bfloat16)
    # Of 16 bits 1 has no room for what is added.
    weight = 1 + 1e-3 * numbers.randn(48).float()
    check_norm(numbers.randn(5, 48), weight)
    assert weight.dtype is torch.float32 and not torch.equal(weight.bfloat16().float(), weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens, heads, first, count, size", [(3, 6, 4, 1, 16), (1, 6, 0, 4, 80), (5, 10, 8, 2, 128)])
def test_rms_norm_of_some_of_the_heads(tokens: int, heads: int, first: int, count: int, size: int, device: str) -> None:
    numbers = Numbers(device, torch.float16)
    check_norm(numbers.randn(tokens, heads, size)[:, first : first + count], numbers.randn(size))


@pytest.mark.parametrize("device", DEVICES)
def test_rms_norm_of_transposed_and_of_no_rows(device: str) -> None:
    numbers = Numbers(device, torch.float32)
    check_norm(numbers.randn(4, 3, 5, 16).transpose(0, 2), numbers.randn(16))
    check_norm(numbers.randn(16, 3).t(), numbers.randn(16))
    check_norm(numbers.randn(0, 16), numbers.randn(16))


@pytest.mark.parametrize("device", DEVICES)
def test_rms_norm_of_zeros_is_zero(device: str) -> None:
    with kernels_on(device):
        normed = rms_norm(torch.zeros(2, 48, device=device), torch.ones(48, device=device), EPS)
    assert torch.equal(normed, torch.zeros_like(normed))


def check_add(numbers: Numbers, rows: int, size: int) -> None:
    x, residual, weight = numbers.randn(rows, size), numbers.randn(rows, size), numbers.randn(size)
    total = x.double() + residual.double()
    with kernels_on(numbers.device), poisoned_memory(numbers.device):
        normed = add_rms_norm(x, residual, weight, EPS)
    assert_rounded(residual, total, roundings=1)
    # The norm is that of the stream as it is kept.
    assert_rounded(normed, expected_norm(residual, weight), roundings=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(1, 1), (3, 7), (33, 64), (1, 896), (2, 5120)])
def test_add_rms_norm_keeps_the_sum_and_norms_it(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    check_add(Numbers(device, dtype, seed=rows * size), rows, size)


def check_parts(numbers: Numbers, rows: int, parts: int, size: int) -> None:
    """Parts give the stream the bits that their sum gives it, and their sum is rounded once."""
    x, residual, weight = numbers.randn(rows, parts, size), numbers.randn(rows, size), numbers.randn(size)
    whole, streams = summed(x), (residual, residual.clone(), residual.clone())
    assert_rounded(whole, x.double().sum(1), roundings=2)
    with kernels_on(numbers.device), poisoned_memory(numbers.device):
        normed = add_rms_norm(x, streams[0], weight, EPS)
        add_rms_norm(whole, streams[1], weight, EPS)
        rounded = rounded_add_rms_norm(x, streams[2], weight, EPS, InputRounding(torch.int8), keeps=True)
    assert torch.equal(streams[0], streams[1]) and torch.equal(streams[2], streams[1])
    # More warps share a row than of whole outputs, and sum its squares in another order.
    assert_rounded(normed, expected_norm(residual, weight), roundings=2)
    assert rounded.unrounded is not None and torch.equal(rounded.unrounded, normed)


# The interpreter cuts a sum off where it becomes bf16.
@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        (torch.float16, "cpu"),
        (torch.float32, "cpu"),
        *(pytest.param(dtype, "cuda", marks=pytest.mark.gpu) for dtype in DTYPES),
    ],
)
@pytest.mark.parametrize("rows, parts, size", [(3, 2, 7), (5, 3, 64), (2, 8, 2048), (1, 1, 48)])
def test_an_output_in_parts_is_added_up_first(
    rows: int, parts: int, size: int, dtype: torch.dtype, device: str
) -> None:
    check_parts(Numbers(device, dtype, seed=rows * size), rows, parts, size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, size", [(1, 4096), (256, 4096), (8192, 4096), (300, 8192), (4, 16384), (2, 32768), (2, 40000)]
)
def test_norms_at_the_sizes_of_models(rows: int, size: int, dtype: torch.dtype) -> None:
    numbers = Numbers("cuda", dtype, seed=rows * size)
    check_norm(numbers.randn(rows, size), numbers.randn(size))
    check_add(numbers, rows, size)
    check_parts(numbers, min(rows, 2000), 8, size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_every_head_at_the_sizes_of_models(dtype: torch.dtype) -> None:
    numbers = Numbers("cuda", dtype)
    check_norm(numbers.randn(1000, 48, 128)[:, 32:40], numbers.randn(128))
