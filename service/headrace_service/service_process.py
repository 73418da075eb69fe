"""The life of a process that stands between callers and engines, whatever wire it speaks.

Owns the order of start and of shutdown, the probe's health checks, and the tasks that run as long
as the process. Which wire it speaks is the subclass's: gRPC in `server`, HTTP in `openai`. On
SIGTERM health turns NOT_SERVING first, new generations are refused UNAVAILABLE, open streams go on
for the grace time, what is left ends UNAVAILABLE, and the process exits with 0; a second signal
cuts the grace time short.
"""

from __future__ import annotations

import abc
import asyncio
import signal
from collections.abc import Callable, Iterable

import structlog

from headrace_health.probe import CannotProbe, Probe
from headrace_health.servicer import HealthServicer
from headrace_service import health
from headrace_service.auth.credentials import Credentials
from headrace_service.config import ServiceConfig
from headrace_service.listening import CannotListen
from headrace_service.messages.foreign_parsing import ForeignParsingInterceptor
from headrace_service.service_core import ServiceCore
from headrace_service.streams import reader_watch

_log = structlog.get_logger("headrace.service")


class ServiceProcess(abc.ABC):
    """A service process, once started.

    Raises:
        CredentialError: a file of keys or certificates cannot be used.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._core = ServiceCore(config)
        self._credentials = Credentials(config)
        serves = health.serves(lambda: self._core.serving, (), self._core.models.by_address)
        self._probe = Probe(config.probe, serves, [ForeignParsingInterceptor()]) if config.probe is not None else None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def core(self) -> ServiceCore:
        """The state that all handlers of the process share."""
        return self._core

    @abc.abstractmethod
    async def _listen(self) -> list[str]:
        """Begins to answer callers.

        Returns:
            The addresses with the ports that were given.

        Raises:
            CannotListen: an address is taken.
        """

    @abc.abstractmethod
    async def _close_listeners(self) -> None:
        """Ends the listeners and the connections that are left, within about a second."""

    @abc.abstractmethod
    def _served(self) -> dict[str, object]:
        """Returns what the line about listening says of this wire."""

    def _health(self, names: Iterable[str]) -> HealthServicer:
        """Returns the health of this process, asked for by the names of its services."""
        return HealthServicer(health.serves(lambda: self._core.serving, names, self._core.models.by_address))

    async def start(self) -> list[str]:
        """Listens and begins to connect to the backend.

        Returns:
            The addresses with the ports that were given.

        Raises:
            CannotListen: an address is taken.
        """
        addresses = await self._listen()
        try:
            await self._start_probe()
        except CannotListen:
            # gRPC ends a server that still listens once its event loop is gone, with a traceback.
            await self._close_listeners()
            raise
        self._tasks += [
            asyncio.create_task(self._core.models.run(), name="models"),
            asyncio.create_task(
                reader_watch.watch(lambda: self._core.delivering, self._reader_limits()), name="reader-watch"
            ),
            asyncio.create_task(self._credentials.watch(), name="credentials"),
        ]
        if self._config.engines_dns:
            self._tasks.append(asyncio.create_task(self._core.models.look_ups.run(), name="engine-names"))
        if self._core.models.file is not None:
            self._tasks.append(asyncio.create_task(self._core.models.file.run(), name="engine-file"))
        if self._core.control is not None:
            self._tasks.append(asyncio.create_task(self._core.control.run(), name="control"))
        if self._core.tracer is not None:
            self._tasks.append(asyncio.create_task(self._core.tracer.run(self._core.load), name="tracer"))
        self._log_listening(addresses)
        return addresses

    async def wait_failed(self) -> None:
        """Returns never; raises what ended a task that should run as long as the process."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise AssertionError("the service's tasks never return")

    async def stop(self, grace_s: float) -> None:
        """Shuts down in order; streams may go on for `grace_s`."""
        await self._core.drain(grace_s)
        await self._close_listeners()
        if self._probe is not None:
            await self._probe.stop()
        # What was cut off just now: the engine says how it ended while there is a connection.
        await asyncio.gather(*(model.engine.all_reported() for model in self._core.models))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._core.close()

    async def _start_probe(self) -> None:
        """Answers health checks on the address for probes, if there is one.

        Raises CannotListen.
        """
        if self._probe is None:
            return
        try:
            await self._probe.start()
        except CannotProbe as error:
            raise CannotListen(str(error)) from None

    def _log_listening(self, addresses: list[str]) -> None:
        config, credentials = self._config, self._credentials
        _log.info(
            "service.listening",
            addresses=addresses,
            tls="off" if credentials.tls is None else "mutual" if config.tls_client_ca is not None else "on",
            keys=None if credentials.keys is None else len(credentials.keys),
            **self._served(),
        )
        if config.is_exposed and (credentials.tls is None or credentials.keys is None):
            _log.warning("service.insecure", why="other machines reach this server without TLS, or without keys")

    def _reader_limits(self) -> reader_watch.ReaderLimits:
        config = self._config
        return reader_watch.ReaderLimits(
            config.reader_cap_bytes, int(config.reader_timeout_s * 1e9), int(config.reader_stall_timeout_s * 1e9)
        )


async def run(config: ServiceConfig, kind: Callable[[ServiceConfig], ServiceProcess]) -> None:
    """Runs a service process of a kind until SIGTERM or SIGINT.

    Raises:
        CannotListen: an address is taken.
        CredentialError: a file of keys or certificates cannot be used.
        InvalidModelFolder: the model's folder cannot be served.
    """
    asked_to_stop = _stop_signals()
    service = kind(config)
    await service.start()
    failed = asyncio.create_task(service.wait_failed())
    first = asyncio.create_task(asked_to_stop.acquire())
    await asyncio.wait([failed, first], return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        await service.stop(0)
        failed.result()
    failed.cancel()
    _log.info("service.stopping", grace_s=config.shutdown_grace_s)
    await _stop_with_grace(service, config.shutdown_grace_s, asked_to_stop)


async def _stop_with_grace(service: ServiceProcess, grace_s: float, asked_to_stop: asyncio.Semaphore) -> None:
    stopping = asyncio.create_task(service.stop(grace_s))
    second = asyncio.create_task(asked_to_stop.acquire())
    await asyncio.wait([stopping, second], return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        await service.core.drain(0)
    second.cancel()
    await stopping


def _stop_signals() -> asyncio.Semaphore:
    """Returns a semaphore that every SIGTERM and SIGINT releases once."""
    asked = asyncio.Semaphore(0)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.release)
    return asked
