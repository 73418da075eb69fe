"""What a handler may know of its call.

Owns the joining of what three sources say of it: grpc or HTTP (deadline, connection), `auth` (who
calls) and `tracing` (where it stands in its caller's trace).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any, Protocol

import grpc

from headrace_service import errors
from headrace_service.auth import caller
from headrace_service.auth.caller import Caller
from headrace_service.tracing import call_trace
from headrace_service.tracing import context as trace_context
from headrace_service.tracing.call_trace import CallTrace
from headrace_service.tracing.context import CallerContext

Context = grpc.aio.ServicerContext[Any, Any]

_NO_DEADLINE_S = 10 * 365 * 86_400.0


class Connection(Protocol):
    """What carries a call, as far as handlers use it: grpc's context, or an exchange of HTTP."""

    async def write(self, message: bytes, /) -> None:
        """Sends a part of the answer; returns when there is room for the next."""

    def done(self) -> bool:
        """Whether the call has ended, for example because its caller left."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Returns the names, in lower case, and values that came with the call."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What a handler may know of its call.

    Attributes:
        context: what carries the call: grpc's own context on the wires of grpc.
        arrival_ns: CLOCK_MONOTONIC when the call reached this process.
        deadline_ns: CLOCK_MONOTONIC of the caller's deadline; None if it set none.
        caller: who calls, and what it may do.
        trace: where it stands in its caller's trace; None where there is no telemetry.
        own_context: the trace context that one request of it brought; None: that of the call holds.
    """

    context: Connection
    arrival_ns: int
    deadline_ns: int | None
    caller: Caller
    trace: CallTrace | None
    own_context: CallerContext | None = None

    @property
    def tenant(self) -> str:
        """On whose behalf; requests are visible to their tenant only."""
        return self.caller.tenant

    @staticmethod
    def of(context: Context) -> Call:
        """Returns the call behind a grpc context."""
        now_ns = time.monotonic_ns()
        remaining_s = context.time_remaining()
        bounded = remaining_s is not None and remaining_s < _NO_DEADLINE_S
        deadline_ns = now_ns + int(remaining_s * 1e9) if bounded else None
        return Call(context, now_ns, deadline_ns, caller.current(), call_trace.current())

    def of_request(self, arrival_ns: int, traceparent: str, tracestate: str) -> Call:
        """Returns one request of a call that carries many; a malformed context is as none."""
        own_context = trace_context.parse(traceparent, tracestate) if traceparent and self.trace is not None else None
        return dataclasses.replace(self, arrival_ns=arrival_ns, own_context=own_context)

    def check_deadline(self) -> None:
        """Raises DEADLINE_EXCEEDED if the caller waits no more."""
        if self.deadline_ns is not None and time.monotonic_ns() >= self.deadline_ns:
            raise errors.deadline_exceeded("the call's deadline had passed on arrival")
