"""Histograms and counters of what happens often: a token's step, a generation, a call.

Owns counts, sums, extremes and exemplars; hands them out as data points of OpenTelemetry's SDK, so
that whoever exports sees no difference. The SDK's own instruments are not used here: one
measurement costs them 7 us (measured), which at thousands of generations a second, eight
measurements each, would be a third of telemetry's core. A bucket keeps its last exemplar, for every
scraper and as long as the process lives.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData

from headrace_facts import facts
from headrace_telemetry.metrics import catalogue

_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE


class _Mark(NamedTuple):
    """A measurement whose trace is exported."""

    value: float
    at_unix_ns: int
    span: facts.SpanContext


class Histogram:
    """Cumulative counts of values by explicit bounds, each the inclusive end of its bucket.

    Args:
        bounds: strictly increasing.
        attributes: of the series.
        start_unix_ns: when counting began.
    """

    def __init__(self, bounds: Sequence[float], attributes: Mapping[str, str], start_unix_ns: int) -> None:
        self._bounds = tuple(float(bound) for bound in bounds)
        self._attributes = dict(attributes)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._smallest, self._largest = float("inf"), float("-inf")
        self._start_unix_ns = start_unix_ns
        self._marks: dict[int, _Mark] = {}

    def observe(self, value: float, exported: facts.SpanContext | None = None) -> None:
        """Counts one value. `exported`: the span that it belongs to, if its trace is exported."""
        # A bound belongs to the bucket below it, as in OpenTelemetry and Prometheus.
        bucket = bisect.bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._sum += value
        if value < self._smallest:
            self._smallest = value
        if value > self._largest:
            self._largest = value
        if exported is not None:
            self._marks[bucket] = _Mark(value, time.time_ns(), exported)

    def observe_all(self, values: npt.NDArray[np.number]) -> None:
        """Counts `values` [num_values]."""
        if not len(values):
            return
        for bucket, count in enumerate(np.bincount(np.searchsorted(self._bounds, values, side="left")).tolist()):
            self._counts[bucket] += count
        self._sum += float(values.sum())
        self._smallest = min(self._smallest, float(values.min()))
        self._largest = max(self._largest, float(values.max()))

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return self._largest < self._smallest

    def point(self, now_unix_ns: int) -> HistogramDataPoint:
        """Returns the data point as it stands."""
        return HistogramDataPoint(
            attributes=self._attributes,
            start_time_unix_nano=self._start_unix_ns,
            time_unix_nano=now_unix_ns,
            count=sum(self._counts),
            sum=self._sum,
            bucket_counts=tuple(self._counts),
            explicit_bounds=self._bounds,
            min=self._smallest,
            max=self._largest,
            exemplars=[_exemplar(mark) for _, mark in sorted(self._marks.items())],
        )


class Counter:
    """A count that only grows.

    Args:
        attributes: of the series.
        start_unix_ns: when counting began.
    """

    def __init__(self, attributes: Mapping[str, str], start_unix_ns: int) -> None:
        self._attributes = dict(attributes)
        self._start_unix_ns = start_unix_ns
        self._count = 0

    def add(self, count: int) -> None:
        """Counts `count` more."""
        assert count >= 0
        self._count += count

    def point(self, now_unix_ns: int) -> NumberDataPoint:
        """Returns the data point as it stands."""
        return NumberDataPoint(self._attributes, self._start_unix_ns, now_unix_ns, self._count, [])


class Aggregates:
    """The series of some metrics, each made when it is first wanted.

    Args:
        bounds: of the histograms.
    """

    def __init__(self, bounds: Mapping[catalogue.Metric, Sequence[float]]) -> None:
        self._bounds = dict(bounds)
        self._start_unix_ns = time.time_ns()
        self._histograms: dict[catalogue.Metric, dict[tuple[str, ...], Histogram]] = {}
        self._counters: dict[catalogue.Metric, dict[tuple[str, ...], Counter]] = {}

    def histogram(self, metric: catalogue.Metric, attributes: Mapping[str, str]) -> Histogram:
        """Returns the series of a histogram with these attributes."""
        series, key = self._histograms.setdefault(metric, {}), _key(attributes)
        found = series.get(key)
        if found is None:
            found = series[key] = Histogram(self._bounds[metric], attributes, self._start_unix_ns)
        return found

    def counter(self, metric: catalogue.Metric, attributes: Mapping[str, str]) -> Counter:
        """Returns the series of a counter with these attributes."""
        series, key = self._counters.setdefault(metric, {}), _key(attributes)
        found = series.get(key)
        if found is None:
            found = series[key] = Counter(attributes, self._start_unix_ns)
        return found

    def metrics(self, now_unix_ns: int) -> Iterator[Metric]:
        """All metrics that have a series, with their data points.

        A histogram of nothing has no extremes and is not reported.
        """
        for metric, histograms in self._histograms.items():
            points = [histogram.point(now_unix_ns) for histogram in histograms.values() if not histogram.is_empty()]
            if points:
                yield _named(metric, HistogramData(points, _CUMULATIVE))
        for metric, counters in self._counters.items():
            numbers = [counter.point(now_unix_ns) for counter in counters.values()]
            yield _named(metric, Sum(numbers, _CUMULATIVE, is_monotonic=True))


def _named(metric: catalogue.Metric, data: HistogramData | Sum) -> Metric:
    return Metric(metric.name, metric.description, metric.unit, data)


def _key(attributes: Mapping[str, str]) -> tuple[str, ...]:
    return (*attributes.keys(), *attributes.values())


def _exemplar(mark: _Mark) -> Exemplar:
    return Exemplar({}, mark.value, mark.at_unix_ns, int(mark.span.span_id, 16), int(mark.span.trace_id, 16))
