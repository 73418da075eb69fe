"""What a GPU does while something else runs on it, by NVML: memory, power and clocks.

NVML needs no CUDA context. Where there is no NVML there are no figures.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import threading
from types import TracebackType
from typing import Any, Self

_GIB = 1 << 30
_MEMORY_SAMPLE_S = 0.2
_CLOCK_SAMPLE_S = 0.05
_NVML_NAMES = ("libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1")
# nvmlClockType_t.
_CLOCK_SM = 1
# Why clocks are held down, by the name of newer drivers and of older ones, and its bits: the power
# limit; heat, for software and for hardware, and the board's power brake.
_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
_POWER_CAP = 0x4
_TOO_HOT = 0x20 | 0x40 | 0x80


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuMemory:
    """Peak of the memory in use on a GPU, beyond what was in use at the beginning.

    It is read by NVML, which needs no CUDA context.
    """

    def __init__(self, index: int = 0) -> None:
        """Watches from now on: the card that this process would call by that index.

        Without NVML there are no figures.
        """
        self._nvml, self._handle = _card(index)
        self._ended = threading.Event()
        self._before = self._peak = self._used()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _memory(self) -> _NvmlMemory:
        memory = _NvmlMemory()
        if self._nvml is not None and self._nvml.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)):
            self._nvml = None
        return memory

    def _used(self) -> int:
        return int(self._memory().used)

    @property
    def total_bytes(self) -> int | None:
        """All of the card's; None without NVML."""
        total = int(self._memory().total)
        return None if self._nvml is None else total

    def _watch(self) -> None:
        while self._nvml is not None and not self._ended.wait(_MEMORY_SAMPLE_S):
            self._peak = max(self._peak, self._used())

    @property
    def used_bytes(self) -> int | None:
        """In use now, by whomever; None without NVML."""
        used = self._used()
        return None if self._nvml is None else used

    @property
    def name(self) -> str:
        """The card's name; "" without NVML."""
        text = ctypes.create_string_buffer(96)
        if self._nvml is None or self._nvml.nvmlDeviceGetName(self._handle, text, len(text)):
            return ""
        return text.value.decode()

    @property
    def peak_gib(self) -> float | None:
        """So far; None without NVML."""
        return None if self._nvml is None else (self._peak - self._before) / _GIB

    def close(self) -> None:
        """Ends the watching."""
        self._ended.set()
        self._thread.join()


class GpuClocks:
    """Power and clocks of a card while a block runs, and what holds them down."""

    def __init__(self, index: int = 0) -> None:
        """Finds the card that this process would call by that index.

        Without NVML there are no figures.
        """
        self._nvml, self._handle = _card(index)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._samples: list[tuple[int, int, int]] = []

    def __enter__(self) -> Self:
        """Begins to watch."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the watching."""
        self._ended.set()
        self._thread.join()

    def summary(self) -> dict[str, float] | None:
        """Means, the lowest clock, and shares of the samples; None without NVML or a sample.

        Returns:
            power_w: By NVML, whose readings are averages of a second on some cards.
            power_limit_w: What the card may take.
            sm_mhz, sm_mhz_least, sm_mhz_most: Clock of the multiprocessors: mean and lowest, and
                the highest that the card has.
            power_capped, too_hot: Shares of the time in which the power limit, or heat or the
                board, held clocks down.
        """
        if self._nvml is None or not self._samples:
            return None
        milliwatts, megahertz, reasons = zip(*self._samples, strict=True)
        return {
            "power_w": round(statistics.fmean(milliwatts) / 1e3, 1),
            "power_limit_w": round(self._number("nvmlDeviceGetEnforcedPowerLimit") / 1e3, 1),
            "sm_mhz": round(statistics.fmean(megahertz)),
            "sm_mhz_least": min(megahertz),
            "sm_mhz_most": self._number("nvmlDeviceGetMaxClockInfo", _CLOCK_SM),
            "power_capped": round(statistics.fmean(bool(each & _POWER_CAP) for each in reasons), 3),
            "too_hot": round(statistics.fmean(bool(each & _TOO_HOT) for each in reasons), 3),
        }

    def _watch(self) -> None:
        name = next((name for name in _REASONS if hasattr(self._nvml, name)), None)
        while name is not None:
            reasons = ctypes.c_ulonglong()
            getattr(self._nvml, name)(self._handle, ctypes.byref(reasons))
            clock = self._number("nvmlDeviceGetClockInfo", _CLOCK_SM)
            self._samples.append((self._number("nvmlDeviceGetPowerUsage"), clock, reasons.value))
            if self._ended.wait(_CLOCK_SAMPLE_S):
                return

    def _number(self, name: str, *arguments: int) -> int:
        """What a function of the card says; 0 if it says nothing."""
        value = ctypes.c_uint()
        getattr(self._nvml, name)(self._handle, *arguments, ctypes.byref(value))
        return value.value


def clock_line(card: dict[str, float]) -> str:
    """A summary of clocks in words."""
    return (
        f"{card['power_w']:.0f} W of {card['power_limit_w']:.0f}, SM {card['sm_mhz']:,.0f} MHz "
        f"(least {card['sm_mhz_least']:,.0f}, of {card['sm_mhz_most']:,.0f}), held down by the power limit "
        f"{card['power_capped']:.0%} and by heat {card['too_hot']:.0%} of the time"
    )


def _card(index: int) -> tuple[Any, ctypes.c_void_p]:
    """NVML and its handle of the card that programs call by that index; None: there is none.

    NVML knows nothing of CUDA_VISIBLE_DEVICES, by which programs count cards.
    """
    nvml, handle = _load_nvml(), ctypes.c_void_p()
    if nvml is None:
        return None, handle
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = named[index] if index < len(named) else str(index)
    if name.isdigit():
        status = nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
    else:
        status = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    return None if status else nvml, handle


def _load_nvml() -> Any:
    for name in _NVML_NAMES:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(name)
            return library if library.nvmlInit_v2() == 0 else None
    return None
