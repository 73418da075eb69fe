"""What an engine's client deals tokens and events to, by handle."""

from __future__ import annotations

from typing import Protocol

from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.streams.wires import TokenLogprobs


class EngineReader(Protocol):
    """One subscription at an engine. None of its methods waits.

    Attributes:
        handle: names the subscription on the engine's stream.
    """

    handle: int

    @property
    def done(self) -> engine_pb2.RequestDone | None:
        """The request's end; nothing comes after it."""

    def push(self, output_index: int, token: int) -> None:
        """Takes one token of an output."""

    def push_logprobs(self, output_index: int, entry: TokenLogprobs) -> None:
        """Takes the log probabilities of the token pushed last."""

    def note(self, event: engine_pb2.RequestEvent) -> None:
        """Takes one event of the request."""

    def begin_attached(self, attached: engine_pb2.Attached) -> None:
        """Takes the state of a request that runs, or ran, already."""

    def engine_lost(self, failure: errors.ServiceError) -> None:
        """Takes that the engine is lost, and the subscription with it."""
