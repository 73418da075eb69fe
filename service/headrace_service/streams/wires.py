"""What a stream's events become on the wire: one method per kind of event.

Owns the seam between `GenerationStream`, which knows what happened and in which order, and the
protocols that tell it to a caller: headrace.v1 (`event_wire`, stateless), sessions and KServe (an
object per generation). A stream calls these in the order of `GenerationEvent`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from headrace.v1 import generation_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service.output_forms.parts import Part
from headrace_service.tracing.recording import Recording


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one token (natural logarithm)."""

    sampled: float
    rank: int
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]


class EventWire(Protocol):
    """The form of one protocol's events.

    Each method returns the message that reports its event, or None where the protocol says nothing
    of it, or not yet.
    """

    def record(self, recording: Recording) -> bool:
        """Takes the columns of a recorded generation, before its first event.

        Returns whether the wire notes deltas itself, because its messages carry many generations.
        """

    def accepted(self, request_id: str, model_revision: str, prompt_tokens: int) -> bytes | None:
        """The request is valid and queued."""

    def started(self, cached_tokens: int) -> bytes | None:
        """The engine computed a first step for the request."""

    def prompt_logprobs(self, first_token_index: int, columns: engine_pb2.LogprobColumns) -> bytes | None:
        """Log probabilities of a run of the prompt's tokens, each given those before it.

        Runs come in order and without gaps, from position 1 on, before the first delta. In columns
        as the engine sent them, since nothing else of a stream comes by the thousand.
        """

    def resumed(self, pause_ns: int) -> bytes | None:
        """A worker was replaced; nothing was computed for `pause_ns` nanoseconds."""

    def delta(
        self,
        output_index: int,
        first_token_index: int,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        parts: Sequence[Part] | None = None,
    ) -> bytes | None:
        """New tokens of one output, and their text.

        Args:
            output_index: which of the n outputs.
            first_token_index: position of the first token in its output.
            token_ids: at least one; none where parts end with the output, behind its last token.
            text: the text of these tokens; may be empty.
            logprobs: one per token, or None if not asked for.
            parts: what these tokens are of an output that has parts, and then there is no text;
                None: outputs of this generation are text alone.
        """

    def output_finished(
        self, end: engine_pb2.OutputEnd, stop_strings: Sequence[str], calls_tools: bool = False
    ) -> bytes | None:
        """One output ended.

        Args:
            end: how.
            stop_strings: the request's, to name the one that matched.
            calls_tools: whether the output called functions.
        """

    def done(
        self, engine_done: engine_pb2.RequestDone, ledger: generation_pb2.Ledger, reasoning_tokens: int = 0
    ) -> bytes | None:
        """All outputs ended, with so many tokens of reasoning; the last event."""
