"""Metrics of generations and calls, counted when they end.

Owns what a generation's figures are and which attributes they have. What belongs to an exported
trace becomes an exemplar. Attributes have few values, whatever callers send.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Final, NamedTuple

from opentelemetry.sdk.metrics.export import Metric

from headrace_facts import facts
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.metrics import catalogue
from headrace_telemetry.metrics.aggregates import Aggregates, Counter, Histogram
from headrace_telemetry.outcome import finish_reason

_PROVIDER_NAME: Final = "headrace"
_OTHER: Final = "_OTHER"
# Traces of exported generations that are remembered until their call ends.
_MOST_EXPORTED: Final = 4096
# Methods and models that get a value of their own; what callers name beyond that is "_OTHER".
_MOST_METHODS: Final = 128
_MOST_MODELS: Final = 256
# Kinds of errors told apart.
_MOST_ERRORS: Final = 64
# OpenTelemetry's advice for RPCs, which ends at 10 seconds, and beyond: a call that streams is open
# as long as its answer.
_CALL_BOUNDS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 25.0, 50.0, 100.0)  # fmt: skip


class _Series(NamedTuple):
    """The series that a generation's operation, model and error choose."""

    duration: Histogram
    first_token: Histogram
    engine_first_token: Histogram
    per_token: Histogram
    queue: Histogram
    input: Counter
    cached: Counter
    output: Counter


class RequestMetrics:
    """Histograms and counters of what callers wanted.

    Args:
        config: bounds of the histograms.
    """

    def __init__(self, config: TelemetryConfig) -> None:
        self._aggregates = Aggregates(
            {
                catalogue.REQUEST_DURATION: config.metrics_duration_buckets,
                catalogue.TIME_TO_FIRST_TOKEN: config.metrics_ttft_buckets,
                catalogue.ENGINE_TIME_TO_FIRST_TOKEN: config.metrics_ttft_buckets,
                catalogue.TIME_PER_OUTPUT_TOKEN: config.metrics_tpot_buckets,
                catalogue.QUEUE_DURATION: config.metrics_queue_buckets,
                catalogue.CALL_DURATION: _CALL_BOUNDS,
            }
        )
        self._methods, self._models, self._errors = _Few(_MOST_METHODS), _Few(_MOST_MODELS), _Few(_MOST_ERRORS)
        self._series: dict[tuple[str, str, str], _Series] = {}
        self._requests: dict[tuple[str, str, str], Counter] = {}
        self._exported: collections.OrderedDict[str, None] = collections.OrderedDict()
        self.input_tokens = 0
        self.output_tokens = 0

    def generation(self, generation: facts.Generation, is_exported: bool) -> None:
        """Counts a generation that has ended."""
        exported = self._remembered(generation.span) if is_exported else None
        model = self._models.of(generation.model)
        series = self._series_of(generation.operation, model, self._errors.of(generation.error_type))
        series.duration.observe(_seconds(generation.end_ns - generation.arrival_ns), exported)
        if generation.first_chunk_ns > 0:
            series.first_token.observe(_seconds(generation.first_chunk_ns), exported)
        if generation.ttft_ns > 0:
            series.engine_first_token.observe(_seconds(generation.ttft_ns), exported)
        per_token_s = time_per_output_token_s(generation)
        if per_token_s is not None:
            series.per_token.observe(per_token_s, exported)
        if "queued" in generation.ledger:
            series.queue.observe(_seconds(generation.ledger["queued"]), exported)
        self._ended(model, finish_reason(generation), generation.wire).add(1)
        self._count_tokens(series, generation)

    def call(self, call: facts.CallEnded) -> None:
        """Counts a call that has ended. Its generation, if exported, was reported before."""
        is_exported = call.span is not None and (call.span.sampled or call.span.trace_id in self._exported)
        attributes = {
            catalogue.RPC_SYSTEM: call.system,
            catalogue.RPC_METHOD: self._methods.of(call.method),
            catalogue.RPC_STATUS: call.status,
        }
        calls = self._aggregates.histogram(catalogue.CALL_DURATION, attributes)
        calls.observe(_seconds(call.end_ns - call.start_ns), call.span if is_exported else None)

    def metrics(self, now_unix_ns: int) -> Iterator[Metric]:
        """All metrics of requests with their data points."""
        return self._aggregates.metrics(now_unix_ns)

    def _ended(self, model: str, reason: str, wire: str) -> Counter:
        counter = self._requests.get((model, reason, wire))
        if counter is None:
            attributes = {catalogue.MODEL: model, catalogue.FINISH_REASON: reason, catalogue.WIRE: wire}
            counter = self._requests[model, reason, wire] = self._aggregates.counter(catalogue.REQUESTS, attributes)
        return counter

    def _series_of(self, operation: str, model: str, error: str) -> _Series:
        series = self._series.get((operation, model, error))
        if series is None:
            series = self._series[operation, model, error] = self._new_series(operation, model, error)
        return series

    def _new_series(self, operation: str, model: str, error: str) -> _Series:
        attributes = {catalogue.OPERATION: operation, catalogue.PROVIDER: _PROVIDER_NAME, catalogue.MODEL: model}
        if error:
            attributes[catalogue.ERROR_TYPE] = error
        tokens = [
            self._aggregates.counter(catalogue.TOKENS, {catalogue.MODEL: model, catalogue.TOKEN_KIND: kind})
            for kind in ("input", "cached", "output")
        ]
        return _Series(
            self._aggregates.histogram(catalogue.REQUEST_DURATION, attributes),
            self._aggregates.histogram(catalogue.TIME_TO_FIRST_TOKEN, attributes),
            self._aggregates.histogram(catalogue.ENGINE_TIME_TO_FIRST_TOKEN, attributes),
            self._aggregates.histogram(catalogue.TIME_PER_OUTPUT_TOKEN, attributes),
            self._aggregates.histogram(catalogue.QUEUE_DURATION, {catalogue.MODEL: model}),
            *tokens,
        )

    def _count_tokens(self, series: _Series, generation: facts.Generation) -> None:
        series.input.add(generation.prompt_tokens)
        series.cached.add(generation.cached_tokens)
        series.output.add(generation.output_tokens)
        self.input_tokens += generation.prompt_tokens
        self.output_tokens += generation.output_tokens

    def _remembered(self, span: facts.SpanContext | None) -> facts.SpanContext | None:
        if span is not None:
            self._exported[span.trace_id] = None
            if len(self._exported) > _MOST_EXPORTED:
                self._exported.popitem(last=False)
        return span


def time_per_output_token_s(generation: facts.Generation) -> float | None:
    """Seconds per token after the first, as OpenTelemetry defines it.

    Outputs are computed side by side, so the tokens are those of one.

    None: there was none.
    """
    outputs = max(len(generation.finish_reasons), 1)
    after_first = generation.output_tokens / outputs - 1
    first_ns = generation.first_chunk_ns or generation.ttft_ns
    if after_first <= 0 or first_ns <= 0:
        return None
    return _seconds(generation.end_ns - generation.arrival_ns - first_ns) / after_first


class _Few:
    """Values of an attribute, of which only so many are told apart."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, value: str) -> str:
        if value not in self._known:
            if len(self._known) >= self._most:
                return _OTHER
            self._known.add(value)
        return value


def _seconds(nanoseconds: int) -> float:
    return max(nanoseconds, 0) * 1e-9
