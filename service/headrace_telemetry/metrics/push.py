"""Metrics to the collector over OTLP/gRPC, every interval.

Owns when a snapshot is sent and what a failure costs: a count, and one line of log per outage.
Nothing is queued and nothing tried again: figures are cumulative, the next snapshot says what this
one would have.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

import structlog
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.sdk.metrics.export import MetricsData

from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.metrics.snapshot import with_new_exemplars
from headrace_telemetry.otlp.otlp_channel import METRICS, ExportFailed, OtlpChannel

_SIGNAL: Final = "metrics"

_log = structlog.get_logger(process="telemetry")


class MetricPush:
    """Sends snapshots of all metrics to a collector.

    Args:
        channel: to the collector.
        snapshot: makes one.
        interval_s: seconds between two.
        counts: what was exported and what failed.
    """

    def __init__(
        self, channel: OtlpChannel, snapshot: Callable[[], MetricsData], interval_s: float, counts: ExportCounts
    ) -> None:
        self._channel, self._snapshot, self._interval_s, self._counts = channel, snapshot, interval_s, counts
        self._is_out = False
        self._sent_until_unix_ns = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts to send."""
        self._task = asyncio.get_running_loop().create_task(self._keep_sending())

    async def close(self, timeout_s: float) -> None:
        """Sends a last time, within this many seconds, if it was started."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if timeout_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.send(timeout_s)

    async def send(self, timeout_s: float | None = None) -> bool:
        """Sends one snapshot; returns whether the collector took it."""
        taken_at_unix_ns = time.time_ns()
        data = with_new_exemplars(self._snapshot(), self._sent_until_unix_ns)
        points = _num_points(data)
        try:
            reply = await self._channel.export(METRICS, encode_metrics(data).SerializeToString(), timeout_s)
        except ExportFailed as failure:
            self._failed(failure, points)
            return False
        rejected = _num_rejected(reply, points)
        self._counts.add(self._counts.exported, _SIGNAL, points - rejected)
        self._counts.add(self._counts.dropped, _SIGNAL, rejected)
        self._sent_until_unix_ns = taken_at_unix_ns
        if self._is_out:
            self._is_out = False
            _log.info("the collector takes metrics again")
        return True

    def _failed(self, failure: ExportFailed, points: int) -> None:
        self._counts.add(self._counts.failures, _SIGNAL, 1)
        self._counts.add(self._counts.dropped, _SIGNAL, points)
        if not self._is_out:
            self._is_out = True
            _log.warning("the collector does not take metrics", code=failure.code, said=failure.said)

    async def _keep_sending(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.send()


def _num_rejected(reply: bytes, points: int) -> int:
    """How many points the collector says it did not take; none where what it says is no answer."""
    try:
        rejected = ExportMetricsServiceResponse.FromString(reply).partial_success.rejected_data_points
    except DecodeError:
        return 0
    return min(max(rejected, 0), points)


def _num_points(data: MetricsData) -> int:
    return sum(
        len(metric.data.data_points)
        for part in data.resource_metrics
        for scope in part.scope_metrics
        for metric in scope.metrics
    )
