"""Who tells: the OpenTelemetry Resource of each process that spans come from, serialized.

Owns what a Resource says and keeps those that were made, as the same few processes tell everything.
"""

from __future__ import annotations

import socket
from typing import Final

from headrace_facts import facts
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.otlp import otlp_bytes
from headrace_telemetry.spans.engine_book import EngineBook

_MOST_KEPT: Final = 256


class Resources:
    """Serialized Resources by process."""

    def __init__(self, config: TelemetryConfig) -> None:
        namespace = {"service.namespace": config.service_namespace} if config.service_namespace else {}
        self._shared: dict[str, otlp_bytes.AttributeValue] = {
            "service.name": "headrace",
            **namespace,
            **config.resource_attributes(),
        }
        self._known: dict[str, bytes] = {}

    def of(self, source: facts.Hello) -> bytes:
        """Returns the Resource of the process that reported."""
        known = self._known.get(source.instance)
        if known is None:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            known = self._known[source.instance] = otlp_bytes.resource(self._describe(source))
        return known

    def of_engine(self, book: EngineBook) -> bytes:
        """Returns the Resource of an engine.

        Its backend's, or, if only services speak of it, what they know.
        """
        if book.source is not None:
            book.resource = self.of(book.source)
        return book.resource or otlp_bytes.resource(
            {**self._shared, "service.instance.id": book.engine, "headrace.process.kind": "backend"}
        )

    def _describe(self, source: facts.Hello) -> dict[str, otlp_bytes.AttributeValue]:
        return {
            **self._shared,
            "host.name": socket.gethostname(),
            **source.attributes,
            "service.version": source.version,
            "service.instance.id": source.instance,
            "process.pid": source.pid,
            "headrace.process.kind": source.kind,
            "headrace.process.name": source.name,
        }
