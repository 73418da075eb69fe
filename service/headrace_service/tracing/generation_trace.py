"""What is known of one generation from its start on, for the fact that is reported at its end.

Owns the decision whether it is recorded, and what the engine is asked to note of it. Made for every
generation while there is a feed; its span only where somebody may want it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headrace_facts.facts import Detail, SpanContext
from headrace_protos.engine.v1 import engine_pb2
from headrace_service.errors import ServiceError
from headrace_service.tracing import context
from headrace_service.tracing.call_trace import CallTrace
from headrace_service.tracing.recording import Recording


@dataclasses.dataclass(slots=True)
class GenerationTrace:
    """One generation.

    Attributes:
        model: its name.
        model_revision: the folder's.
        operation: "chat" or "text_completion".
        wire: how it came: "generate", "session" ...
        parameters: what the caller asked for, by their names in gen_ai.request.
        num_outputs: how many outputs it has.
        prompt_tokens: length of its prompt.
        span: its inference span; None: nobody records it.
        detail: how much of its tokens is traced.
        call: brought it; its end is reported after this one's.
        accepted: whether the engine has taken it.
        failure: what ended it for its caller, if that was no end of its own.
    """

    model: str
    model_revision: str
    operation: str
    wire: str
    parameters: Mapping[str, int | float]
    num_outputs: int
    prompt_tokens: int
    span: SpanContext | None
    detail: Detail
    call: CallTrace | None = None
    accepted: bool = False
    failure: ServiceError | None = None

    def recording(self) -> Recording | None:
        """Returns the columns for the messages of this generation.

        None if its tokens are not traced.
        """
        return Recording() if self.span is not None and self.detail is not Detail.OFF else None

    def ask(self, add: engine_pb2.AddRequest) -> None:
        """Has the engine note what it does for this generation, if it is recorded.

        Of others it learns what they are, for the fact in which it reports detached ones.
        """
        recording = add.recording
        recording.operation, recording.wire, recording.detail = self.operation, self.wire, self.detail
        if self.span is not None:
            add.traceparent = context.traceparent_of(self.span)
            recording.parent_span_id, recording.tracestate = self.span.parent_span_id, self.span.tracestate
