"""Metrics of generations and calls, counted when they end.

Owns what a generation's figures are and which attributes they have. An exported generation's trace hangs on its measurements as the current span would, so that the SDK's filter takes it
for an exemplar. Attributes have few values, whatever callers send.
"""

from __future__ import annotations

import collections
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import Counter, Histogram, Meter

from headrace_facts import facts
from headrace_telemetry.metrics import catalogue

_PROVIDER_NAME: Final = "headrace"
_OTHER: Final = "_OTHER"
# Contexts of exported generations that are remembered until their call ends.
_MOST_EXPORTED: Final = 4096
# Methods and models that get a value of their own; what callers name beyond that is "_OTHER".
_MOST_METHODS: Final = 128
_MOST_MODELS: Final = 256
# The gravest of several outputs' ends stands for the request.
_GRAVITY: Final = ("error", "deadline", "cancelled", "length", "stop")
_NOWHERE: Final = Context()


class RequestMetrics:
    """Histograms and counters of what callers wanted."""

    def __init__(self, meter: Meter) -> None:
        self._duration = _histogram(meter, catalogue.REQUEST_DURATION)
        self._first_token = _histogram(meter, catalogue.TIME_TO_FIRST_TOKEN)
        self._per_token = _histogram(meter, catalogue.TIME_PER_OUTPUT_TOKEN)
        self._calls = _histogram(meter, catalogue.CALL_DURATION)
        self._queue = _histogram(meter, catalogue.QUEUE_DURATION)
        self._requests = _counter(meter, catalogue.REQUESTS)
        self._tokens = _counter(meter, catalogue.TOKENS)
        self._methods, self._models = _Few(_MOST_METHODS), _Few(_MOST_MODELS)
        self._exported: collections.OrderedDict[str, None] = collections.OrderedDict()
        self.input_tokens = 0
        self.output_tokens = 0

    def generation(self, generation: facts.Generation, is_exported: bool) -> None:
        """Counts a generation that has ended."""
        context = self._context(generation.span) if is_exported else _NOWHERE
        model = self._models.of(generation.model)
        attributes = {
            catalogue.OPERATION: generation.operation,
            catalogue.PROVIDER: _PROVIDER_NAME,
            catalogue.MODEL: model,
        }
        if generation.error_type:
            attributes[catalogue.ERROR_TYPE] = generation.error_type
        self._duration.record(_seconds(generation.end_ns - generation.arrival_ns), attributes, context)
        if generation.ttft_ns > 0:
            self._first_token.record(_seconds(generation.ttft_ns), attributes, context)
        per_token_s = time_per_output_token_s(generation)
        if per_token_s is not None:
            self._per_token.record(per_token_s, attributes, context)
        if "queued" in generation.ledger:
            self._queue.record(_seconds(generation.ledger["queued"]), {catalogue.MODEL: model}, context)
        self._count(generation, model)

    def call(self, call: facts.CallEnded) -> None:
        """Counts a call that has ended. Its generation, if exported, was told before."""
        is_exported = call.span is not None and (call.span.sampled or call.span.trace_id in self._exported)
        attributes = {
            catalogue.RPC_SYSTEM: "grpc",
            catalogue.RPC_METHOD: self._methods.of(call.method),
            catalogue.RPC_STATUS: call.status,
        }
        context = _span_context(call.span) if is_exported else _NOWHERE
        self._calls.record(_seconds(call.end_ns - call.start_ns), attributes, context)

    def _count(self, generation: facts.Generation, model: str) -> None:
        reason = {
            catalogue.MODEL: model,
            catalogue.FINISH_REASON: finish_reason(generation),
            catalogue.WIRE: generation.wire,
        }
        self._requests.add(1, reason, _NOWHERE)
        for kind, tokens in (
            ("input", generation.prompt_tokens),
            ("cached", generation.cached_tokens),
            ("output", generation.output_tokens),
        ):
            self._tokens.add(tokens, {catalogue.MODEL: model, catalogue.TOKEN_KIND: kind}, _NOWHERE)
        self.input_tokens += generation.prompt_tokens
        self.output_tokens += generation.output_tokens

    def _context(self, span: facts.SpanContext | None) -> Context:
        if span is not None:
            self._exported[span.trace_id] = None
            if len(self._exported) > _MOST_EXPORTED:
                self._exported.popitem(last=False)
        return _span_context(span)


def time_per_output_token_s(generation: facts.Generation) -> float | None:
    """Seconds per token after the first, as OpenTelemetry defines it; outputs are computed side by side, so the tokens are those of one. None: there was none."""
    outputs = max(len(generation.finish_reasons), 1)
    after_first = generation.output_tokens / outputs - 1
    if after_first <= 0 or generation.ttft_ns <= 0:
        return None
    return _seconds(generation.end_ns - generation.arrival_ns - generation.ttft_ns) / after_first


def finish_reason(generation: facts.Generation) -> str:
    """The gravest reason for which an output of it ended."""
    if generation.error_type:
        return "error"
    return next((reason for reason in _GRAVITY if reason in generation.finish_reasons), _OTHER)


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


def _span_context(span: facts.SpanContext | None) -> Context:
    if span is None:
        return _NOWHERE
    ids = trace.SpanContext(
        int(span.trace_id, 16), int(span.span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(0x01)
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(ids), _NOWHERE)


def _seconds(nanoseconds: int) -> float:
    return max(nanoseconds, 0) * 1e-9


def _histogram(meter: Meter, metric: catalogue.Metric) -> Histogram:
    return meter.create_histogram(metric.name, metric.unit, metric.description)


def _counter(meter: Meter, metric: catalogue.Metric) -> Counter:
    return meter.create_counter(metric.name, metric.unit, metric.description)
