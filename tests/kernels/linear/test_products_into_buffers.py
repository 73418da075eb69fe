"""Products that are written to a buffer: the numbers of a new tensor, and nothing beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.linear.dense import linear
from headrace_kernels.triton_runtime import INTERPRETED, forced
from headrace_kernels.weight_formats.quantized_weight import QuantKind, allocate, quantize_rows

DEVICES = [
    "cpu",
    pytest.param("interpreted", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")),
    pytest.param(
        "cuda:0",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
    ),
]
OUTPUTS, INPUTS = 192, 128


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    with forced() if request.param == "interpreted" else contextlib.nullcontext():
        yield torch.device("cuda:0" if request.param == "cuda:0" else "cpu")


Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def product(weight: torch.Tensor, bits: str) -> Product:
    if bits == "plain":
        return lambda x, out: linear(x, weight, out_dtype=torch.float32, out=out)
    quantized = allocate(QuantKind[bits], *weight.shape, weight.shape[1], weight.dtype, weight.device)
    quantize_rows(weight, quantized, 0)
    return lambda x, out: quantized_linear.linear(x, quantized, None, torch.float32, out)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bits", ["plain", "INT8", "FP8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 20, pytest.param(300, marks=pytest.mark.gpu)])
def test_a_product_fills_its_rows_of_a_buffer(device: torch.device, bits: str, dtype: torch.dtype, rows: int) -> None:
    numbers = torch.Generator().manual_seed(rows)
    weight = torch.randn(OUTPUTS, INPUTS, generator=numbers).to(device, dtype)
    x = torch.randn(rows, INPUTS, generator=numbers).to(device, dtype)
    multiply = product(weight, bits)
    buffer = torch.full((rows + 2, OUTPUTS), torch.nan, device=device)
    found = multiply(x, buffer[:rows])
    assert found.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[:rows], multiply(x, None))
    assert buffer[rows:].isnan().all()
