"""One service process: its gRPC server, its connection to the backend, and how both begin and end.

Owns which services it serves, the order of start and of shutdown. On SIGTERM health turns
NOT_SERVING first, new generations are refused UNAVAILABLE, open streams go on for the grace time,
what is left ends UNAVAILABLE, and the process exits with 0; a second signal cuts the grace time
short.
"""

from __future__ import annotations

import asyncio
import signal

import grpc
import structlog
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace_protos.inference import private_pool
from headrace_service import listening
from headrace_service.api import admin_handlers, inference_service
from headrace_service.auth.credentials import Credentials
from headrace_service.config import ServiceConfig
from headrace_service.health import HealthServicer
from headrace_service.kserve import service as kserve
from headrace_service.messages.descriptor_pools import DescriptorPools
from headrace_service.messages.foreign_parsing import ForeignParsingInterceptor
from headrace_service.messages.one_request import OneRequestInterceptor
from headrace_service.service_core import ServiceCore
from headrace_service.streams import reader_watch
from headrace_service.tracing.interceptor import TracingInterceptor

_STOP_S = 1.0
_HEALTH_NAME = "grpc.health.v1.Health"
_log = structlog.get_logger("headrace.service")


class Service:
    """A service process, once started."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._core = ServiceCore(config)
        self._credentials = Credentials(config)
        self._server = grpc.aio.server(
            interceptors=self._interceptors(),
            options=listening.channel_options(config),
        )
        self._probe_server = (
            grpc.aio.server(interceptors=[ForeignParsingInterceptor()]) if config.probe is not None else None
        )
        self._tasks: list[asyncio.Task[None]] = []

    def _interceptors(self) -> list[grpc.aio.ServerInterceptor]:  # type: ignore[type-arg]
        """The outermost first."""
        tracer = self._core.tracer
        tracing = [TracingInterceptor(tracer)] if tracer is not None else []
        auth = self._credentials.interceptor(listening.MAX_METADATA_BYTES)
        return [*tracing, OneRequestInterceptor(), auth, ForeignParsingInterceptor()]

    @property
    def core(self) -> ServiceCore:
        """The state that all handlers of the process share."""
        return self._core

    async def start(self) -> list[str]:
        """Listens and begins to connect to the backend.

        Returns:
            The addresses with the ports that were given.

        Raises:
            CannotListen: an address is taken.
        """
        names = self._register()
        health = HealthServicer(lambda: self._core.serving, names)
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)
        if self._config.reflection:
            pools = DescriptorPools(private_pool.POOL, descriptor_pool.Default())
            reflection.enable_server_reflection([*names, _HEALTH_NAME, reflection.SERVICE_NAME], self._server, pools)  # type: ignore[arg-type]
        addresses = [listening.bind(self._server, address, self._credentials.tls) for address in self._config.listen]
        await self._server.start()
        await self._start_probe(health)
        self._tasks = [
            asyncio.create_task(self._core.models.run(), name="models"),
            asyncio.create_task(
                reader_watch.watch(lambda: self._core.delivering, self._reader_limits()), name="reader-watch"
            ),
            asyncio.create_task(self._credentials.watch(), name="credentials"),
        ]
        if self._core.control is not None:
            self._tasks.append(asyncio.create_task(self._core.control.run(), name="control"))
        if self._core.tracer is not None:
            self._tasks.append(asyncio.create_task(self._core.tracer.run(self._core.load), name="tracer"))
        self._log_listening(addresses)
        return addresses

    def _register(self) -> list[str]:
        """Adds the services of the configuration; returns their names."""
        inference_service.register(self._server, self._core)
        names = [inference_service.SERVICE_NAME]
        if self._config.serves_admin:
            admin_handlers.register(self._server, self._core)
            names.append(admin_handlers.SERVICE_NAME)
        if self._config.kserve:
            kserve.register(self._server, self._core)
            names.append(kserve.SERVICE_NAME)
        return names

    async def wait_failed(self) -> None:
        """Returns never; raises what ended a task that should run as long as the process."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise AssertionError("the service's tasks never return")

    async def stop(self, grace_s: float) -> None:
        """Shuts down in order; streams may go on for `grace_s`."""
        await self._core.drain(grace_s)
        await self._server.stop(_STOP_S)
        if self._probe_server is not None:
            await self._probe_server.stop(_STOP_S)
        # What was cut off just now: the engine says how it ended while there is a connection.
        await asyncio.gather(*(model.engine.all_reported() for model in self._core.models))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._core.close()

    async def _start_probe(self, health: HealthServicer) -> None:
        """Answers health checks on the private address, if there is one.

        A server of its own, so that nothing else is open there.
        """
        if self._probe_server is None or self._config.probe is None:
            return
        health_pb2_grpc.add_HealthServicer_to_server(health, self._probe_server)
        listening.bind(self._probe_server, self._config.probe, None)
        await self._probe_server.start()

    def _log_listening(self, addresses: list[str]) -> None:
        config, credentials = self._config, self._credentials
        _log.info(
            "service.listening",
            addresses=addresses,
            tls="off" if credentials.tls is None else "mutual" if config.tls_client_ca is not None else "on",
            keys=None if credentials.keys is None else len(credentials.keys),
            admin=config.serves_admin,
            reflection=config.reflection,
        )
        if config.is_exposed and (credentials.tls is None or credentials.keys is None):
            _log.warning("service.insecure", why="other machines reach this server without TLS, or without keys")

    def _reader_limits(self) -> reader_watch.ReaderLimits:
        config = self._config
        return reader_watch.ReaderLimits(
            config.reader_cap_bytes, int(config.reader_timeout_s * 1e9), int(config.reader_stall_timeout_s * 1e9)
        )


async def run(config: ServiceConfig) -> None:
    """Runs a service until SIGTERM or SIGINT.

    Raises:
        CannotListen: an address is taken.
        CredentialError: a file of keys or certificates cannot be used.
        InvalidModelFolder: the model's folder cannot be served.
    """
    asked_to_stop = _stop_signals()
    service = Service(config)
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


async def _stop_with_grace(service: Service, grace_s: float, asked_to_stop: asyncio.Semaphore) -> None:
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
