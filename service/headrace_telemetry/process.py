"""The life of the telemetry process: parts put together, signals, and an end within a bound.

Owns the order: the socket opens last, when all that facts go to is there; at the end those who tell
are heard out for a moment, then what is left goes to the file and, within `telemetry_flush_s`, to
the collector.

    services, backends ──> Hub ──> SpanSink ──> TraceFile, SpanExporter ──> OtlpChannel ──>
    collector
                               └─> Metrics ──> scrape, push ──────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final

import structlog

from headrace_facts import facts
from headrace_facts.version import server_version
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.export.span_exporter import SpanExporter
from headrace_telemetry.export.trace_file import TraceFile
from headrace_telemetry.hub import Hub
from headrace_telemetry.metrics import Metrics
from headrace_telemetry.otlp import otlp_bytes
from headrace_telemetry.otlp.otlp_channel import OtlpChannel
from headrace_telemetry.span_sink import Outlet, SpanSink

# How long those who tell are heard out after the signal.
_HEARING_S: Final = 0.5

_log = structlog.get_logger(process="telemetry")


async def run(config: TelemetryConfig) -> None:
    """Runs until SIGTERM or SIGINT.

    Raises:
        OSError: socket, file or address can't be opened.
        ValueError: a file of headers or certificates has no usable content.
        CannotListen: the address of /metrics is taken.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    counts = ExportCounts()
    scope = otlp_bytes.scope(server_version())
    tasks = _Tasks(stop)
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(_channel(config))
        outlets: list[Outlet] = []
        if config.trace_file is not None:
            file = TraceFile(config.trace_file, int(config.trace_file_limit), scope, counts)
            outlets.append(await stack.enter_async_context(_written(file, tasks)))
        metrics = Metrics(config, counts, channel)
        exporter = None
        if channel is not None:
            queue_bytes = int(config.otlp_queue)
            exporter = SpanExporter(channel, scope, queue_bytes, config.trace_export_delay_s, counts)
            outlets.append(exporter.put)
        await stack.enter_async_context(_exported(metrics, exporter, config.telemetry_flush_s, tasks))
        spans = SpanSink(config, scope, counts, outlets)
        port = await metrics.start()
        hub = Hub(_settings(config), spans, [spans, metrics.sink], counts)
        await _serve(hub, config, stop, port, tasks)
        spans.finish()
    tasks.raise_failure()


class _Tasks:
    """What runs beside the hub.

    One that fails ends the process, which is started again: a part that is dead must not look
    alive.
    """

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._failure: BaseException | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts one part of the process."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def raise_failure(self) -> None:
        """Raises what the first part to fail failed with."""
        if self._failure is not None:
            raise self._failure

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self._stop.set()


async def _serve(hub: Hub, config: TelemetryConfig, stop: asyncio.Event, port: int | None, tasks: _Tasks) -> None:
    """Hears facts until a signal stops it, and a moment longer."""
    server = await hub.listen(config.telemetry_socket)
    ticking = tasks.start(hub.keep_time())
    # Without a way out it only remembers recent traces, which is no news.
    level = logging.INFO if config.otlp_endpoint or port else logging.DEBUG
    _log.log(level, "telemetry is ready", otlp=config.otlp_endpoint or None, metrics_port=port)
    await stop.wait()
    until = time.monotonic() + _HEARING_S
    while not hub.is_idle() and time.monotonic() < until:
        await asyncio.sleep(0.02)
    ticking.cancel()
    server.close()
    hub.close()
    # Connections end in the next turn of the loop, and with them the last facts that were read.
    await asyncio.sleep(0)


def _settings(config: TelemetryConfig) -> facts.TraceSettings:
    detail = facts.Detail[config.trace_detail.upper()]
    return facts.TraceSettings(config.trace_sample_ratio, detail, record_all=config.keeps_at_end)


@contextlib.asynccontextmanager
async def _channel(config: TelemetryConfig) -> AsyncIterator[OtlpChannel | None]:
    """The connection to the collector, if there is one."""
    if config.collector() is None:
        yield None
        return
    channel = OtlpChannel(config)
    try:
        yield channel
    finally:
        await channel.close()


@contextlib.asynccontextmanager
async def _written(file: TraceFile, tasks: _Tasks) -> AsyncIterator[Outlet]:
    """Writes the trace file meanwhile."""
    writing = tasks.start(file.run())
    try:
        yield file.put
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        file.close()


@contextlib.asynccontextmanager
async def _exported(
    metrics: Metrics, exporter: SpanExporter | None, flush_s: float, tasks: _Tasks
) -> AsyncIterator[None]:
    """Sends spans meanwhile, and in the end what is left.

    Metrics and spans leave side by side, so that a collector that hangs holds up the end only once.
    """
    sending = tasks.start(exporter.run()) if exporter is not None else None
    try:
        yield
    finally:
        ends = [metrics.close(flush_s)]
        if exporter is not None and sending is not None:
            ends.append(exporter.flush(sending, flush_s))
        await asyncio.gather(*ends)
