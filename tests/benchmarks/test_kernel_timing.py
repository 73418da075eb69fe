"""Cases of kernels are found as their contract says, on fresh data each.

Their figures are the arithmetic of bytes, operations and time.
"""

from __future__ import annotations

import types

import pytest
import torch
from benchmarks import kernel_timing
from benchmarks.bench_kernels import line, with_ceiling
from benchmarks.ceilings import Ceilings

FILE = """
import torch
from functools import partial

made = []

def copy(size=1 << 16):
    source, target = torch.ones(size), torch.zeros(size)
    made.append(source)
    return (lambda: target.copy_(source)), 8 * size, 0

def products():
    for size in (8, 16):
        yield f"{size}x{size}", partial(product, size)

def product(size):
    left = torch.ones(size, size)
    return (lambda: left @ left), 12 * size * size, 2 * size**3

def _helper():
    raise AssertionError
"""


@pytest.fixture
def module() -> types.ModuleType:
    made = types.ModuleType("synthetic_cases")
    exec(FILE, made.__dict__)
    return made


def test_cases_are_functions_without_arguments_and_what_generators_yield(module: types.ModuleType) -> None:
    assert [name for name, _ in kernel_timing.cases(module)] == ["copy", "products[8x8]", "products[16x16]"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cases are on the CPU")
def test_a_case_is_timed_on_rotating_data(module: types.ModuleType) -> None:
    result = kernel_timing.timed(module.copy)
    assert len(module.made) == 16
    assert result["bytes"] == 8 << 16
    assert result["tb_s"] == pytest.approx(result["bytes"] / result["us"] / 1e6, rel=0.02)


@pytest.mark.parametrize(("num_bytes", "flops", "bound", "share"), [(1e6, 0, "memory", 0.5), (1, 1e9, "compute", 0.25)])
def test_the_share_of_the_ceiling_is_that_of_the_longer_floor(
    num_bytes: float, flops: float, bound: str, share: float
) -> None:
    ceilings = Ceilings("cuda", "synthetic", 1e12, {1: 1e15})
    us = 2.0 if bound == "memory" else 4.0
    result = {"file": "f", "case": "c", "us": us, "bytes": num_bytes, "flops": flops, "tb_s": 0.0, "tflop_s": 0.0}
    measured = with_ceiling(result, ceilings)
    assert (measured["bound"], measured["of_ceiling"]) == (bound, pytest.approx(share, rel=1e-3))
    assert f"{share:.1%} of {bound}" in line(measured)
