"""A backend process for benchmarks: started with the given engine settings, watched, and stopped.

Owns the process, its socket and its log, from which start-up phases are read; and the peak of the
memory that its worker takes. Does not speak with it (`engine_session`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from benchmarks import figures

# The server's own backend.
PROGRAM = ("headrace_backend",)
_GIB = 1 << 30
_SAMPLE_S = 0.2
_NVML_NAMES = ("libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1")


class BackendProcess:
    """One running backend."""

    def __init__(
        self,
        engine: dict[str, Any],
        folder: pathlib.Path,
        telemetry_socket: str = "",
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """Starts it.

        Args:
            engine: Fields of EngineConfig.
            folder: Takes its socket, configuration and log.
            telemetry_socket: Socket that it reports to; "": none.
            program: Module to run and its first arguments.
        """
        self.address = f"unix:{folder / 'engine.sock'}"
        self._log = folder / "backend.log"
        config = folder / "backend.json"
        settings = {
            "engine": engine,
            "listen": self.address,
            "log_format": "json",
            "telemetry_socket": telemetry_socket,
        }
        config.write_text(json.dumps(settings))
        # As `headrace serve` starts it; other programs have workers of their own.
        ranks = int(engine.get("tp", 1)) * int(engine.get("pp", 1)) // int(engine.get("hosts", 1))
        early = ("--early-workers", str(ranks)) if program == PROGRAM else ()
        self.started_s = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *program, "--config-json", str(config), *early],
                stderr=log,
                env=figures.environment(),
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def log_tail(self, characters: int = 2000) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-characters:]

    def records(self) -> list[dict[str, Any]]:
        """The lines of its log that are records."""
        records = []
        for line in self._log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                records += [record] if isinstance(record, dict) else []
        return records

    def phases_s(self) -> dict[str, float]:
        """Seconds per phase of the worker's start-up, if the backend says them."""
        for record in self.records():
            phases = record.get("phases_s") or record.get("phases")
            if isinstance(phases, dict):
                return {str(name): float(seconds) for name, seconds in phases.items()}
        return {}

    def captured_mixed_sizes(self) -> list[int]:
        """Tokens of the steps with prompts that its workers replay from graphs.

        It is empty if the backend does not say them.
        """
        said = (record["captured_mixed_sizes"] for record in self.records() if "captured_mixed_sizes" in record)
        return list(next(said, []))

    def workers(self) -> list[psutil.Process]:
        """Its worker processes that are alive now."""
        return list(psutil.Process(self._process.pid).children())

    def resident_bytes(self) -> dict[str, int]:
        """Resident memory now, of the backend itself and of its workers together."""
        backend = psutil.Process(self._process.pid).memory_info().rss
        return {"backend": backend, "workers": sum(worker.memory_info().rss for worker in self.workers())}

    def open_descriptors(self) -> int:
        """File descriptors open now in the backend and its workers."""
        return sum(process.num_fds() for process in (psutil.Process(self._process.pid), *self.workers()))

    def resident_peak_gib(self) -> float:
        """Largest resident memory that its workers had so far."""
        peaks = []
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(OSError):
                lines = pathlib.Path(f"/proc/{child.pid}/status").read_text().splitlines()
                peaks += [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")]
        return sum(peaks) / _GIB

    def kill(self) -> None:
        """Ends it as `kill -9` does; its workers end with it."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def backend_process(
    engine: dict[str, Any], telemetry_socket: str = "", program: Sequence[str] = PROGRAM
) -> Iterator[BackendProcess]:
    """Starts a backend with the given EngineConfig fields, and stops it."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        process = BackendProcess(engine, pathlib.Path(name), telemetry_socket, program)
        try:
            yield process
        finally:
            process.stop()


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class GpuMemory:
    """Peak of the memory in use on a GPU, beyond what was in use at the beginning.

    It is read by NVML, which needs no CUDA context.
    """

    def __init__(self, index: int = 0) -> None:
        """Watches from now on: the card that this process would call by that index.

        Without NVML there are no figures.
        """
        self._nvml = _load_nvml()
        self._handle = ctypes.c_void_p()
        if self._nvml is not None and _find_card(self._nvml, index, self._handle):
            self._nvml = None
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
        while self._nvml is not None and not self._ended.wait(_SAMPLE_S):
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


def _find_card(nvml: Any, index: int, handle: ctypes.c_void_p) -> int:
    """Fills the handle; 0: found.

    NVML knows nothing of CUDA_VISIBLE_DEVICES, by which programs count cards.
    """
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = named[index] if index < len(named) else str(index)
    if name.isdigit():
        return int(nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle)))
    return int(nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)))


def _load_nvml() -> Any:
    for name in _NVML_NAMES:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(name)
            return library if library.nvmlInit_v2() == 0 else None
    return None
