"""What engines' loads come to over the last seconds, as ORCA's report.

Owns the arithmetic: rates from counters, means over a window, and what utilization is. A load
balancer of gRPC weighs a server by its requests per second over its utilization. Both are of the
engines as a whole, whichever service process the requests came by, so that all services of the same
engines get the same weight however their callers are spread. By Little's law that weight is the
rows of the batch over the time that a request spends in the engine: what the engines can do.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Final

from headrace_protos.engine.v1 import engine_pb2
from headrace_protos.orca.orca_load_report_pb2 import OrcaLoadReport

WINDOW_NS: Final = 10_000_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class _Moment:
    """The engines at one time, with what came since the time before."""

    at_ns: int
    arrived: int
    refused: int
    utilization: float


class LoadWindow:
    """The loads of some engines over the last 10 s."""

    def __init__(self) -> None:
        self._moments: collections.deque[_Moment] = collections.deque()
        # Totals of taken and refused requests by engine, as of the moment before.
        self._totals: dict[str, tuple[int, int]] = {}

    def add(self, at_ns: int, loads: Mapping[str, engine_pb2.Load]) -> OrcaLoadReport:
        """Takes what the engines say now, and returns the report of the window that ends with it.

        Args:
            at_ns: CLOCK_MONOTONIC; never goes back.
            loads: by the engines' addresses; at least one.
        """
        arrived = refused = 0
        for engine, load in loads.items():
            # An engine that is new here, or began anew, has counted for others before.
            taken_before, refused_before = self._totals.get(engine, (load.taken_requests, load.refused_requests))
            new_refused = max(load.refused_requests - refused_before, 0)
            arrived += max(load.taken_requests - taken_before, 0) + new_refused
            refused += new_refused
        self._totals = {engine: (load.taken_requests, load.refused_requests) for engine, load in loads.items()}
        rows, kv_cache, waiting = _shares(loads)
        self._moments.append(_Moment(at_ns, arrived, refused, max(rows, kv_cache) + waiting))
        while at_ns - self._moments[0].at_ns > WINDOW_NS:
            self._moments.popleft()
        report = OrcaLoadReport(
            utilization={"batch_rows": min(rows, 1.0), "kv_cache": min(kv_cache, 1.0)},
            named_metrics=_named_metrics(loads),
        )
        self._add_means(report)
        return report

    def _add_means(self, report: OrcaLoadReport) -> None:
        """Fills in what is said of the whole window; rates need two moments."""
        moments = self._moments
        report.application_utilization = sum(moment.utilization for moment in moments) / len(moments)
        span_s = (moments[-1].at_ns - moments[0].at_ns) / 1e9
        if span_s > 0:
            counted = list(moments)[1:]
            report.rps_fractional = sum(moment.arrived for moment in counted) / span_s
            report.eps = sum(moment.refused for moment in counted) / span_s


def _shares(loads: Mapping[str, engine_pb2.Load]) -> tuple[float, float, float]:
    """Returns the shares of rows and KV blocks in use, and waiting requests over rows, of all."""
    max_rows = max(sum(load.max_running_sequences for load in loads.values()), 1)
    rows = sum(load.running_sequences for load in loads.values()) / max_rows
    waiting = sum(load.waiting_requests for load in loads.values()) / max_rows
    return rows, _kv_cache_usage(loads), waiting


def _kv_cache_usage(loads: Mapping[str, engine_pb2.Load]) -> float:
    num_blocks = sum(load.kv_blocks for load in loads.values())
    return sum(load.kv_cache_usage * load.kv_blocks for load in loads.values()) / max(num_blocks, 1)


def _named_metrics(loads: Mapping[str, engine_pb2.Load]) -> dict[str, float]:
    """Returns the engines' figures of this moment, by the names that gateways for models use."""
    return {
        "num_requests_running": sum(load.running_sequences for load in loads.values()),
        "num_requests_waiting": sum(load.waiting_requests for load in loads.values()),
        "num_tokens_waiting": sum(load.waiting_tokens for load in loads.values()),
        "kv_cache_usage_perc": _kv_cache_usage(loads),
        "expected_wait_seconds": max(load.expected_wait_ns for load in loads.values()) / 1e9,
    }
