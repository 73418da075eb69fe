"""What it takes to turn a request's token ids into its events, beyond the ids.

Travels to the engine as the opaque `service_state` of a request and comes back on attach, so that
any service process can render any request. Readers of another version must understand it: fields
may be added with defaults, never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from headrace_facts.facts import SpanContext
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.output_forms.output_plan import OutputPlan

# The engine takes twice as much. Tools have at most 128 KiB, and JSON writes a byte as 6 at most.
_MAX_BYTES = 1 << 19
FORM_OF_TOOLS: Final[Mapping[str, str]] = {"spec.structured_output.grammar": "tools", "spec.structured_output": "tools"}
"""What a caller calls a form that was made of tools, by the field that an engine names."""


class RenderState(msgspec.Struct, frozen=True):
    """How one request's outputs become text.

    Attributes:
        skip_special: whether special tokens are left out of the text.
        with_logprobs: whether tokens come with log probabilities.
        stop_strings: to name the one that matched.
        ids_only: whether tokens are reported by their ids alone.
        span: the inference span, for readers' spans to link to; None: nobody records it.
        plan: what outputs are made of besides text; None: they are text alone.
        has_form_of_tools: whether the form of outputs was made of the conversation's tools.
    """

    skip_special: bool
    with_logprobs: bool
    stop_strings: tuple[str, ...] = ()
    ids_only: bool = False
    span: SpanContext | None = None
    plan: OutputPlan | None = None
    has_form_of_tools: bool = False

    def encode(self) -> bytes:
        """Returns the state as bytes."""
        data = msgspec.json.encode(self)
        assert len(data) <= _MAX_BYTES
        return data

    def named(self, end: engine_pb2.OutputEnd) -> engine_pb2.OutputEnd:
        """Returns an output's end whose error names what the caller sent."""
        if not self.has_form_of_tools or not end.HasField("error"):
            return end
        error = errors.renamed(errors.from_status(end.error), FORM_OF_TOOLS)
        renamed = engine_pb2.OutputEnd()
        renamed.CopyFrom(end)
        renamed.error.CopyFrom(errors.to_status(error))
        return renamed

    @staticmethod
    def decode(data: bytes) -> RenderState:
        """Returns the state that `encode` wrote, perhaps in another process."""
        return msgspec.json.decode(data, type=RenderState)
