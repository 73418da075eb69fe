"""The gate in front of every path: who calls, what a call may cost, and how it ends.

Owns the order of questions: the key (401) and its permissions (403) before a byte of the body is
read, then the body's size and time, then the handler, which is ended when its caller leaves. What a
handler raises becomes one error in OpenAI's form, whether the answer has begun or not. Each call is
reported to telemetry as gRPC's are, by the operation's name in OpenAI's specification.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_service import errors
from headrace_service.auth import audit, caller, permissions
from headrace_service.auth.caller import Caller
from headrace_service.auth.credentials import Credentials
from headrace_service.calls import failures
from headrace_service.calls.call import Call
from headrace_service.config import ServiceConfig
from headrace_service.openai.events import chunks
from headrace_service.openai.http import http_errors
from headrace_service.openai.http.exchange import BodyBudget, Exchange
from headrace_service.tracing import context as trace_context
from headrace_service.tracing.call_trace import CallTrace
from headrace_service.tracing.tracer import Tracer

# Takes the body, the exchange to answer by, and the call.
Handler = Callable[[bytes, Exchange, Call], Awaitable[None]]

# Bodies of the largest size that are read at once.
_BODIES_AT_ONCE = 16
_BODY_TIMEOUT_S = 60.0
_TIMEOUT = "x-request-timeout"
_MAX_TIMEOUT_S = 24 * 3600.0
_OK = "OK"


class Gate:
    """Makes the applications that answer paths.

    Args:
        config: limits.
        credentials: the keys, if there are any.
        tracer: receives a report of each call; None without telemetry.
    """

    def __init__(self, config: ServiceConfig, credentials: Credentials, tracer: Tracer | None) -> None:
        self._keys = credentials.keys
        self._tracer = tracer
        self._budget = BodyBudget(config.max_message_bytes, _BODIES_AT_ONCE * config.max_message_bytes, _BODY_TIMEOUT_S)
        self._refusals = audit.RefusalLog()

    def endpoint(self, operation: str, handler: Handler) -> ASGIApp:
        """Returns the application that answers calls of an operation."""
        method = permissions.OPENAI_PREFIX + operation

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await self._answer(method, handler, Exchange(scope, receive, send))

        return _Application(answer)

    def open_to(self, application: ASGIApp, operation: str) -> ASGIApp:
        """Returns an application that asks for a key, though it is no operation of the API."""
        method = permissions.OPENAI_PREFIX + operation

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            exchange = Exchange(scope, receive, send)
            try:
                self._identified(method, exchange)
            except errors.ServiceError as error:
                await _refuse(exchange, error)
            else:
                await application(scope, receive, send)

        return _Application(answer)

    async def _answer(self, method: str, handler: Handler, exchange: Exchange) -> None:
        arrival_ns = time.monotonic_ns()
        trace = self._trace(method, exchange)
        status = _OK
        try:
            status = await self._run(method, handler, exchange, trace, arrival_ns)
        except asyncio.CancelledError:
            status = "CANCELLED"
            raise
        finally:
            if self._tracer is not None and trace is not None:
                self._tracer.call_ended(trace, status, arrival_ns, system="http")

    def _trace(self, method: str, exchange: Exchange) -> CallTrace | None:
        if self._tracer is None:
            return None
        self._tracer.call_began()
        trace = CallTrace(method, self._tracer.policy, trace_context.of_metadata(exchange.invocation_metadata()))
        if trace.trace_id:
            structlog.contextvars.bind_contextvars(trace_id=trace.trace_id)
            exchange.extra_headers.append((b"x-trace-id", trace.trace_id.encode()))
        return trace

    async def _run(
        self, method: str, handler: Handler, exchange: Exchange, trace: CallTrace | None, arrival_ns: int
    ) -> str:
        """Answers one call; returns the name of the code that it ended with."""
        try:
            who = self._identified(method, exchange)
            exchange.extra_headers += _limit_headers(who)
            call = Call(exchange, arrival_ns, _deadline_ns(exchange, arrival_ns), who, trace)
            with who.open_call():
                body = await exchange.body(self._budget)
                await _until_gone(handler(body, exchange, call), exchange)
        except Exception as error:
            failure = failures.failure_of(exchange, error)
            await _refuse(exchange, failure)
            return failure.code.name
        return _OK

    def _identified(self, method: str, exchange: Exchange) -> Caller:
        """Returns who calls. Raises ServiceError: UNAUTHENTICATED or PERMISSION_DENIED."""
        who = caller.EVERYBODY
        try:
            if self._keys is not None:
                who = self._keys.authenticate(exchange.invocation_metadata())
            who.check_method(method)
        except errors.ServiceError as error:
            self._refusals.write(error.code, who.key_id, errors.echo(method), exchange.peer)
            raise
        return who


class _Application:
    """An ASGI application that is no function, for which the router has a form of its own."""

    def __init__(self, answer: ASGIApp) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


async def _until_gone(answering: Awaitable[None], exchange: Exchange) -> None:
    """Waits for a handler, and ends it when its caller leaves.

    Raises:
        ServiceError: CANCELLED, the caller left; or what the handler raised.
    """
    handling = asyncio.current_task()
    assert handling is not None
    watching = asyncio.create_task(exchange.until_gone())
    watching.add_done_callback(lambda _: handling.cancel() if exchange.gone else None)
    try:
        await answering
    except asyncio.CancelledError:
        if not exchange.gone or handling.uncancel():
            raise
        raise errors.cancelled() from None
    finally:
        watching.cancel()


async def _refuse(exchange: Exchange, error: errors.ServiceError) -> None:
    """Answers an error, as the whole answer or as the last event of a stream."""
    if exchange.gone:
        return
    body = http_errors.body_of(error)
    if not exchange.started:
        await exchange.answer(http_errors.meaning_of(error).status, body, http_errors.headers_of(error))
    elif exchange.is_stream:
        await exchange.end_at_once(chunks.event(body) + chunks.END)


def _deadline_ns(exchange: Exchange, arrival_ns: int) -> int | None:
    """Returns the caller's deadline. Raises ServiceError: INVALID_ARGUMENT; it is no time."""
    text = exchange.header(_TIMEOUT)
    if not text:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise errors.invalid_field(_TIMEOUT, f"must be seconds, above 0 and at most {_MAX_TIMEOUT_S:.0f}")
    return arrival_ns + int(timeout_s * 1e9)


def _limit_headers(who: Caller) -> list[tuple[bytes, bytes]]:
    """Returns the key's limits. What is left of them only the engine knows."""
    limits = who.limits
    named = (
        (b"x-ratelimit-limit-requests", limits.requests_per_minute),
        (b"x-ratelimit-limit-tokens", limits.tokens_per_minute),
    )
    return [(name, str(limit).encode()) for name, limit in named if limit]
