"""`headrace serve`: one backend and N services, from the first check to the last process ended.

Owns the order: model folder and addresses are checked before anything starts; backend and services start together; the ready line is printed once, when
the server says SERVING; on SIGTERM or SIGINT services finish their streams first, then the backend ends. What happens when one process dies
is `processes.py`'s, workers are the backend's. Configurations go to the processes as JSON files in the private runtime folder.
"""

from __future__ import annotations

import asyncio
import pathlib
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

import pydantic

from headrace_model_folder.errors import InvalidModelFolder
from headrace_model_folder.folder import ModelFolder
from headrace_supervisor import config as configs
from headrace_supervisor.address import AddressError, claimed, reachable
from headrace_supervisor.config import ServerConfig
from headrace_supervisor.processes import ManagedProcess, ProcessGaveUp, ProcessSpec, RestartRule
from headrace_supervisor.readiness import until_serving
from headrace_supervisor.runtime_folder import SOCKET_NAME, RuntimeFolderError, runtime_folder

EXIT_REFUSED = 2
# A service needs a moment beyond its own grace to say goodbye; the backend has nothing to finish by then.
_SERVICE_MARGIN_S = 5.0
_BACKEND_GRACE_S = 10.0


class StartRefused(Exception):  # an outcome
    """The server does not start: model folder, address or runtime folder. One line; exit code 2."""


def serve(config: ServerConfig) -> int:
    """Runs a server until it is told to end. Returns the exit code.

    Raises:
        StartRefused: before anything was started.
    """
    engine = config.backend.engine
    check_model(engine.model, needs_weights=engine.load == "folder")
    try:
        with (
            claimed(config.supervisor.listen) as addresses,
            runtime_folder(configs.runtime_base(config.supervisor)) as folder,
        ):
            ready_to_run = configs.addressed(config, addresses, f"unix:{folder / SOCKET_NAME}")
            backend, services = process_specs(ready_to_run, folder)
            supervisor = Supervisor(
                config.supervisor, backend, services, addresses=addresses, grace_s=config.service.shutdown_grace_s
            )
            return asyncio.run(supervisor.run())
    except (AddressError, RuntimeFolderError) as error:
        raise StartRefused(str(error)) from None


def check_model(folder: pathlib.Path, *, needs_weights: bool) -> None:
    """Validates a model folder without torch. Raises StartRefused naming file and tensor."""
    try:
        ModelFolder.open(folder, require_weights=needs_weights)
    except InvalidModelFolder as error:
        raise StartRefused(f"model {folder}: {error}") from None


def process_specs(config: ServerConfig, folder: pathlib.Path) -> tuple[ProcessSpec, list[ProcessSpec]]:
    """The backend and the services of a configuration, whose JSON is written to `folder`."""
    backend = _spec("backend", "headrace_backend", config.backend, folder)
    services = []
    for index in range(config.supervisor.services):
        service = config.service.model_copy(update={"service_name": f"service-{index}"})
        services.append(_spec(service.service_name, "headrace_service", service, folder))
    return backend, services


def _spec(name: str, module: str, config: pydantic.BaseModel, folder: pathlib.Path) -> ProcessSpec:
    path = folder / f"{name}.json"
    path.write_text(config.model_dump_json(), encoding="utf-8")
    return ProcessSpec(name, (sys.executable, "-m", module, "--config-json", str(path)))


class Supervisor:
    """The life of one server's processes."""

    def __init__(
        self,
        config: configs.SupervisorConfig,
        backend: ProcessSpec,
        services: Sequence[ProcessSpec],
        *,
        addresses: Sequence[str],
        grace_s: float,
        ready: Callable[[str], Awaitable[None]] = until_serving,
    ) -> None:
        rule = RestartRule(config.restart_backoff_s, config.start_attempts)
        self._backend = ManagedProcess(backend, rule, lambda: self._served)
        self._services = [ManagedProcess(spec, rule, lambda: self._served) for spec in services]
        self._addresses = addresses
        self._grace_s = grace_s
        self._ready = ready
        self._served = False
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Runs until a signal or until a process can't be kept running. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        lives = [process.start() for process in (self._backend, *self._services)]
        announced = asyncio.create_task(self._announce())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            # A life ends by itself only when it gave up; an announcement, only when it was made or failed.
            while not stopped.done() and not any(life.done() for life in lives):
                waiting = {*lives, stopped} if announced.done() else {*lives, stopped, announced}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if announced.done():
                    announced.result()
        finally:
            announced.cancel()
            stopped.cancel()
            await self._end()
        return _exit_code(lives)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _announce(self) -> None:
        """Prints the ready line when every address serves."""
        started = time.monotonic()
        for address in self._addresses:
            await self._ready(reachable(address))
        self._served = True
        print(
            f"listening on {', '.join(self._addresses)} (ready after {time.monotonic() - started:.1f} s; Ctrl-C ends)",
            flush=True,
        )

    async def _end(self) -> None:
        """Services first: they finish their streams while the backend still computes."""
        grace_s = self._grace_s + _SERVICE_MARGIN_S
        await asyncio.gather(*(service.stop(grace_s, self._hurry) for service in self._services))
        await self._backend.stop(_BACKEND_GRACE_S, self._hurry)


def _exit_code(lives: Sequence[asyncio.Task[None]]) -> int:
    """0 after a signal; the first process that gave up decides otherwise."""
    for failure in [error for life in lives if (error := life.exception())]:
        if not isinstance(failure, ProcessGaveUp):
            raise failure
        print(f"headrace: {failure}", file=sys.stderr, flush=True)
        return failure.exit_code
    return 0
