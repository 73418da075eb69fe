"""One HTTP connection, with bounds on what a peer may cost before and between requests.

Owns the bounds that uvicorn does not have: how many connections there are, how long a request's
head may take and how large it may be, and how long a peer may leave an answer untaken. What a body
may cost is `exchange`'s, since a body is read only for a caller who is known.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

ABORT = "headrace.abort"
_HEAD = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
_BODY = b'{"error":{"message":"%b","type":"invalid_request_error","param":null,"code":null}}'


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one peer, and all together, may cost.

    Attributes:
        max_connections: connections open at once.
        max_head_bytes: request line and headers of one request.
        head_timeout_s: how long a connection may be open, or a request have begun, without a whole
            head.
        write_timeout_s: how long an answer may wait for its reader.
    """

    max_connections: int
    max_head_bytes: int
    head_timeout_s: float
    write_timeout_s: float


class BoundedProtocol(HttpToolsProtocol):
    """A connection of uvicorn's that is closed when it breaks a bound.

    Each request's scope has the extension `ABORT`: a function that ends the connection at once.
    """

    def __init__(
        self, limits: ConnectionLimits, config: Config, server_state: ServerState, app_state: dict[str, Any]
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._limits = limits
        # Whether a request has begun whose head is not whole, and what came of it.
        self._is_in_head = False
        self._num_head_bytes = 0
        # The request that is being answered; uvicorn knows the newest, which may wait behind it.
        self._answered: RequestResponseCycle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for the first request, or closes one connection too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the timers, and tells the request that is being answered."""
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        self._head_timer = _stopped(self._head_timer)
        self._write_timer = _stopped(self._write_timer)
        # uvicorn's own timer outlives a connection that was lost with an error.
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts what comes before a request's head is whole.

        That may be the head of a next request, while one is being answered.
        """
        is_of_head = self._is_in_head or self._is_between_requests
        if self._head_timer is None and self._is_between_requests:
            self._await_head()
        if is_of_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > self._limits.max_head_bytes:
            self._refuse_head()

    def on_message_begin(self) -> None:
        """Gives the request's scope the means to end the connection."""
        super().on_message_begin()
        self._is_in_head = True
        self.scope["extensions"] = {ABORT: {"": self.transport.abort}}

    def on_headers_complete(self) -> None:
        """Starts the request; a head that came whole, but is too large, is refused."""
        self._head_timer = _stopped(self._head_timer)
        self._is_in_head = False
        self._num_head_bytes = 0
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > self._limits.max_head_bytes:
            self._refuse_head()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Takes a part of a body, unless its request was refused."""
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Notes the end of a body, unless its request was refused."""
        if not self.transport.is_closing():
            super().on_message_complete()

    def pause_writing(self) -> None:
        """Gives the reader so long to take what waits for it."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Notes that the reader takes something."""
        self._write_timer = _stopped(self._write_timer)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no HTTP."""
        self._refuse(b"400 Bad Request", msg)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self.transport.close)

    def _refuse_head(self) -> None:
        if not self._is_between_requests:
            self.transport.abort()
            return
        rule = f"the request's path and headers must have at most {self._limits.max_head_bytes} bytes together"
        self._refuse(b"431 Request Header Fields Too Large", rule)

    def _refuse(self, status: bytes, rule: str) -> None:
        """Answers in the form of all errors, before any application is asked, and closes."""
        body = _BODY % rule.encode()
        self.transport.write(_HEAD % (status, len(body)) + body)
        self.transport.close()


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Stops a timer that runs. Returns None, which stands for it from then on."""
    if timer is not None:
        timer.cancel()
    return None
