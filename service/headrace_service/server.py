"""One service process: its gRPC server, its connection to the backend, and how both begin and end.

Owns channel options, ports, the order of start and of shutdown. On SIGTERM health turns NOT_SERVING first, new generations are refused UNAVAILABLE,
open streams go on for the grace time, what is left ends UNAVAILABLE, and the process exits with 0; a second signal cuts the grace time short.
"""

from __future__ import annotations

import asyncio
import signal

import grpc
import structlog
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace_service import inference_service, reader_watch
from headrace_service.config import ServiceConfig
from headrace_service.health import HealthServicer
from headrace_service.service_core import ServiceCore

_STOP_S = 1.0
_MAX_METADATA_BYTES = 8 << 10
_HEALTH_NAME = "grpc.health.v1.Health"
_log = structlog.get_logger("headrace.service")


class CannotListen(Exception):
    """An address is taken or not ours; the text names it."""


def channel_options(config: ServiceConfig) -> list[tuple[str, int]]:
    """Returns the server's options; each corrects a default that was measured to harm (unbounded messages, a shared port, late pings)."""
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.so_reuseport", int(config.reuse_port)),
        ("grpc.max_concurrent_streams", config.max_connection_streams),
        # Calls beyond these end CANCELLED before any handler sees them; admission is ours.
        ("grpc.server.max_pending_requests", 20_000),
        ("grpc.server.max_pending_requests_hard_limit", 40_000),
        ("grpc.keepalive_time_ms", int(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(config.keepalive_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(config.keepalive_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.server_handshake_timeout_ms", 10_000),
        # One limit instead of a range in which requests are refused at random.
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
    ]


class Service:
    """A service process, once started."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._core = ServiceCore(config)
        self._server = grpc.aio.server(options=channel_options(config))
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def core(self) -> ServiceCore:
        """What the handlers share."""
        return self._core

    async def start(self) -> list[str]:
        """Listens and begins to connect to the backend.

        Returns:
            The addresses with the ports that were given.

        Raises:
            CannotListen: an address is taken.
        """
        inference_service.register(self._server, self._core)
        names = [inference_service.SERVICE_NAME]
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(lambda: self._core.serving, names), self._server)
        if self._config.reflection:
            reflection.enable_server_reflection([*names, _HEALTH_NAME, reflection.SERVICE_NAME], self._server)
        addresses = [_bind(self._server, address) for address in self._config.listen]
        await self._server.start()
        self._tasks = [
            *(asyncio.create_task(model.connection.run(), name="engine-connection") for model in self._core.models),
            asyncio.create_task(
                reader_watch.watch(lambda: self._core.delivering, self._reader_limits()), name="reader-watch"
            ),
        ]
        _log.info("service.listening", addresses=addresses)
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
        await self._server.stop(_STOP_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._core.close()

    def _reader_limits(self) -> reader_watch.ReaderLimits:
        config = self._config
        return reader_watch.ReaderLimits(
            config.reader_cap_bytes, int(config.reader_timeout_s * 1e9), int(config.reader_stall_timeout_s * 1e9)
        )


async def run(config: ServiceConfig) -> None:
    """Runs a service until SIGTERM or SIGINT.

    Raises:
        CannotListen: an address is taken.
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


def _bind(server: grpc.aio.Server, address: str) -> str:
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if port == 0:
        raise CannotListen(f"cannot listen on {address}: the address is taken or not this machine's")
    if address.startswith("unix:"):
        return address
    return f"{address.rpartition(':')[0]}:{port}"
