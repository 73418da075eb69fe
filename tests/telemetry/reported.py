"""Passes a story to a SpanSink as the hub would.

What comes out is read with the generated classes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from opentelemetry.proto.trace.v1 import trace_pb2
from tests.telemetry.story import Story

from headrace_facts import facts
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.otlp import otlp_bytes
from headrace_telemetry.span_sink import SpanSink
from headrace_telemetry.spans.generation_spans import SpanBlock

SCOPE = otlp_bytes.scope("0.1")
HEAD_ONLY: dict[str, Any] = {"telemetry_socket": "/nowhere/telemetry.sock", "trace_sample_ratio": 1.0}


class Listener:
    """A sink of spans that parses all of them."""

    def __init__(self, **settings: Any) -> None:
        self.counts = ExportCounts()
        self.blocks: list[tuple[bytes, SpanBlock]] = []
        config = TelemetryConfig(**{**HEAD_ONLY, **settings})
        self.sink = SpanSink(
            config, SCOPE, self.counts, [lambda resource, block: self.blocks.append((resource, block))]
        )

    def hear(self, reported: Iterable[tuple[facts.Hello, facts.Fact]]) -> Listener:
        """Tells facts, and lets the hub's next tick come."""
        for source, fact in reported:
            if isinstance(fact, facts.Generation):
                self.sink.generation(source, fact, self.sink.decide(fact))
            else:
                self.sink.take(source, fact)
        self.sink.tick(time.time_ns())
        return self

    def wait(self, seconds: float) -> Listener:
        """Lets time pass, as the sink sees it."""
        self.sink.tick(time.time_ns() + int(seconds * 1e9))
        return self

    @property
    def spans(self) -> list[trace_pb2.Span]:
        """All spans that came out."""
        return [span for _, block in self.blocks for span in parsed(block)]

    def named(self, name: str) -> list[trace_pb2.Span]:
        """Spans of this name."""
        return [span for span in self.spans if span.name == name]


def heard(story: Story, **settings: Any) -> Listener:
    """A whole story, reported to its end."""
    listener = Listener(**settings).hear(story.reported)
    listener.sink.finish()
    return listener


def parsed(block: SpanBlock) -> list[trace_pb2.Span]:
    """The spans of a block, whose number must be what it says."""
    spans = list(trace_pb2.ScopeSpans.FromString(block.spans).spans)
    assert len(spans) == block.num_spans
    return spans


def attributes(span: trace_pb2.Span) -> dict[str, Any]:
    """Attributes as Python values."""
    return {attribute.key: value_of(attribute.value) for attribute in span.attributes}


def value_of(value: Any) -> Any:
    """One attribute's value."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, kind)
