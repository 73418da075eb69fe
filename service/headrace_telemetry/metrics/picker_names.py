"""vLLM's names of the gauges by which endpoint pickers of gateways choose among model servers.

Llm-d's picker and that of the Gateway API inference extension read these names of a server that
their configuration does not know. Owns which of our gauges they are; the values are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from opentelemetry.sdk.metrics.export import Gauge, Metric
from prometheus_client.core import GaugeMetricFamily

from headrace_telemetry.metrics import catalogue

_NAMES: Final = {
    catalogue.WAITING.name: "vllm:num_requests_waiting",
    catalogue.RUNNING.name: "vllm:num_requests_running",
    catalogue.KV_USAGE.name: "vllm:kv_cache_usage_perc",
}


def families(metrics: Iterable[Metric]) -> Iterator[GaugeMetricFamily]:
    """Yields the gauges that have such a name, with their model as `model_name`."""
    for metric in metrics:
        name = _NAMES.get(metric.name)
        if name is None or not isinstance(metric.data, Gauge):
            continue
        family = GaugeMetricFamily(name, metric.description or "", labels=["model_name"])
        for point in metric.data.data_points:
            model = (point.attributes or {}).get(catalogue.MODEL, "")
            family.add_metric([str(model)], float(point.value))
        yield family
