"""The hub's sink of metrics: facts in, to the room whose figures they are.

Owns the routing, and when steps that were put aside are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics.export import Metric

from headrace_facts import facts
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.metrics.cost import Cost
from headrace_telemetry.metrics.load_metrics import LoadMetrics
from headrace_telemetry.metrics.request_metrics import RequestMetrics
from headrace_telemetry.metrics.step_metrics import StepMetrics

_BACKEND: Final = "backend"


class MetricSink:
    """Makes figures of facts.

    Args:
        config: bounds and prices.
        meter: of the SDK, for what is seldom reported.
        counts: what this process counts of its own work.
        now_ns: a clock that never goes back.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        meter: Meter,
        counts: ExportCounts,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._steps = StepMetrics(config)
        self._now_ns = now_ns
        self._requests = RequestMetrics(config)
        self._load = LoadMetrics(meter, counts)
        self._load.now_ns = now_ns()
        self._cost = Cost(config, meter, lambda: (self._requests.input_tokens, self._requests.output_tokens), now_ns)

    def take(self, source: facts.Hello, fact: facts.Fact) -> None:
        """Any fact but a generation. What says nothing in figures is passed over."""
        match fact:
            case facts.Steps():
                self._steps.take(fact, source.kind == _BACKEND, self._now_ns())
            case facts.CallEnded():
                self._requests.call(fact)
            case facts.EngineLoad():
                self._steps.name(fact.engine, fact.model)
                self._load.engine(source, fact)
            case facts.ServiceLoad():
                self._load.service(source, fact)
            case facts.EngineFacts():
                self._steps.describe(fact)
            case facts.Dropped():
                self._load.dropped(source, fact)
            case facts.LinesLost():
                self._load.lines_lost(source, fact)
            case facts.Hello():
                self._load.joined(source)
            case _:
                pass

    def generation(self, source: facts.Hello, generation: facts.Generation, kept: str | None) -> None:
        """A generation has ended; its trace is exported if it was kept."""
        self._requests.generation(generation, kept is not None)
        if generation.trace is not None:
            self._steps.name(generation.trace.engine, generation.model)

    def gone(self, source: facts.Hello) -> None:
        """Notes that a connection has ended."""
        self._load.gone(source)

    def tick(self, now_unix_ns: int) -> None:
        """Takes the passing of time into the figures that depend on it."""
        self.heed_time()
        self._steps.count_waiting()

    def metrics(self, now_unix_ns: int) -> Iterator[Metric]:
        """Figures of requests and steps, which are no instruments of the meter."""
        yield from self._requests.metrics(now_unix_ns)
        yield from self._steps.metrics(now_unix_ns)

    def heed_time(self) -> None:
        """Lets go of what time has made untrue, before figures are read."""
        self._load.now_ns = self._now_ns()
        self._cost.tick()
