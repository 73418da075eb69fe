"""Snapshots as text for Prometheus: the plain format, or OpenMetrics, which has exemplars.

Owns how OpenTelemetry's names become Prometheus's (dots to underscores, the unit as a word at the
end, "_total" of counters) and how points become families; the text itself is prometheus_client's.
OpenTelemetry's own exporter for it would lose exemplars.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Final

from opentelemetry.sdk.metrics.export import (
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    Sum,
)
from opentelemetry.util.types import AttributeValue
from prometheus_client import exposition as plain
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from headrace_telemetry.metrics import picker_names

PLAIN: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_UNIT_WORDS: Final = {"s": "seconds", "By": "bytes"}


def content_type(accept: str) -> str:
    """What a scraper that accepts this is sent.

    OpenMetrics if it names it, else the plain format.
    """
    media_types = (part.partition(";")[0].strip().lower() for part in accept.split(","))
    return OPENMETRICS if "application/openmetrics-text" in media_types else PLAIN


def render(data: MetricsData, content_type: str, vllm_names: bool = False) -> bytes:
    """A snapshot as text of one of the two content types.

    Args:
        data: the snapshot.
        content_type: PLAIN or OPENMETRICS.
        vllm_names: whether the gauges of `picker_names` are shown by vLLM's names as well. In the
            plain format alone, which pickers read: prometheus_client writes OpenMetrics without
            the colon.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(data, vllm_names and content_type == PLAIN))
    text: bytes = (openmetrics if content_type == OPENMETRICS else plain).generate_latest(registry)
    return text


def base_name(name: str, unit: str, kind: str) -> str:
    """A metric's name in Prometheus, without "_total" or "_bucket".

    Args:
        name: OpenTelemetry's.
        unit: in UCUM; those in braces say what is counted and are no part of the name.
        kind: "counter", "gauge" or "histogram"; a gauge without dimension is a ratio.
    """
    base = re.sub(r"[^a-zA-Z0-9_:]", "_", name)
    word = "ratio" if unit == "1" and kind == "gauge" else _UNIT_WORDS.get(unit, "")
    return base if not word or base.endswith(f"_{word}") else f"{base}_{word}"


class _Families(Collector):
    """A snapshot as prometheus_client's families."""

    def __init__(self, data: MetricsData, vllm_names: bool) -> None:
        self._data = data
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Family]:
        for part in self._data.resource_metrics:
            about = {_label(name): str(value) for name, value in part.resource.attributes.items()}
            yield InfoMetricFamily("target", "What tells these metrics.", about)
            for scope in part.scope_metrics:
                yield from map(_family, scope.metrics)
                if self._vllm_names:
                    yield from picker_names.families(scope.metrics)


def _family(metric: Metric) -> Family:
    data = metric.data
    if isinstance(data, Histogram):
        return _histogram(metric, list(data.data_points))
    is_counter = isinstance(data, Sum) and data.is_monotonic
    name, unit = _name_and_unit(metric, "counter" if is_counter else "gauge")
    family = (CounterMetricFamily if is_counter else GaugeMetricFamily)(name, metric.description or "", unit=unit)
    for point in data.data_points:
        assert isinstance(point, NumberDataPoint)
        labels = _labels(point.attributes)
        family.add_sample(f"{name}_total" if is_counter else name, labels, point.value)
    return family


def _histogram(metric: Metric, points: list[HistogramDataPoint]) -> Family:
    name, unit = _name_and_unit(metric, "histogram")
    family = HistogramMetricFamily(name, metric.description or "", unit=unit)
    for point in points:
        labels = _labels(point.attributes)
        exemplars = _exemplars_by_bucket(point)
        bounds = [*map(_bound, point.explicit_bounds), "+Inf"]
        for index, (bound, count) in enumerate(zip(bounds, itertools.accumulate(point.bucket_counts), strict=True)):
            family.add_sample(f"{name}_bucket", {**labels, "le": bound}, count, exemplar=exemplars.get(index))
        family.add_sample(f"{name}_count", labels, point.count)
        family.add_sample(f"{name}_sum", labels, point.sum)
    return family


def _exemplars_by_bucket(point: HistogramDataPoint) -> dict[int, Exemplar]:
    found: dict[int, Exemplar] = {}
    for exemplar in point.exemplars:
        bucket = sum(bound < exemplar.value for bound in point.explicit_bounds)
        ids = {"trace_id": f"{exemplar.trace_id or 0:032x}", "span_id": f"{exemplar.span_id or 0:016x}"}
        found[bucket] = Exemplar(ids, exemplar.value, exemplar.time_unix_nano / 1e9)
    return found


def _name_and_unit(metric: Metric, kind: str) -> tuple[str, str]:
    name = base_name(metric.name, metric.unit or "", kind)
    # OpenMetrics demands that a unit that is reported ends the name.
    return name, next((word for word in ("seconds", "bytes", "ratio") if name.endswith(f"_{word}")), "")


def _labels(attributes: Mapping[str, AttributeValue] | None) -> dict[str, str]:
    return {_label(name): str(value) for name, value in (attributes or {}).items()}


def _label(attribute: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", attribute)


def _bound(bound: float) -> str:
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text
