"""The backend at work: server, engine loop, workers and signals from the first second to the last.

Owns how these start and end together. An end: no new requests, the running ones finish within
`drain_grace_s`, streams end UNAVAILABLE, workers end. Does not own the checks before (`main`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Sequence
from typing import Any

import grpc

from headrace_backend.config import BackendConfig
from headrace_backend.server import socket_tls
from headrace_backend.server.engine_loop import EngineLoop
from headrace_backend.server.health import HEARTBEAT_S, Health
from headrace_backend.server.hosts.ranks_service import RanksService
from headrace_backend.server.lifetime import ExitCode, ListenAddress, StartRefused
from headrace_backend.server.logs import get_logger
from headrace_backend.server.model_facts import ModelFacts
from headrace_backend.server.streams.engine_service import EngineService
from headrace_backend.server.streams.statuses import RESTART_RETRY_NS, ended
from headrace_backend.server.telemetry import Teller
from headrace_backend.server.workers.host_ranks import WorkerLaunch
from headrace_backend.server.workers.worker_supervision import (
    EngineStuck,
    ModelRefused,
    WorkersGivenUp,
    WorkerSupervision,
)
from headrace_backend.step.messages import WorkerReady
from headrace_credentials import stranger_limits
from headrace_credentials.server_tls import ServerTls
from headrace_health.probe import CannotProbe, Probe

_BEGIN_TIMEOUT_S = 5.0
_MAX_METADATA_BYTES = 16 << 10
_SERVER_STOP_S = 1.0
_STREAMS_END_S = 2.0
_DRAIN_POLL_S = 0.02


def _make_server(
    config: BackendConfig,
    address: ListenAddress,
    handlers: Sequence[grpc.GenericRpcHandler[Any, Any]],
    tls: ServerTls | None,
) -> grpc.aio.Server:
    """A server that listens. Raises StartRefused if the address is taken."""
    options = [
        # Another listener on the same port must fail, not share its traffic.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        # A service that is stopped or cut off is noticed within ten seconds; without ping_timeout a
        # stopped one is held for a minute.
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        *stranger_limits.server_options(_BEGIN_TIMEOUT_S, _MAX_METADATA_BYTES),
        # Services that connect all at once wait; without this they end CANCELLED before any handler
        # runs.
        ("grpc.server.max_pending_requests", 1_000),
        ("grpc.server.max_pending_requests_hard_limit", 1_000),
    ]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers(tuple(handlers))
    try:
        if tls is None:
            server.add_insecure_port(address.target)
        else:
            server.add_secure_port(address.target, tls.port_credentials())
    except RuntimeError as error:
        raise StartRefused(f"can't listen on {address.target}: the address is in use or not ours") from error
    return server


class Backend:
    """The joined parts, from the first to the last second."""

    def __init__(
        self,
        config: BackendConfig,
        address: ListenAddress,
        tls: ServerTls | None,
        engine_loop: EngineLoop,
        health: Health,
        facts: ModelFacts,
        service: EngineService,
        teller: Teller | None = None,
        hosts: RanksService | None = None,
    ) -> None:
        """Joins what `main` made."""
        # None: all ranks are on this host.
        self._hosts = hosts
        self._config = config
        self._address = address
        self._tls = tls
        self._engine_loop = engine_loop
        self._health = health
        self._facts = facts
        self._service = service
        self._teller = teller
        self._log = get_logger()
        # One count per SIGTERM or SIGINT.
        self._signals: asyncio.Queue[str] = asyncio.Queue()

    async def run(self, launch: WorkerLaunch) -> ExitCode:
        """Serves until a signal or until going on is senseless.

        Raises:
            StartRefused: The address can't be listened on.
            ModelRefused: The workers can't use the model.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signals.put_nowait, number.name)
        handlers = [each.handler() for each in (self._service, self._hosts) if each is not None]
        server = _make_server(self._config, self._address, handlers, self._tls)
        probe = await self._started_probe()
        await server.start()
        # A Unix socket is private to services beside it, whose own addresses are what callers need.
        level = logging.DEBUG if self._address.target.startswith("unix:") else logging.INFO
        self._log.log(level, "listening", address=self._address.target, model=self._facts.describe().name)
        self._engine_loop.start(self._service.deliver, self._service.quotas.notice)
        if self._teller is not None:
            self._teller.start()
        heartbeat = asyncio.ensure_future(self._heartbeat())
        certificates = asyncio.ensure_future(socket_tls.follow(self._tls))
        hosts = None if self._hosts is None else self._hosts.table
        supervision = WorkerSupervision(launch, self._engine_loop, self._health, self._on_ready, hosts)
        workers = asyncio.ensure_future(supervision.run())
        try:
            return await self._until_end(workers)
        finally:
            await self._end_streams()
            await self._end_workers(workers, server)
            heartbeat.cancel()
            certificates.cancel()
            self._engine_loop.stop()
            self._service.close()
            if self._teller is not None:
                await self._teller.stop()
            if probe is not None:
                await probe.stop()
            self._log.info("ended")

    async def _started_probe(self) -> Probe | None:
        """Answers health checks where the configuration says so. Raises StartRefused."""
        if self._config.probe is None:
            return None
        probe = Probe(self._config.probe, lambda service: None if service else self._health.state.serving)
        try:
            await probe.start()
        except CannotProbe as error:
            raise StartRefused(str(error)) from None
        return probe

    def _on_ready(self, ready: WorkerReady) -> None:
        first = self._facts.ready is None
        self._facts.ready = ready
        self._facts.max_context_tokens = self._engine_loop.engine.max_context_tokens
        self._service.send_welcome()
        if self._teller is not None:
            self._teller.ready(ready)
        if first:
            # What start-up made lives as long as the process; no collection needs to look at it
            # again.
            gc.collect()
            gc.freeze()
        model = self._facts.describe()
        self._log.info("ready", model=model.name, revision=model.revision, address=self._address.target)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._service.send_state()
            self._service.quotas.log_disputes()

    async def _until_end(self, workers: asyncio.Future[None]) -> ExitCode:
        """Waits for a signal and drains, or for what makes going on senseless.

        Raises ModelRefused.
        """
        signalled = asyncio.ensure_future(self._signals.get())
        try:
            ends: list[asyncio.Future[Any]] = [signalled, workers, self._engine_loop.failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if signalled.done() and not self._broken(workers):
                self._log.info("draining", signal=signalled.result(), grace_s=self._config.drain_grace_s)
                await self._drain(workers)
        finally:
            signalled.cancel()
        return self._exit_code(workers)

    def _broken(self, workers: asyncio.Future[None]) -> bool:
        return workers.done() or self._engine_loop.failed.done()

    async def _drain(self, workers: asyncio.Future[None]) -> None:
        """Refuses new requests and waits for the running ones.

        It waits for `drain_grace_s`, or until a second signal.
        """
        self._health.drain()
        self._engine_loop.engine.drain()
        self._engine_loop.changed()
        deadline_s = time.monotonic() + self._config.drain_grace_s
        while self._engine_loop.has_work and time.monotonic() < deadline_s:
            if self._broken(workers) or not self._signals.empty():
                return
            await asyncio.sleep(_DRAIN_POLL_S)

    def _exit_code(self, workers: asyncio.Future[None]) -> ExitCode:
        if self._engine_loop.failed.done():
            return ExitCode.FAILED
        error = workers.exception() if workers.done() else None
        if error is None:
            return ExitCode.OK
        if isinstance(error, ModelRefused):
            raise error
        self._log.error(
            "giving up", reason=str(error), exc_info=None if isinstance(error, WorkersGivenUp | EngineStuck) else error
        )
        return ExitCode.WORKERS_LOST if isinstance(error, WorkersGivenUp) else ExitCode.FAILED

    async def _end_workers(self, workers: asyncio.Future[None], server: grpc.aio.Server) -> None:
        """Ends server and workers; with those of other hosts first, whom the server reaches."""
        if self._hosts is None:
            await server.stop(_SERVER_STOP_S)
        workers.cancel()
        await asyncio.wait([workers])
        if self._hosts is not None:
            self._hosts.close()
        await server.stop(_SERVER_STOP_S)

    async def _end_streams(self) -> None:
        """Streams get what is queued, then UNAVAILABLE with the hint to come back."""
        self._engine_loop.flush()
        self._service.end_streams(
            ended(grpc.StatusCode.UNAVAILABLE, "the backend is ending", retry_after_ns=RESTART_RETRY_NS)
        )
        deadline_s = time.monotonic() + _STREAMS_END_S
        while self._service.num_streams and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
