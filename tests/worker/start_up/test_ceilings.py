"""The quick look at what the device can do: plausible, quick, and harmless where it fails."""

from __future__ import annotations

import gc
import pathlib
import time

import pytest
import torch

from headrace_backend.worker.start_up import ceilings
from headrace_backend.worker.start_up.ceilings import Rates, measured_rates

CPU = torch.device("cpu")


def resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_rates_of_a_cpu_are_plausible_and_come_soon() -> None:
    began_s = time.thread_time()
    rates = measured_rates(CPU, torch.float32)
    # This thread's own time: others may use the machine.
    assert time.thread_time() - began_s < 1.0
    # The slowest machine that serves anything, and more than any CPU has.
    assert 1e8 < rates.copy_bytes_per_s < 1e13
    assert 1e8 < rates.matmul_flops_per_s < 1e15


def test_a_cpu_gives_the_memory_back() -> None:
    measured_rates(CPU, torch.float32)
    before = resident_bytes()
    measured_rates(CPU, torch.float32)
    assert resident_bytes() - before < 16 << 20


def test_torch_draws_what_it_would_have_drawn_without_it() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    measured_rates(CPU, torch.float32)
    assert torch.equal(torch.rand(4), expected)


def test_a_device_without_memory_for_it_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(ceilings.torch, "randn", fail)
    assert measured_rates(CPU, torch.float32) == Rates(0.0, 0.0)


@pytest.mark.gpu
def test_rates_of_a_gpu_are_plausible_quick_and_leave_no_memory_behind() -> None:
    device = torch.device("cuda:0")
    torch.cuda.init()
    torch.empty(1, device=device)
    # What other tests left lying about must not go meanwhile.
    gc.collect()
    allocated = torch.cuda.memory_allocated(device)
    began_s = time.monotonic()
    rates = measured_rates(device, torch.bfloat16)
    assert time.monotonic() - began_s < 2.0
    assert 1e11 < rates.copy_bytes_per_s < 2e13
    assert 1e12 < rates.matmul_flops_per_s < 1e16
    # Less where a library's workspace, left by another test, was let go.
    assert torch.cuda.memory_allocated(device) <= allocated
