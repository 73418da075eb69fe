"""All figures at one moment, in OpenTelemetry's own form, for scrapers and collectors alike.

Owns the SDK's provider and its one reader, and the resource: who reports the figures. What
a collector gets once, exemplars, is cut to what is new.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import (
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    Metric,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from headrace_facts.version import server_version
from headrace_telemetry.otlp.otlp_bytes import SCHEMA_URL

_SCOPE: Final = "headrace"


class Snapshots:
    """Makes snapshots of everything that was measured.

    Args:
        resource: attributes of the process that tells them.
    """

    def __init__(self, resource: Mapping[str, str | int]) -> None:
        self._resource = Resource(dict(resource), SCHEMA_URL)
        self._scope = InstrumentationScope(_SCOPE, server_version(), SCHEMA_URL)
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider(
            metric_readers=[self._reader],
            resource=self._resource,
            exemplar_filter=AlwaysOffExemplarFilter(),
            shutdown_on_exit=False,
        )

    def meter(self) -> Meter:
        """What the SDK's instruments are made with."""
        return self._provider.get_meter(_SCOPE)

    def take(self, others: Callable[[int], Iterable[Metric]]) -> MetricsData:
        """All metrics as they stand: the instruments', and `others(now_unix_ns)`."""
        measured = self._reader.get_metrics_data()
        scopes = [scope for part in measured.resource_metrics for scope in part.scope_metrics] if measured else []
        metrics = [metric for scope in scopes for metric in scope.metrics]
        metrics += others(time.time_ns())
        scope = ScopeMetrics(self._scope, metrics, schema_url=SCHEMA_URL)
        return MetricsData([ResourceMetrics(self._resource, [scope], schema_url=SCHEMA_URL)])

    def close(self) -> None:
        """Ends the SDK's provider."""
        self._provider.shutdown()


def with_new_exemplars(data: MetricsData, after_unix_ns: int) -> MetricsData:
    """Returns the snapshot with only those exemplars that were measured after a moment."""

    def newer(point: HistogramDataPoint) -> HistogramDataPoint:
        exemplars = [exemplar for exemplar in point.exemplars if exemplar.time_unix_nano > after_unix_ns]
        return dataclasses.replace(point, exemplars=exemplars)

    def replaced(metric: Metric) -> Metric:
        if not isinstance(metric.data, Histogram):
            return metric
        points = [newer(point) for point in metric.data.data_points]
        return dataclasses.replace(metric, data=dataclasses.replace(metric.data, data_points=points))

    return MetricsData(
        [
            dataclasses.replace(
                part,
                scope_metrics=[
                    dataclasses.replace(scope, metrics=[replaced(metric) for metric in scope.metrics])
                    for scope in part.scope_metrics
                ],
            )
            for part in data.resource_metrics
        ]
    )
