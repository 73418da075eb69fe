"""All figures at one moment, in the SDK's own form, for scrapers and collectors alike.

Owns the SDK's provider and its one reader, the bounds of histograms (views), and exemplars between snapshots: the SDK hands each out once, but every scraper wants to see it, so the last of
each bucket is kept here.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import Exemplar, MeterProvider, TraceBasedExemplarFilter
from opentelemetry.sdk.metrics.export import (
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    Metric,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.metrics import catalogue

_SCOPE: Final = "headrace"
# OpenTelemetry's advice for RPCs.
_CALL_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)

# A metric's name, attributes of a point, index of a bucket.
_Bucket = tuple[str, tuple[tuple[str, object], ...], int]


class Snapshots:
    """Makes snapshots of everything that was measured.

    Args:
        config: bounds of histograms.
        resource: attributes of the process that tells them.
    """

    def __init__(self, config: TelemetryConfig, resource: Mapping[str, str | int]) -> None:
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider(
            metric_readers=[self._reader],
            resource=Resource(dict(resource)),
            exemplar_filter=TraceBasedExemplarFilter(),
            shutdown_on_exit=False,
            views=list(_views(config)),
        )
        self._exemplars: dict[_Bucket, Exemplar] = {}
        self.resource = Resource(dict(resource))

    def meter(self) -> Meter:
        """What instruments are made with."""
        return self._provider.get_meter(_SCOPE)

    def take(self, others: Callable[[int], Iterator[Metric]]) -> MetricsData:
        """All metrics as they stand: the instruments', and `others(now_unix_ns)`."""
        measured = self._reader.get_metrics_data()
        scopes = [scope for part in measured.resource_metrics for scope in part.scope_metrics] if measured else []
        metrics = [self._with_exemplars(metric) for scope in scopes for metric in scope.metrics]
        metrics += others(time.time_ns())
        scope = ScopeMetrics(InstrumentationScope(_SCOPE), metrics, schema_url="")
        return MetricsData([ResourceMetrics(self.resource, [scope], schema_url="")])

    def close(self) -> None:
        """Ends the SDK's provider."""
        self._provider.shutdown()

    def _with_exemplars(self, metric: Metric) -> Metric:
        if not isinstance(metric.data, Histogram):
            return metric
        points = [self._with_kept(metric.name, point) for point in metric.data.data_points]
        return dataclasses.replace(metric, data=dataclasses.replace(metric.data, data_points=points))

    def _with_kept(self, name: str, point: HistogramDataPoint) -> HistogramDataPoint:
        attributes = tuple(sorted((point.attributes or {}).items()))
        for exemplar in point.exemplars:
            bucket = bisect.bisect_left(point.explicit_bounds, exemplar.value)
            self._exemplars[name, attributes, bucket] = exemplar
        buckets = range(len(point.bucket_counts))
        kept = [self._exemplars.get((name, attributes, bucket)) for bucket in buckets]
        return dataclasses.replace(point, exemplars=[exemplar for exemplar in kept if exemplar is not None])


def with_new_exemplars(data: MetricsData, after_unix_ns: int) -> MetricsData:
    """The same snapshot with exemplars only that were measured after a moment."""

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


def _views(config: TelemetryConfig) -> Iterator[View]:
    for metric, bounds in (
        (catalogue.REQUEST_DURATION, config.metrics_duration_buckets),
        (catalogue.TIME_TO_FIRST_TOKEN, config.metrics_ttft_buckets),
        (catalogue.TIME_PER_OUTPUT_TOKEN, config.metrics_tpot_buckets),
        (catalogue.QUEUE_DURATION, config.metrics_queue_buckets),
        (catalogue.CALL_DURATION, _CALL_BOUNDS),
    ):
        yield View(instrument_name=metric.name, aggregation=ExplicitBucketHistogramAggregation(bounds))
