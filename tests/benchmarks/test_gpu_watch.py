"""What NVML says of a card while something runs, by a library that stands in for it."""

from __future__ import annotations

import ctypes
import itertools
import time
from typing import Any

import pytest
from benchmarks import gpu_watch
from benchmarks.gpu_watch import GpuClocks, GpuMemory, clock_line


class Nvml:
    """A card that begins at its highest clock, and is held down by its power limit from then on."""

    def __init__(self) -> None:
        self.readings = itertools.count()

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        return 0 if index == 1 else 2

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.used = 80 << 30, 3 << 30
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, reasons: Any) -> int:
        self.is_first = next(self.readings) == 0
        reasons._obj.value = 0x1 if self.is_first else 0x4
        return 0

    def nvmlDeviceGetClockInfo(self, handle: Any, clock: int, value: Any) -> int:
        assert clock == 1
        value._obj.value = 1980 if self.is_first else 1500
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: Any, value: Any) -> int:
        value._obj.value = 400_000 if self.is_first else 700_000
        return 0

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, value: Any) -> int:
        value._obj.value = 700_000
        return 0

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, clock: int, value: Any) -> int:
        value._obj.value = 1980
        return 0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    library = Nvml()
    monkeypatch.setattr(gpu_watch, "_load_nvml", lambda: library)
    monkeypatch.setattr(gpu_watch, "_CLOCK_SAMPLE_S", 0.001)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    return library


def test_clocks_are_watched_while_a_block_runs_and_no_longer(nvml: Nvml) -> None:
    with GpuClocks() as clocks:
        while next(nvml.readings) < 20:
            time.sleep(0.001)
    before = clocks.summary()
    assert before is not None
    assert before["sm_mhz_least"] == 1500 and before["sm_mhz_most"] == 1980 and before["power_limit_w"] == 700
    assert 1500 <= before["sm_mhz"] < 1980 and 400 < before["power_w"] <= 700
    assert 0.5 < before["power_capped"] <= 1 and before["too_hot"] == 0
    line = clock_line(before)
    assert "W of 700" in line and "(least 1,500, of 1,980)" in line and "by heat 0% of the time" in line
    time.sleep(0.01)
    assert clocks.summary() == before


@pytest.mark.parametrize("card", ["0", "none"])
def test_without_nvml_or_the_card_there_are_no_figures(card: str, monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> None:
    if card == "none":
        monkeypatch.setattr(gpu_watch, "_load_nvml", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", card if card.isdigit() else "1")
    with GpuClocks() as clocks:
        pass
    assert clocks.summary() is None
    memory = GpuMemory()
    assert memory.peak_gib is None and memory.total_bytes is None
    memory.close()


def test_memory_is_what_is_used_beyond_the_beginning(nvml: Nvml) -> None:
    memory = GpuMemory()
    assert (memory.total_bytes, memory.used_bytes, memory.peak_gib) == (80 << 30, 3 << 30, 0)
    memory.close()


def test_this_machine_is_asked_without_an_error() -> None:
    with GpuClocks() as clocks:
        pass
    found = clocks.summary()
    assert found is None or found["power_limit_w"] > 0
    assert ctypes.sizeof(gpu_watch._NvmlMemory) == 24
