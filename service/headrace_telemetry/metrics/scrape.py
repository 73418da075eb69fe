"""The scrape endpoint: /metrics for Prometheus and /healthz, HTTP/1.1 on one address.

Owns as much of HTTP as that needs, inside the event loop, and what a client may cost: a bounded
head, in bounded time, on a bounded number of connections, one answer each; figures are rendered at
most ten times a second however many ask. There is no authentication: who reaches the port reads the
figures, so it is off unless it is configured.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from headrace_health.address import host_and_port, joined
from headrace_telemetry.metrics import exposition

_MOST_CONNECTIONS: Final = 32
_MOST_HEAD_BYTES: Final = 8192
_HEAD_TIMEOUT_S: Final = 5.0
_ANSWER_TIMEOUT_S: Final = 10.0
# How old a rendered answer may be that is given again.
_FRESH_S: Final = 0.1
_TEXT: Final = "text/plain; charset=utf-8"

_log = structlog.get_logger(process="telemetry")


class CannotListen(Exception):  # what its text names is the caller's to change
    """The address of metrics_listen can't be used."""


class _Answer(NamedTuple):
    status: http.HTTPStatus
    content_type: str
    body: bytes


class ScrapeServer:
    """Serves what `render` makes.

    Args:
        render: the figures as text of a content type of `exposition`.
    """

    def __init__(self, render: Callable[[str], bytes]) -> None:
        self._render = render
        self._rendered: dict[str, tuple[float, bytes]] = {}
        self._num_connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, address: str) -> int:
        """Listens on HOST:PORT; returns the port, which the system chose if it was 0.

        Raises CannotListen.
        """
        host, port = host_and_port(address)
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=_MOST_HEAD_BYTES)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise CannotListen(f"metrics_listen: {address}: {reason}") from None
        bound: int = self._server.sockets[0].getsockname()[1]
        _log.info("metrics are served", address=joined(host, bound), path="/metrics")
        return bound

    async def close(self) -> None:
        """Stops listening and ends open connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._num_connections += 1
        try:
            if self._num_connections <= _MOST_CONNECTIONS:
                await self._serve(reader, writer)
        except (OSError, TimeoutError):
            pass  # its client's business
        finally:
            self._num_connections -= 1
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                head = None
            except asyncio.IncompleteReadError:
                return
        answer = self._answer(head)
        is_head = head is not None and head.startswith(b"HEAD ")
        writer.write(_message(answer, with_body=not is_head))
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            await writer.drain()
            writer.close()
            # Only then has the client's side taken everything.
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _answer(self, head: bytes | None) -> _Answer:
        if head is None:
            return _refusal(http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        request, *headers = head.decode("latin-1").split("\r\n")
        words = request.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _refusal(http.HTTPStatus.BAD_REQUEST)
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return _refusal(http.HTTPStatus.METHOD_NOT_ALLOWED)
        match target.partition("?")[0]:
            case "/metrics":
                content_type = exposition.content_type(_header(headers, "accept"))
                return _Answer(http.HTTPStatus.OK, content_type, self._figures(content_type))
            case "/healthz":
                return _Answer(http.HTTPStatus.OK, _TEXT, b"ok\n")
            case _:
                return _refusal(http.HTTPStatus.NOT_FOUND)

    def _figures(self, content_type: str) -> bytes:
        made_at_s, figures = self._rendered.get(content_type, (float("-inf"), b""))
        if time.monotonic() - made_at_s > _FRESH_S:
            figures = self._render(content_type)
            self._rendered[content_type] = time.monotonic(), figures
        return figures


def _header(headers: list[str], wanted: str) -> str:
    """The values of a header, joined."""
    pairs = (line.partition(":") for line in headers)
    return ",".join(value.strip() for name, _, value in pairs if name.strip().lower() == wanted)


def _refusal(status: http.HTTPStatus) -> _Answer:
    return _Answer(status, _TEXT, f"{status.phrase}\n".encode())


def _message(answer: _Answer, with_body: bool) -> bytes:
    allow = "Allow: GET, HEAD\r\n" if answer.status == http.HTTPStatus.METHOD_NOT_ALLOWED else ""
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        f"{allow}"
        "X-Content-Type-Options: nosniff\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + (answer.body if with_body else b"")
