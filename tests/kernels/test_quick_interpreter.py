"""The interpreter computes with what the tests replace of it what it computes without."""

from __future__ import annotations

import sys

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


def _launch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sums = torch.full((NUM_ROWS,), torch.nan)
    bits = torch.zeros(NUM_ROWS, WIDTH, dtype=torch.int32)
    _kernel[(NUM_ROWS,)](x, sums, bits, WIDTH)
    return sums, bits


def test_both_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(NUM_ROWS, WIDTH)
    quick = _launch(x)
    assert quick_interpreter.REPLACED
    for owner, name, plain in quick_interpreter.REPLACED:
        assert getattr(owner, name) is not plain
        monkeypatch.setattr(owner, name, plain)
    for ours, theirs in zip(quick, _launch(x), strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(quick[0], 3 * x.sum(dim=1))
    assert (quick[1] < 0).any()


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
