"""One process of a deployment on its node, from its actor's start to its stop.

Owns the private folder of its files, the starts after each death, and the moment of giving up:
whoever started the actor puts another one in its place, on another node perhaps. The process dies
with its actor, and so with its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import sys

from headrace_supervisor.config import SupervisorConfig, runtime_base
from headrace_supervisor.processes.managed_process import ManagedProcess, ProcessGaveUp, ProcessSpec, RestartRule
from headrace_supervisor.runtime_folder import runtime_folder

# Deaths in a row of lives shorter than half a minute.
_ATTEMPTS = 4
_FIRST_PAUSE_S = 0.2


class Supervised:
    """A process that is kept running.

    Attributes:
        folder: private to it.
        failure: why it was given up; "" unless so.
    """

    def __init__(self) -> None:
        base = SupervisorConfig()
        self._stack = contextlib.ExitStack()
        self.folder = self._stack.enter_context(runtime_folder(runtime_base(base)))
        self._hang_timeout_s = base.hang_timeout_s
        self._process: ManagedProcess | None = None
        self._life: asyncio.Task[None] | None = None
        self.failure = ""

    @property
    def restarts(self) -> int:
        """How often the process ended by itself and was started again, since it last was steady."""
        return self._process.deaths if self._process is not None else 0

    @property
    def runs(self) -> bool:
        """Whether it was started and is kept running."""
        return self._life is not None and not self._life.done()

    def start(self, name: str, module: str, config: str) -> None:
        """Starts `python -m module` with a configuration in JSON, and keeps it running."""
        path = self.folder / "config.json"
        path.touch(mode=0o600)
        path.write_text(config, encoding="utf-8")
        rule = RestartRule(_FIRST_PAUSE_S, _ATTEMPTS, self._hang_timeout_s)
        spec = ProcessSpec(name, (sys.executable, "-m", module, "--config-json", str(path)))
        self._process = ManagedProcess(spec, rule, lambda: False)
        self._life = self._process.start()
        self._life.add_done_callback(self._ended)

    async def stop(self, grace_s: float) -> None:
        """Ends the process (SIGTERM, SIGKILL after `grace_s` seconds) and removes its files."""
        if self._process is not None and self._life is not None and not self._life.done():
            await self._process.stop(grace_s, asyncio.Event())
        self._stack.close()

    def refusal(self) -> pathlib.Path:
        """The file in which a backend says why it refused to start."""
        return self.folder / "refusal.json"

    def _ended(self, life: asyncio.Task[None]) -> None:
        error = None if life.cancelled() else life.exception()
        if isinstance(error, ProcessGaveUp):
            self.failure = str(error)
        elif error is not None:
            self.failure = f"{type(error).__name__}: {error}"
