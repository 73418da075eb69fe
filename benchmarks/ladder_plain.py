"""The process of the ladder's plain rungs, from the benchmark's side.

Owns the process and what it says (`plain_rungs`), line by line; it loads its weights while the
first engine starts, and measures once the benchmark says that the device is quiet.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks import figures
from benchmarks.sending import NotMeasured


class PlainProcess:
    """A running `plain_rungs`."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Starts it with a job; it begins to load its weights."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.plain_rungs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=figures.environment(),
            text=True,
        )
        self._write(json.dumps(job))

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    async def _line(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        said: dict[str, Any] | None = json.loads(line) if line else None
        return said

    async def loaded(self) -> None:
        """Returns when its weights are there.

        Raises:
            NotMeasured: It ended instead.
        """
        if await self._line() is None:
            raise NotMeasured(f"the plain rungs did not start (exit code {self._process.wait()})")

    async def measured(self) -> AsyncIterator[dict[str, Any]]:
        """What it measures from now on, thing by thing.

        Raises:
            NotMeasured: It failed.
        """
        self._write("")
        while (said := await self._line()) is not None:
            yield said
        if code := self._process.wait():
            raise NotMeasured(f"the plain rungs ended with exit code {code}")

    def stop(self) -> None:
        """Ends it, wherever it is."""
        self._process.kill()
        self._process.wait()


@asynccontextmanager
async def plain_process(job: dict[str, Any]) -> AsyncIterator[PlainProcess]:
    """Starts the process of the plain rungs, and ends it."""
    process = PlainProcess(job)
    try:
        yield process
    finally:
        process.stop()
