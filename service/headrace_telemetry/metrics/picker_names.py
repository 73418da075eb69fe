"""vLLM's names of metrics: those by which endpoint pickers choose, and those of speculation.

Llm-d's picker and that of the Gateway API inference extension read the gauges' names of a server
that their configuration does not know; dashboards made for vLLM read the counters'. Owns which of
our metrics they are; the values are the same, but for a counter's being one for all drafters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from opentelemetry.sdk.metrics.export import Gauge, Metric, Sum
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from headrace_telemetry.metrics import catalogue

_NAMES: Final = {
    catalogue.WAITING.name: "vllm:num_requests_waiting",
    catalogue.RUNNING.name: "vllm:num_requests_running",
    catalogue.KV_USAGE.name: "vllm:kv_cache_usage_perc",
    catalogue.DRAFTS_PROPOSED.name: "vllm:spec_decode_num_draft_tokens",
    catalogue.DRAFTS_ACCEPTED.name: "vllm:spec_decode_num_accepted_tokens",
}


def families(metrics: Iterable[Metric]) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    """Yields the metrics that have such a name, with their model as `model_name`."""
    for metric in metrics:
        name = _NAMES.get(metric.name)
        if name is None or not isinstance(metric.data, Gauge | Sum):
            continue
        kind = GaugeMetricFamily if isinstance(metric.data, Gauge) else CounterMetricFamily
        family = kind(name, metric.description or "", labels=["model_name"])
        for model, value in _by_model(metric.data).items():
            family.add_metric([model], value)
        yield family


def _by_model(data: Gauge | Sum) -> dict[str, float]:
    values: dict[str, float] = {}
    for point in data.data_points:
        model = str((point.attributes or {}).get(catalogue.MODEL, ""))
        values[model] = values.get(model, 0.0) + float(point.value)
    return values
