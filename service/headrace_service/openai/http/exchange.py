"""One request and its answer, as ASGI carries them.

Owns the reading of a body within bounds, the form of whole and streamed answers, and the watch for
a caller who leaves. It is the `Connection` of a call. Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from headrace_service import errors
from headrace_service.openai.http.bounded_protocol import ABORT
from headrace_service.openai.http.http_errors import CompressedBody

Headers = Sequence[tuple[bytes, bytes]]
_JSON = (b"content-type", b"application/json")
_CLOSE = (b"connection", b"close")
# No proxy on the way may keep events back, or answer them to somebody else.
_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
# What an answer that nobody asked for waits: the last words of a stream, the rest of a body.
_PATIENCE_S = 1.0


class BodyBudget:
    """Memory for bodies that are being read, of all requests of a process.

    Args:
        max_body_bytes: largest body.
        max_bytes: all bodies together.
        timeout_s: how long a body may take to arrive.
    """

    def __init__(self, max_body_bytes: int, max_bytes: int, timeout_s: float) -> None:
        self.max_body_bytes = max_body_bytes
        self.timeout_s = timeout_s
        self._left = max_bytes

    def take(self, num_bytes: int) -> None:
        """Takes memory. Raises ServiceError: UNAVAILABLE; there is none left."""
        if num_bytes > self._left:
            raise errors.unavailable("too many request bodies are being read; try again")
        self._left -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Returns memory that was taken."""
        self._left += num_bytes


class Exchange:
    """One request and its answer.

    Args:
        scope: ASGI's description of the request.
        receive: brings the body, then the caller's leaving.
        send: takes the answer.

    Attributes:
        extra_headers: headers that the answer gets besides its own; to be filled before it begins.
        started: whether the answer has begun.
        is_stream: whether the answer is a stream of events.
        gone: whether the caller left before the answer's end.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._metadata = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        self._body_is_read = False
        self._ended = False
        self.extra_headers: list[tuple[bytes, bytes]] = []
        self.started = False
        self.is_stream = False
        self.gone = False

    # -- what came

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """Returns the headers, names in lower case."""
        return self._metadata

    def header(self, name: str) -> str:
        """Returns the value of a header; "" if it did not come."""
        return next((value for key, value in self._metadata if key == name), "")

    @property
    def path_parameters(self) -> dict[str, Any]:
        """The parts of the path that the route names."""
        parameters: dict[str, Any] = self._scope.get("path_params", {})
        return parameters

    @property
    def peer(self) -> str:
        """The address that calls, for logs."""
        client = self._scope.get("client")
        return f"{client[0]}:{client[1]}" if client else "unix"

    async def body(self, budget: BodyBudget) -> bytes:
        """Returns the request's body.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED, it is too large; UNAVAILABLE, there is no memory for
                it; DEADLINE_EXCEEDED, it does not arrive; CANCELLED, its caller left;
                `CompressedBody`.
        """
        coding = self.header("content-encoding").strip().lower()
        if coding not in ("", "identity"):
            raise CompressedBody(coding)
        announced = self.header("content-length")
        if announced.isdecimal():
            _check_body_size(int(announced), budget.max_body_bytes)
        taken = 0
        try:
            async with asyncio.timeout(budget.timeout_s):
                parts: list[bytes] = []
                while not self._body_is_read:
                    part = await self._next_part()
                    budget.take(len(part))
                    taken += len(part)
                    _check_body_size(taken, budget.max_body_bytes)
                    parts.append(part)
            return b"".join(parts)
        except TimeoutError:
            raise errors.deadline_exceeded(f"the request's body did not arrive within {budget.timeout_s:g} s") from None
        finally:
            budget.give_back(taken)

    async def until_gone(self) -> None:
        """Returns when the caller has left; to be awaited once the body is read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # The end of the answer is reported in the same way.
        self.gone = not self._ended

    def done(self) -> bool:
        """Whether the caller left."""
        return self.gone

    # -- what is answered

    async def answer(self, status: int, body: bytes, headers: Headers = ()) -> None:
        """Sends a whole answer."""
        if not self._body_is_read:
            await self._discard_body()
        length = (b"content-length", str(len(body)).encode())
        own = [_JSON, length, *headers, *self.extra_headers, *(() if self._body_is_read else (_CLOSE,))]
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": own})
        self._ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def begin_stream(self) -> None:
        """Begins an answer of server-sent events."""
        self.started = self.is_stream = True
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_STREAM, *self.extra_headers]})

    async def write(self, message: bytes, /) -> None:
        """Sends events of a stream; returns when there is room for the next."""
        await self._send({"type": "http.response.body", "body": message, "more_body": True})

    async def end_stream(self, message: bytes) -> None:
        """Sends the last events of a stream."""
        self._ended = True
        await self._send({"type": "http.response.body", "body": message})

    async def end_at_once(self, message: bytes) -> None:
        """Ends a stream whose reader may take nothing: what is not taken soon is dropped."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self.end_stream(message)
        except TimeoutError:
            self._scope["extensions"][ABORT][""]()

    # -- inside

    async def _next_part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
            raise errors.cancelled()
        self._body_is_read = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    async def _discard_body(self) -> None:
        """Reads a little of a body that nobody wants, so that its caller can read the answer."""
        with contextlib.suppress(TimeoutError, errors.ServiceError):
            async with asyncio.timeout(_PATIENCE_S):
                while not self._body_is_read:
                    await self._next_part()


def _check_body_size(num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise errors.exhausted(f"the request's body has more than {limit} bytes, the most this server takes")
