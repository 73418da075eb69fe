"""A reader's way from a lost engine's log to the log of the engine that went on.

Owns the comparison: what the reader has already is compared and dropped, what it lacks goes to its
stream, so that it gets each token once. The other engine may have less than the reader had, because
the guardian had heard less; it computes that again, and it must be the same. Where it is not, the
reader can't go on, and its stream fails instead of mixing two answers.
"""

from __future__ import annotations

import time
from collections import deque

import grpc

from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.streams.engine_columns import LogprobReader, token_ids_of
from headrace_service.streams.engine_reader import EngineReader
from headrace_service.streams.generation_stream import GenerationStream
from headrace_service.streams.wires import TokenLogprobs


class CatchingUp:
    """Stands in for a stream among an engine's readers until it is level with the engine's log.

    Args:
        stream: the reader's, with what came from the engine that was lost.
        readers: the table in which the stream takes its place again.
        lost_ns: when the engine was lost, CLOCK_MONOTONIC.

    Attributes:
        handle: the stream's.
    """

    def __init__(self, stream: GenerationStream, readers: dict[int, EngineReader], lost_ns: int) -> None:
        self.handle = stream.handle
        self._stream = stream
        self._readers = readers
        self._lost_ns = lost_ns
        # Of each output, what the reader has and the engine has not sent yet.
        self._expected: dict[int, deque[int]] = {}
        self._resumed = False
        # Whether the reader had the token that was pushed last.
        self._had_last = False

    @property
    def done(self) -> engine_pb2.RequestDone | None:
        """The request's end."""
        return self._stream.done

    def begin_attached(self, attached: engine_pb2.Attached) -> None:
        """Takes the engine's log so far."""
        for log in attached.outputs:
            self._expected[log.output_index] = deque(self._stream.known(log.output_index))
        for part in attached.prompt_logprobs:
            self._stream.note(engine_pb2.RequestEvent(prompt_logprobs=part))
        if attached.started:
            self._resume(attached.cached_tokens)
        for log in attached.outputs:
            self._take(log)
        if attached.HasField("done") and self._stream.failure is None:
            self._stream.note(engine_pb2.RequestEvent(done=attached.done))
        self._step_aside()

    def push(self, output_index: int, token: int) -> None:
        """Takes one token: one that the reader has, or the next."""
        expected = self._expected.get(output_index)
        self._had_last = bool(expected) or self._stream.failure is not None
        if not self._had_last:
            self._stream.push(output_index, token)
        elif expected and expected.popleft() != token:
            self._fail()
        else:
            self._step_aside()

    def push_logprobs(self, output_index: int, entry: TokenLogprobs) -> None:
        """Takes the log probabilities of the token pushed last."""
        if not self._had_last:
            self._stream.push_logprobs(output_index, entry)

    def note(self, event: engine_pb2.RequestEvent) -> None:
        """Takes one event."""
        if self._stream.failure is not None:
            return
        kind = event.WhichOneof("event")
        if kind == "started":
            self._resume(event.started.cached_tokens)
        elif kind == "output_end":
            self._end_output(event.output_end)
        else:
            self._stream.note(event)
        self._step_aside()

    def engine_lost(self, failure: errors.ServiceError) -> None:
        """This engine is lost too."""
        self._stream.engine_lost(failure)

    def _take(self, log: engine_pb2.OutputLog) -> None:
        entries = LogprobReader(log.logprobs) if log.logprobs.sampled else None
        for token in token_ids_of(log.token_ids):
            self.push(log.output_index, token)
            if entries is not None:
                self.push_logprobs(log.output_index, entries.next())
        if log.HasField("end"):
            self._end_output(log.end)

    def _end_output(self, end: engine_pb2.OutputEnd) -> None:
        if self._expected.get(end.output_index):
            self._fail()
        elif end.output_index not in self._stream.ends:
            self._stream.note(engine_pb2.RequestEvent(output_end=end))

    def _resume(self, cached_tokens: int) -> None:
        """The engine computes: the reader hears of the pause, or that it began."""
        self._resumed = True
        if self._stream.has_started:
            pause_ns = time.monotonic_ns() - self._lost_ns
            self._stream.note(engine_pb2.RequestEvent(resumed=engine_pb2.RequestResumed(pause_ns=pause_ns)))
        else:
            started = engine_pb2.RequestStarted(cached_tokens=cached_tokens)
            self._stream.note(engine_pb2.RequestEvent(started=started))

    def _step_aside(self) -> None:
        level = self._resumed and not any(self._expected.values())
        if level and self._readers.get(self.handle) is self:
            self._readers[self.handle] = self._stream

    def _fail(self) -> None:
        text = "another engine went on with other tokens than those that were read; read it again from token 0"
        self._stream.fail(errors.ServiceError(grpc.StatusCode.DATA_LOSS, text))
