"""Metrics: facts of all processes become one set of figures, for whoever scrapes or collects.

    facts ─> MetricSink ─┬─ request_metrics ─┬─> aggregates: what happens often ─┐
                         ├─ step_metrics ────┘                                   ├─> Snapshots
                         ├─ load_metrics ────┬─> instruments of OpenTelemetry's ─┘ (MetricsData)
                         └─ cost ────────────┘   SDK

    Snapshots ─┬─> exposition ─> scrape (/metrics)
               └─> push (OTLP/gRPC)

`catalogue` names every metric, its unit and what it says. No metric holds a prompt, an output, a
key, a tenant or a request's id; an exemplar holds the ids of an exported trace.
"""

from headrace_telemetry.metrics.assembly import CannotListen, Metrics

__all__ = ["CannotListen", "Metrics"]
