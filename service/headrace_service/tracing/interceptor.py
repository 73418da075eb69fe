"""Every call, from its arrival to its status: the fact that reports it, and its log lines' names.

Owns the outermost interceptor, so that calls refused by the others are reported too.
grpc.health.v1, reflection and ORCA are left alone: probes would drown what is asked for. A method
that is not served is not reported either: its name is the caller's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import structlog

from headrace_service import deadlines
from headrace_service.messages import framed_handlers
from headrace_service.messages.framed_handlers import Behaviour
from headrace_service.tracing import call_trace, context
from headrace_service.tracing.call_trace import CallTrace
from headrace_service.tracing.tracer import Tracer

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context = grpc.aio.ServicerContext[Any, Any]
_UNREPORTED = ("grpc.health.", "grpc.reflection.", "xds.service.orca.")


class TracingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Reports each call.

    Args:
        tracer: to whom.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]], details: grpc.HandlerCallDetails
    ) -> _Handler:
        """Returns the method's handler, which then tells how it ended."""
        method = details.method.removeprefix("/")
        if method.startswith(_UNREPORTED):
            return await continuation(details)
        start_ns = time.monotonic_ns()
        call = CallTrace(method, self._tracer.policy, context.of_metadata(details.invocation_metadata or ()))
        call_trace.set_current(call)
        if call.trace_id:
            structlog.contextvars.bind_contextvars(trace_id=call.trace_id)
        handler = await continuation(details)
        return handler if handler is None else self._reported(handler, call, start_ns)

    def _reported(self, handler: _Handler, call: CallTrace, start_ns: int) -> _Handler:
        tracer = self._tracer

        async def answer(inner: Behaviour, request: Any, context: _Context) -> Any:
            tracer.call_began()
            status = "OK"
            try:
                return await inner(request, context)
            except asyncio.CancelledError:
                status = _status_of_cancelled(context, start_ns)
                raise
            except BaseException:
                status = _status_of_failed(context)
                raise
            finally:
                tracer.call_ended(call, status, start_ns)

        return framed_handlers.framed(handler, answer)


def _status_of_cancelled(context: _Context, start_ns: int) -> str:
    """Returns what the caller of a call that began then has made of it, by giving it up."""
    code = context.code()
    if isinstance(code, grpc.StatusCode) and code is not grpc.StatusCode.OK:
        return code.name
    remaining_s, now_ns = context.time_remaining(), time.monotonic_ns()
    deadline_ns = None if remaining_s is None else now_ns + int(remaining_s * 1e9)
    return "DEADLINE_EXCEEDED" if deadlines.left_for_deadline(start_ns, deadline_ns, now_ns) else "CANCELLED"


def _status_of_failed(context: _Context) -> str:
    """Returns the status that ends a failed call.

    gRPC makes UNKNOWN of an exception that set none, and a caller who left gets none.
    """
    code = context.code()
    if isinstance(code, grpc.StatusCode) and code is not grpc.StatusCode.OK:
        return code.name
    return "CANCELLED" if context.cancelled() else "UNKNOWN"
