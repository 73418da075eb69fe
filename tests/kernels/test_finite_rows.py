"""Rows that are finite, and rows that one number spoils, wherever it stands."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tests.support.compiling import compiled

from headrace_kernels.finite_rows import finite_rows, finite_rows_reference
from headrace_kernels.triton_runtime import INTERPRETED, forced

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")),
    pytest.param(
        "cuda:0",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 64, 1024, 1500])
def test_a_row_is_finite_if_all_its_numbers_are(device: str, dtype: torch.dtype, size: int) -> None:
    largest = torch.finfo(dtype).max
    rows = torch.randn(9, size).to(dtype)
    rows[0, 0], rows[1, -1] = largest, -largest
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf), start=2):
        rows[row, -1] = value
        rows[row + 3, 0] = value
    # From a row on whose address is no multiple of anything.
    rows = rows.to(device)[1:]
    with forced() if device == "cpu" else contextlib.nullcontext():
        finite = finite_rows(rows)
    assert finite.tolist() == finite_rows_reference(rows).tolist() == [True, *[False] * 6, True]


def test_no_rows_are_no_launch() -> None:
    assert finite_rows(torch.empty(0, 8)).tolist() == []


# Kernels are compiled for a card in the slow part; the interpreter computes this one above.
@pytest.mark.slow
def test_the_kernel_compiles_once_per_type_and_size() -> None:
    kernels = compiled("compiled_kernels", "finite", 90)
    assert [kernel["name"] for kernel in kernels] == ["finite_rows_kernel"] * 6
    assert all(kernel["stack_bytes"] == 0 for kernel in kernels)
