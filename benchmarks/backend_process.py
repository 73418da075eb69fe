"""A backend process for benchmarks: started with the given engine settings, watched, and stopped.

Owns the process, its socket and its log, from which start-up phases are read. Does not speak with
it (`engine_session`).
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from benchmarks import figures

# The server's own backend.
PROGRAM = ("headrace_backend",)
_GIB = 1 << 30


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
