"""The parts of metrics put together.

For the process's main, which knows no other name of this room.
"""

from __future__ import annotations

import os
import socket
import uuid

from opentelemetry.sdk.metrics.export import MetricsData

from headrace_facts.version import server_version
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.metrics import exposition
from headrace_telemetry.metrics.push import MetricPush
from headrace_telemetry.metrics.scrape import CannotListen, ScrapeServer
from headrace_telemetry.metrics.sink import MetricSink
from headrace_telemetry.metrics.snapshot import Snapshots
from headrace_telemetry.otlp.otlp_channel import OtlpChannel

__all__ = ["CannotListen", "Metrics"]


class Metrics:
    """All metrics of a telemetry process.

    Args:
        config: bounds, prices, addresses.
        counts: what this process counts of its own work; what becomes of pushed metrics is added to
            it.
        channel: to the collector; None: there is none.
    """

    def __init__(self, config: TelemetryConfig, counts: ExportCounts, channel: OtlpChannel | None = None) -> None:
        self._config = config
        self._snapshots = Snapshots(_resource(config))
        self.sink = MetricSink(config, self._snapshots.meter(), counts)
        self._scrape = ScrapeServer(self.render)
        self._push = MetricPush(channel, self.snapshot, config.export_interval_s, counts) if channel else None

    async def start(self) -> int | None:
        """Begins to serve and to send, as configured.

        Returns the port of /metrics, if it is served. Raises CannotListen.
        """
        port = await self._scrape.start(self._config.metrics_listen) if self._config.metrics_listen else None
        if self._push is not None:
            self._push.start()
        return port

    async def close(self, timeout_s: float) -> None:
        """Ends serving, and sends a last snapshot within this many seconds."""
        await self._scrape.close()
        if self._push is not None:
            await self._push.close(timeout_s)
        self._snapshots.close()

    def snapshot(self) -> MetricsData:
        """Returns all figures as they stand."""
        self.sink.heed_time()
        return self._snapshots.take(self.sink.metrics)

    def render(self, content_type: str) -> bytes:
        """All figures as text of one of `exposition`'s content types."""
        return exposition.render(self.snapshot(), content_type, self._config.metrics_vllm_names)


def _resource(config: TelemetryConfig) -> dict[str, str | int]:
    """Who tells the figures: this process, for all."""
    attributes: dict[str, str | int] = {
        "service.name": "headrace",
        "service.version": server_version(),
        "service.instance.id": uuid.uuid4().hex,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "headrace.process.kind": "telemetry",
    }
    if config.service_namespace:
        attributes["service.namespace"] = config.service_namespace
    return {**config.resource_attributes(), **attributes}
