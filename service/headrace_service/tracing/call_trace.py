"""One call on its way: where it stands in the caller's trace, and the spans that are made for it.

Owns the decision which generations of a call become whose children. A call that carries one
generation is its parent. One that carries many (a session, a KServe stream) is too if it brought a
context; if not, each generation decides for itself and begins a trace of its own, since a gateway's
session may live for weeks; the call then links to those that are recorded.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable
from typing import Final

from headrace_facts.facts import Detail, SpanContext
from headrace_service.tracing import context
from headrace_service.tracing.context import CallerContext, RootSampler

MAX_LINKS: Final = 128
_SHARED: Final = frozenset({"headrace.v1.InferenceService/Session", "inference.GRPCInferenceService/ModelStreamInfer"})
_WIRES: Final = {
    "headrace.v1.InferenceService/Generate": "generate",
    "headrace.v1.InferenceService/Chat": "chat",
    "headrace.v1.InferenceService/Complete": "complete",
    "headrace.v1.InferenceService/Submit": "submit",
    "headrace.v1.InferenceService/Session": "session",
    "inference.GRPCInferenceService/ModelInfer": "kserve",
    "inference.GRPCInferenceService/ModelStreamInfer": "kserve",
    "openai.v1/CreateChatCompletion": "openai",
    "openai.v1/CreateCompletion": "openai",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What the telemetry process asks for.

    Attributes:
        sampler: decides on traces that begin here.
        record_all: whether all is recorded, because any of it may be kept at its end.
        detail: of generations that do not say so themselves.
        sample_ratio: the sampler's.
    """

    sampler: RootSampler
    record_all: bool
    detail: Detail
    sample_ratio: float

    def root(self) -> SpanContext | None:
        """Returns the root of a new trace; None if nobody wants it."""
        return self.sampler.root(self.record_all)

    def under(self, parent: CallerContext) -> SpanContext | None:
        """Returns a span under a caller's; None if nobody wants it."""
        return context.child_of(parent) if parent.sampled or self.record_all else None


class CallTrace:
    """One call.

    Args:
        method: "package.Service/Method".
        policy: as it is now.
        parent: the caller's span; None if the call brought none.

    Attributes:
        method: as above.
        span: the server span; None: nobody records it.
        links: inference spans that the call reads and is not the parent of.
        request_id: of the request that it is about; "" for calls about many, or none.
    """

    __slots__ = ("_num_unreported", "_parent", "_when_reported", "links", "method", "request_id", "span")

    def __init__(self, method: str, policy: Policy, parent: CallerContext | None) -> None:
        self.method = method
        self.request_id = ""
        self.span = policy.root() if parent is None else policy.under(parent)
        self.links: list[SpanContext] = []
        self._parent = parent
        # Generations of its own that are reported later, and what then is to be done.
        self._num_unreported = 0
        self._when_reported: Callable[[], None] | None = None

    @property
    def wire(self) -> str:
        """What generations of this call say that they came by."""
        return _WIRES.get(self.method, "")

    @property
    def trace_id(self) -> str:
        """The trace that logs name: the caller's, or the one that begins here.

        "" if there is none.
        """
        if self._parent is not None:
            return self._parent.trace_id
        return self.span.trace_id if self.span is not None else ""

    def generation_span(self, policy: Policy, own: CallerContext | None) -> SpanContext | None:
        """Returns the inference span of a new generation; None if nobody records it.

        Args:
            policy: as it is now.
            own: the context that the request itself brought, if it did.
        """
        if own is not None:
            span = policy.under(own)
        elif self._parent is None and self.method in _SHARED:
            span = policy.root()
        else:
            return context.child_of_span(self.span) if self.span is not None else None
        if span is not None:
            self.link(span)
        return span

    def link(self, span: SpanContext) -> None:
        """Notes that the call reads a generation of another trace."""
        if self.span is not None and len(self.links) < MAX_LINKS and span not in self.links:
            self.links.append(span)

    def generation_kept(self) -> None:
        """Notes a generation that will be reported only when the engine has said how it ended."""
        self._num_unreported += 1

    def generation_reported(self) -> None:
        """Notes that such a generation was reported, or never will be from here."""
        self._num_unreported -= 1
        if self._num_unreported == 0 and self._when_reported is not None:
            self._when_reported()

    def when_reported(self, then: Callable[[], None]) -> None:
        """Has something done once all its generations are reported: at once, mostly."""
        if self._num_unreported:
            self._when_reported = then
        else:
            then()

    def about(self, request_id: str) -> None:
        """Notes which request the call is about; of calls that carry many, none."""
        if self.method not in _SHARED:
            self.request_id = request_id


_current: contextvars.ContextVar[CallTrace | None] = contextvars.ContextVar("headrace_call_trace", default=None)


def set_current(call: CallTrace) -> None:
    """Sets the trace of the call that this task serves."""
    _current.set(call)


def current() -> CallTrace | None:
    """Returns the trace of the call that this task, or the one that started it, serves.

    None where there is no telemetry.
    """
    return _current.get()
