"""The sources of a trace: files, a server's memory of recent traces, or Jaeger.

Owns the reading of what the command line names. What spans mean is reading.py's. Sources come in, a
Trace goes out, or a TraceError of one line.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

from headrace.admin import AdminClient
from headrace.errors import NotFound, Unimplemented
from headrace_trace.jaeger import Jaeger
from headrace_trace.reading import read_trace
from headrace_trace.spans import Span, TraceError, parse, parse_protobuf, unique
from headrace_trace.trace_model import Trace

_SECONDS = 60.0
_TRACE_ID = re.compile(r"[0-9a-fA-F]{32}")


def is_trace_id(key: str) -> bool:
    """Whether a key has the form of a W3C trace id; other keys are request ids."""
    return _TRACE_ID.fullmatch(key) is not None


def from_files(paths: Sequence[pathlib.Path], request_id: str | None, trace_id: str | None) -> Trace:
    """A trace out of files, whose spans are put together.

    Raises:
        TraceError: A file cannot be read, or there is no such trace in them.
    """
    named = ", ".join(map(str, paths))
    spans: list[Span] = []
    for path in paths:
        try:
            spans += parse(path.read_bytes())
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror or error}") from None
        except TraceError as error:
            raise type(error)(f"{path} {error}") from None
    return _read(unique(spans), named, request_id, trace_id)


def from_server(client: AdminClient, server: str, key: str, request_id: str | None) -> Trace:
    """A trace that a running server remembers.

    Raises:
        TraceError: The server does not have it.
        HeadraceError: The call failed otherwise.
    """
    by_trace = is_trace_id(key)
    try:
        if by_trace:
            data = client.get_trace(trace_id=key.lower(), timeout=_SECONDS)
        else:
            data = client.get_trace(request_id=key, timeout=_SECONDS)
    except NotFound:
        kind = "trace" if by_trace else "request"
        raise TraceError(
            f"{server} remembers no {kind} {key}: it is unknown, was not traced, or is forgotten"
        ) from None
    except Unimplemented:
        raise TraceError(
            f"{server} does not serve AdminService: ask Jaeger (--jaeger URL), or read the server's trace file"
        ) from None
    wanted = request_id if by_trace else key
    return _read(parse_protobuf(data), f"the answer of {server}", wanted, key.lower() if by_trace else None)


def from_jaeger(url: str, key: str, request_id: str | None) -> Trace:
    """Returns a trace that Jaeger has.

    Raises:
        TraceError: It does not have it, or cannot be asked.
    """
    jaeger = Jaeger(url)
    if is_trace_id(key):
        return _read(jaeger.trace(key.lower()), url, request_id, key.lower())
    trace_id = jaeger.trace_id_of(key)
    return _read(jaeger.trace(trace_id), url, key, trace_id)


def _read(spans: Sequence[Span], named: str, request_id: str | None, trace_id: str | None) -> Trace:
    try:
        return read_trace(spans, request_id=request_id, trace_id=trace_id)
    except TraceError as error:
        raise type(error)(f"{named} {error}") from None
