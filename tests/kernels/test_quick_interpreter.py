"""The interpreter computes with what the tests replace of it what it computes without."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from tests.support import quick_interpreter

from headrace_kernels.triton_runtime import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")

NUM_ROWS, WIDTH = 3, 8


@triton.jit
def _scaled(values, factor):  # type: ignore[no-untyped-def]
    return values * factor


@triton.jit
def _kernel(x_ptr, sums_ptr, bits_ptr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    offs = tl.arange(0, WIDTH)
    values = tl.load(x_ptr + row * WIDTH + offs)
    pair = tl.reshape(_scaled(values, 3.0), (WIDTH // 2, 2))
    # Ours, and one of the language's own, which sees other modules of it; a product beyond 32 bits.
    tl.store(sums_ptr + row, tl.sum(tl.sum(pair, axis=1), axis=0))
    tl.store(bits_ptr + row * WIDTH + offs, (offs + row) * 0x7FFF_FFFF)


@triton.jit
def _table_kernel(x_ptr, y_ptr, out_ptr, count, X: tl.constexpr, Y: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each pair of two numbers, in every way in which types and shapes are made to agree."""
    x = tl.load(x_ptr + tl.arange(0, X)[:, None])
    y = tl.load(y_ptr + tl.arange(0, Y)[None, :])
    offs = out_ptr + tl.arange(0, X)[:, None] * Y + tl.arange(0, Y)[None, :]
    mask = (tl.arange(0, X)[:, None] < count) & (tl.arange(0, Y)[None, :] + 1 <= count * 2)
    tl.store(offs, (x + y).to(tl.float32), mask)
    tl.store(offs + X * Y, (2 * x - y * 3).to(tl.float32), mask)
    tl.store(offs + 2 * X * Y, x / (y + 100), mask)
    tl.store(offs + 3 * X * Y, tl.where(x > y, x, 7) * (x == y), mask)
    tl.store(offs + 4 * X * Y, tl.maximum(x + count, y) + tl.zeros((X, Y), tl.float32) - (x - x), mask)


@triton.jit
def _sorting_kernel(x_ptr, sorted_ptr, bits_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each row in order, its exclusive or, and that of all numbers."""
    offs = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + offs)
    tl.store(sorted_ptr + offs, tl.sort(x))
    tl.store(bits_ptr + tl.arange(0, ROWS)[:, None], tl.xor_sum(x, axis=1, keep_dims=True))
    tl.store(bits_ptr + ROWS, tl.xor_sum(x))


def _sorted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found, bits = torch.full_like(x, -1), torch.full((len(x) + 1,), -1, dtype=x.dtype)
    _sorting_kernel[(1,)](x, found, bits, *x.shape)
    return found, bits


def _launch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sums = torch.full((NUM_ROWS,), torch.nan)
    bits = torch.zeros(NUM_ROWS, WIDTH, dtype=torch.int32)
    _kernel[(NUM_ROWS,)](x, sums, bits, WIDTH)
    return sums, bits


def _table(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.full((5, len(x), len(y)), -1.0)
    _table_kernel[(1,)](x, y, out, 3, len(x), len(y))
    return out


def _take_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter what it is without the tests."""
    assert quick_interpreter.REPLACED
    for owner, name, plain in quick_interpreter.REPLACED:
        assert getattr(owner, name) is not plain
        monkeypatch.setattr(owner, name, plain)


def test_both_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(NUM_ROWS, WIDTH)
    quick = _launch(x)
    _take_back(monkeypatch)
    for ours, theirs in zip(quick, _launch(x), strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(quick[0], 3 * x.sum(dim=1))
    assert (quick[1] < 0).any()


# Without bf16, of which the interpreter makes no constants.
DTYPES = (torch.int8, torch.int32, torch.int64, torch.float16, torch.float32)
# Numbers without a sign are not divided by numbers with one.
UNSIGNED = [(torch.uint8, other) for other in (torch.uint8, torch.float16, torch.float32)]


def test_both_make_types_and_shapes_agree_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        (torch.arange(3, 7).to(one), torch.arange(4, 4 + width).to(other))
        for one, other in [*itertools.combinations_with_replacement(DTYPES, 2), *UNSIGNED]
        for width in (4, 8)
    ]
    quick = [_table(*case) for case in cases]
    _take_back(monkeypatch)
    for case, ours in zip(cases, quick, strict=True):
        assert torch.equal(ours, _table(*case)), [each.dtype for each in case]


@triton.jit
def _unequal_kernel(x_ptr, X: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr + tl.arange(0, X), tl.arange(0, X) + tl.arange(0, 2 * X))


@triton.jit
def _large_kernel(x_ptr, X: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr + tl.arange(0, X), tl.load(x_ptr + tl.arange(0, X)) + 300)


@triton.jit
def _odd_kernel(x_ptr, X: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr, tl.sum(tl.zeros((X + 1,), tl.int32)))


@triton.jit
def _signs_kernel(x_ptr, X: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr + tl.arange(0, X), tl.load(x_ptr + tl.arange(0, X)).to(tl.uint8) // tl.load(x_ptr))


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (_unequal_kernel, "incompatible dimensions"),
        (_large_kernel, "out of range"),
        (_odd_kernel, "must be a power of 2"),
        (_signs_kernel, "different signedness"),
    ],
    ids=["shapes", "scalar", "size", "signs"],
)
def test_both_refuse_the_same(
    kernel: triton.JITFunction[Any], reason: str, is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = sys.modules["triton.runtime.interpreter"]
    if not is_quick:
        _take_back(monkeypatch)
    with pytest.raises(interpreter.InterpreterError, match=reason):
        kernel[(1,)](torch.zeros(4, dtype=torch.int8), 4)


def test_outside_of_kernels_the_language_is_as_it_was() -> None:
    _launch(torch.zeros(NUM_ROWS, WIDTH))
    with pytest.raises(ValueError, match=r"forget to add @triton\.jit"):
        tl.arange(0, WIDTH)


def test_a_kernel_that_failed_leaves_the_next_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(NUM_ROWS, WIDTH)
    interpreter = sys.modules["triton.runtime.interpreter"]
    with monkeypatch.context() as broken, pytest.raises(interpreter.InterpreterError, match="planted"):

        def fail(*_: object) -> None:
            raise RuntimeError("planted")

        broken.setattr(interpreter.interpreter_builder, "create_get_program_id", fail)
        _launch(x)
    torch.testing.assert_close(_launch(x)[0], torch.full((NUM_ROWS,), 3.0 * WIDTH))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_both_sort_and_combine_bits_in_the_same_way(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(-(1 << 30), 1 << 30, (4, 16), dtype=dtype)
    quick = _sorted(x)
    assert torch.equal(quick[0], x.sort(1).values)
    _take_back(monkeypatch)
    for found, plain in zip(quick, _sorted(x), strict=True):
        assert torch.equal(found, plain)
