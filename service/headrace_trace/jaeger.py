"""Traces from a Jaeger query service.

Owns its two HTTP interfaces: /api/v3/traces/{id}, which answers in OTLP JSON, and the older
/api/traces, which every version has and which alone searches by tags. Steps lie in traces of their
own: they are followed by the links of tokens and chunks, and by the ids of steps. An address and a
key come in, spans go out.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from headrace_trace.reading import REQUEST_ID, inference_spans, step_traces
from headrace_trace.spans import Link, Span, TraceError, hex_id, parse, unique

SERVICE_NAME = "headrace"
# Of 256 steps each.
MOST_STEP_TRACES = 256
_SECONDS = 60.0
_SEARCHED_DAYS = 14
_NOT_FOUND = 404


class Jaeger:
    """A Jaeger query service at an address such as http://127.0.0.1:16686."""

    def __init__(self, url: str) -> None:
        """Remembers the address; nothing is asked yet.

        Raises:
            TraceError: It is no http or https address.
        """
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise TraceError(f"--jaeger {url!r:.200}: must begin with http:// or https://")
        self._url = url.rstrip("/")

    def trace(self, trace_id: str) -> list[Span]:
        """Returns the spans of a trace, and of the steps that its requests were in.

        Raises:
            TraceError: Jaeger does not know it, or cannot be asked.
        """
        spans = self._spans(trace_id)
        if not spans:
            raise TraceError(f"{self._url} knows no trace {trace_id}")
        steps = _traces_of_steps(spans) - {trace_id}
        for step_trace in sorted(steps)[:MOST_STEP_TRACES]:
            spans += self._spans(step_trace)
        return unique(spans)

    def trace_id_of(self, request_id: str) -> str:
        """Returns the trace id of a request, by a search for its tag.

        Raises:
            TraceError: Jaeger does not know it, or cannot be asked.
        """
        now = time.time_ns() // 1000
        query = {
            "service": SERVICE_NAME,
            "tags": json.dumps({REQUEST_ID: request_id}),
            "start": now - _SEARCHED_DAYS * 86_400_000_000,
            "end": now,
            "limit": 20,
        }
        answer = self._get("/api/traces?" + urllib.parse.urlencode(query))
        for span in _older_spans(answer or b"{}"):
            if span.attributes.get(REQUEST_ID) == request_id and span in inference_spans([span]):
                return span.trace_id
        raise TraceError(f"{self._url} knows no request {request_id} of the last {_SEARCHED_DAYS} days")

    def _spans(self, trace_id: str) -> list[Span]:
        """The spans of one trace; none if it is not known."""
        answer = self._get("/api/v3/traces/" + trace_id)
        if answer is not None:
            try:
                return parse(answer)
            except TraceError:
                # Before it had this interface Jaeger answered its page to whatever it did not know.
                pass
        older = self._get("/api/traces/" + trace_id)
        return [] if older is None else list(_older_spans(older))

    def _get(self, path: str) -> bytes | None:
        """The answer; None if there is no such thing.

        Raises:
            TraceError: There is no answer, or another failure.
        """
        try:
            with urllib.request.urlopen(self._url + path, timeout=_SECONDS) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            if error.code == _NOT_FOUND:
                return None
            raise TraceError(f"{self._url} answers {error.code} {error.reason}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise TraceError(f"{self._url} cannot be asked: {getattr(reason, 'strerror', None) or reason}") from None


def _traces_of_steps(spans: Sequence[Span]) -> set[str]:
    """Traces in which the steps of these requests lie."""
    requests = inference_spans(spans)
    derived = {trace_id for span in requests for trace_id in step_traces(span)}
    return derived | {link.trace_id for span in spans if "headrace.step.id" in span.attributes for link in span.links}


def _older_spans(answer: bytes) -> Iterator[Span]:
    """The spans of an answer of /api/traces, whose times are in whole microseconds.

    Raises:
        TraceError: It is none.
    """
    try:
        for trace in json.loads(answer).get("data") or ():
            yield from map(_older_span, trace["spans"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TraceError("the answer is not Jaeger's") from None


def _older_span(span: dict[str, Any]) -> Span:
    start_ns = int(span["startTime"]) * 1000
    references = span.get("references") or ()
    parents = [reference["spanID"] for reference in references if reference["refType"] == "CHILD_OF"]
    tags = {tag["key"]: _older_value(tag) for tag in span.get("tags") or ()}
    return Span(
        # Leading zeros may be missing.
        trace_id=hex_id(span["traceID"].zfill(32), 32),
        span_id=hex_id(span["spanID"].zfill(16), 16),
        parent_id=hex_id(parents[0].zfill(16), 16) if parents else "",
        name=str(span["operationName"]),
        start_ns=start_ns,
        end_ns=start_ns + int(span["duration"]) * 1000,
        attributes=tags,
        links=tuple(
            Link(hex_id(reference["traceID"].zfill(32), 32), hex_id(reference["spanID"].zfill(16), 16))
            for reference in references
            if reference["refType"] == "FOLLOWS_FROM"
        ),
        failed=bool(tags.get("error")),
    )


def _older_value(tag: dict[str, Any]) -> Any:
    """A tag's value; 64-bit integers may come as strings."""
    return int(tag["value"]) if tag.get("type") == "int64" else tag["value"]
