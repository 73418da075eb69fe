"""One subscription on its way from the engine to one reader.

Owns what is pending for the reader and the order of events: started, the prompt's log
probabilities, resumed, deltas, output_finished, done. The engine's side (`push`, `note_*`, `fail`)
is called while a step is dealt out and never waits; the reader's side (`take`, `news`) is one
coroutine. When the reader is behind, everything pending goes into one message per output, so that a
slow reader costs fewer messages, not more memory; how far behind it may fall is watched by
`reader_watch`. Knows the engine's messages, not its connection; what events become is the
`EventWire`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import grpc

from headrace.v1 import generation_pb2
from headrace_facts.facts import SpanContext
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.streams import ledger
from headrace_service.streams.engine_columns import LogprobReader, token_ids_of
from headrace_service.streams.interruptions import Interruptions
from headrace_service.streams.output_text import OutputText
from headrace_service.streams.prompt_parts import PromptParts
from headrace_service.streams.render_state import RenderState
from headrace_service.streams.wires import EventWire, TokenLogprobs
from headrace_service.text.detokenizer import PieceTable
from headrace_service.tracing.generation_trace import GenerationTrace

# What one pending token, and one of its reported alternatives, takes in this process's lists.
_TOKEN_BYTES = 40
_TOP_ENTRY_BYTES = 64


class GenerationStream:
    """Tokens and events of one subscription.

    Attributes:
        handle: names the subscription on the engine's stream.
        request_id: the request read.
        from_token: first token to deliver, in each output.
        clock: when things left, for the ledger.
        done: set when the request has ended; nothing comes after it.
        failure: set when the subscription ended without the request's end.
        hit_deadline: whether the engine ended an output for its time.
        has_started: whether an engine has said that it began to compute.
        deadline_is_status: whether that time was the call's own deadline, so that the call must end
            with it.
        at_edge: whether no token has left yet, or the request has ended: the writes whose times
            count.
        has_news: whether something came since the last `take`.
        pending_bytes: memory that undelivered tokens take.
        writing_since_ns: when the write that the reader has not taken yet began; 0: none.
        listener: called on news instead of waking whoever awaits `news`; for readers of many
            streams.
        ends: how each output that has ended did.
        ledger: how the time was spent, as the reader was informed; None before that.
        trace: what is reported at the generation's end; None if nothing is, or it has been.
        recording: when messages left; None if nobody wants to know.
        rescue: asked when the engine is lost, with the failure that this is, whether another engine
            goes on; None: none does.
    """

    __slots__ = (
        "_accepted", "_interruptions", "_noted", "_outputs", "_pauses_ns", "_prompt_parts", "_render", "_started",
        "_table", "_unwritten_beginnings", "_waiter", "_whole", "_wire", "at_edge", "cap_factor", "clock",
        "deadline_is_status", "done", "ends", "failure", "from_token", "handle", "has_news", "has_started",
        "hit_deadline", "ledger", "listener", "over_cap_since_ns", "pending_bytes", "recording", "request_id",
        "rescue", "trace", "writer", "writing_since_ns",
    )  # fmt: skip

    def __init__(
        self,
        handle: int,
        request_id: str,
        table: PieceTable,
        render: RenderState | None,
        clock: ledger.DeliveryClock,
        wire: EventWire,
        from_token: int = 0,
        trace: GenerationTrace | None = None,
    ) -> None:
        self.handle = handle
        self.request_id = request_id
        self.from_token = from_token
        self.clock = clock
        self.done: engine_pb2.RequestDone | None = None
        self.failure: errors.ServiceError | None = None
        self.has_news = False
        self.has_started = False
        self.at_edge = True
        self.pending_bytes = 0
        self.cap_factor = 1
        self.over_cap_since_ns = 0
        self.writing_since_ns = 0
        self.deadline_is_status = False
        self.hit_deadline = False
        self.writer: asyncio.Task[None] | None = None
        self.listener: Callable[[GenerationStream], None] | None = None
        self.ends: dict[int, engine_pb2.OutputEnd] = {}
        self.ledger: generation_pb2.Ledger | None = None
        self.trace = trace
        self.rescue: Callable[[errors.ServiceError], bool] | None = None
        # The generation's own stream knows what engines that were lost did; others join and leave.
        self._interruptions = None if clock.subscribed else Interruptions(clock.arrival_ns)
        self.recording = recording = trace.recording() if trace is not None else None
        # Where outputs note their deltas; None: nowhere, or the wire does.
        self._noted = recording if recording is not None and not wire.record(recording) else None
        self._accepted: tuple[str, int] | None = None
        self._wire = wire
        self._table = table
        self._render = render
        self._outputs: dict[int, OutputText] = {}
        self._started: int | None = None
        # Messages taken last that come before all tokens.
        self._unwritten_beginnings = 0
        self._prompt_parts = PromptParts()
        self._pauses_ns: list[int] = []
        self._waiter: asyncio.Future[None] | None = None
        # Whether the reader wants nothing before the end, and is not woken for tokens.
        self._whole = False

    @property
    def is_whole(self) -> bool:
        """Whether the reader wants nothing before the end."""
        return self._whole

    @property
    def num_tokens(self) -> int:
        """How many tokens came, delivered or not."""
        return sum(output.num_tokens for output in self._outputs.values())

    @property
    def span(self) -> SpanContext | None:
        """The inference span of a generation that this stream joined, if somebody records it."""
        return self._render.span if self._render is not None else None

    def announce(self, model_revision: str, num_prompt_tokens: int) -> None:
        """Informs the reader that the request is accepted, before all other events."""
        self._accepted = (model_revision, num_prompt_tokens)
        self._wake()

    # -- the engine's side

    def push(self, output_index: int, token: int) -> None:
        """Takes one token; the hot path."""
        output = self._outputs.get(output_index)
        if output is None:
            output = self._new_output(output_index)
        output.tokens.append(token)
        self.pending_bytes += _TOKEN_BYTES
        if not self._whole:
            self._wake()

    def push_logprobs(self, output_index: int, entry: TokenLogprobs) -> None:
        """Takes the log probabilities of the token pushed last."""
        logprobs = self._outputs[output_index].logprobs
        if logprobs is not None:
            logprobs.append(entry)
            self.pending_bytes += _TOKEN_BYTES + _TOP_ENTRY_BYTES * len(entry.top_ids)

    def note(self, event: engine_pb2.RequestEvent) -> None:
        """Takes one event of the request."""
        kind = event.WhichOneof("event")
        if kind == "started":
            self._note_started(event.started.cached_tokens)
        elif kind == "prompt_logprobs":
            self.pending_bytes += self._prompt_parts.append(event.prompt_logprobs)
        elif kind == "resumed":
            self._pauses_ns.append(event.resumed.pause_ns)
        elif kind == "output_end":
            self._end_output(event.output_end)
        elif kind == "done":
            self._note_done(event.done)
        self._wake()

    def begin_attached(self, attached: engine_pb2.Attached) -> None:
        """Takes the state of a request that runs, or ran, already."""
        self._render = RenderState.decode(attached.service_state)
        if attached.started:
            self._note_started(attached.cached_tokens)
        self._prompt_parts.extend(attached.prompt_logprobs)
        for log in attached.outputs:
            self._replay(log)
        if attached.HasField("done"):
            self._note_done(attached.done)
        self._wake()

    def engine_lost(self, failure: errors.ServiceError) -> None:
        """Takes that the engine is lost: another one goes on, or the subscription ends."""
        if self.rescue is None or self.done is not None or self.failure is not None or not self.rescue(failure):
            self.fail(failure)
        elif self._interruptions is not None:
            self._interruptions.lost(time.monotonic_ns())

    def known(self, output_index: int) -> list[int]:
        """Returns the ids of all tokens of an output that came; kept where there is a rescue."""
        output = self._outputs.get(output_index)
        return token_ids_of(output.emitted()) if output is not None else []

    def emitted(self, num_outputs: int) -> list[engine_pb2.EmittedTokens]:
        """Returns what came of each output so far, for another engine to go on from.

        Empty if nothing did.
        """
        outputs = [self._outputs.get(index) for index in range(num_outputs)]
        emitted = [
            engine_pb2.EmittedTokens(
                token_ids=output.emitted() if output is not None else b"", end=self.ends.get(index)
            )
            for index, output in enumerate(outputs)
        ]
        return emitted if any(part.token_ids or part.HasField("end") for part in emitted) else []

    def fail(self, failure: errors.ServiceError) -> None:
        """Ends the subscription without the request's end; what is pending is still delivered."""
        if self.done is None and self.failure is None:
            self.failure = failure
            self._wake()

    def interrupt(self, failure: errors.ServiceError) -> None:
        """Ends the call now, though its reader may take nothing: a blocked write is cancelled."""
        self.failure = failure
        self._wake()
        if self.writer is not None:
            self.writer.cancel()

    def note_failure(self, failure: errors.ServiceError) -> None:
        """Notes what the call ended with, for the report about the generation.

        A caller who left is no failure.
        """
        if self.trace is not None and failure.code is not grpc.StatusCode.CANCELLED:
            self.trace.failure = failure

    # -- the reader's side

    def take(self) -> list[bytes]:
        """Returns the messages of all pending events but done, in order.

        Empty if there are none.
        """
        messages: list[bytes] = []
        self.has_news = False
        self.pending_bytes = 0
        self.over_cap_since_ns = 0
        if self._accepted is not None or self._started is not None or self._prompt_parts or self._pauses_ns:
            messages.extend(message for message in self._take_beginnings() if message is not None)
            self._unwritten_beginnings = len(messages)
            if self.recording is not None:
                self.recording.skip(len(messages))
        for output in self._outputs.values():
            if output.tokens or output.end is not None:
                output.take(messages)
                if output.end is not None:
                    self._take_end(output.end, output.calls_tools, messages)
                    output.end = None
        return messages

    def wrote(self, began_ns: int, left_ns: int) -> None:
        """Notes the write of one message that was taken; to be called while `at_edge`."""
        if self.done is not None:
            self.clock.wrote(began_ns, left_ns)
        if self._unwritten_beginnings:
            self._unwritten_beginnings -= 1
        else:
            self.tokens_left(left_ns)

    def tokens_left(self, now_ns: int) -> None:
        """Notes when tokens left, if the first ones are among what was taken.

        To be called while `at_edge`.
        """
        if not self.clock.first_left_ns and any(output.num_taken for output in self._outputs.values()):
            self.clock.first_left_ns = now_ns
            self.at_edge = self.done is not None

    def take_done(self) -> bytes | None:
        """Returns the message of the request's end as of this moment.

        The request must have ended.
        """
        assert self.done is not None
        self.ledger = ledger.close(self.done, self.clock, time.monotonic_ns())
        reasoning_tokens = sum(output.num_reasoning_tokens for output in self._outputs.values())
        return self._wire.done(self.done, self.ledger, reasoning_tokens)

    def news(self) -> asyncio.Future[None]:
        """Returns what the reader awaits for the next news. One coroutine at a time."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    async def wait_ended(self) -> None:
        """Returns when the request or the subscription has ended.

        For calls that answer with everything at once.
        """
        self._whole = True
        while self.done is None and self.failure is None:
            await self.news()

    # -- inside

    def _take_beginnings(self) -> Iterator[bytes | None]:
        """Yields the messages of events that are no output's."""
        if self._accepted is not None:
            yield self._wire.accepted(self.request_id, *self._accepted)
            self._accepted = None
        if self._started is not None:
            yield self._wire.started(self._started)
            self._started = None
        for first_token_index, columns in self._prompt_parts.take():
            yield self._wire.prompt_logprobs(first_token_index, columns)
        yield from map(self._wire.resumed, self._pauses_ns)
        self._pauses_ns = []

    def _take_end(self, end: engine_pb2.OutputEnd, calls_tools: bool, messages: list[bytes]) -> None:
        message = self._wire.output_finished(end, self._render.stop_strings if self._render else (), calls_tools)
        if message is not None:
            messages.append(message)
            if self.recording is not None:
                self.recording.skip(1)

    def _wake(self) -> None:
        self.has_news = True
        if self.listener is not None:
            self.listener(self)
            return
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def _new_output(self, output_index: int) -> OutputText:
        assert self._render is not None
        interruptions = self._interruptions
        output = OutputText(
            output_index,
            self._table,
            self._render,
            self.from_token,
            self._wire,
            self._noted,
            keeps=interruptions is not None or self.rescue is not None,
            place=self.request_id,
        )
        self._outputs[output_index] = output
        if interruptions is not None:
            interruptions.first_token(time.monotonic_ns())
        return output

    def _end_output(self, end: engine_pb2.OutputEnd) -> None:
        output = self._outputs.get(end.output_index) or self._new_output(end.output_index)
        output.end = self.ends[end.output_index] = self._named(end)
        self.hit_deadline = self.hit_deadline or end.reason == engine_pb2.OUTPUT_END_REASON_DEADLINE

    def _note_started(self, cached_tokens: int) -> None:
        """Notes that an engine began to compute; another one than before resumes."""
        self.has_started = True
        interruptions = self._interruptions
        if interruptions is None:
            self._started = cached_tokens
            return
        now_ns = time.monotonic_ns()
        if not interruptions.has_started:
            self._started = cached_tokens
        pause_ns = interruptions.started(now_ns, cached_tokens)
        if pause_ns is not None:
            self._pauses_ns.append(pause_ns)

    def _note_done(self, done: engine_pb2.RequestDone) -> None:
        if self._interruptions is not None:
            self._interruptions.add_to(done)
        self.done = done
        self.at_edge = True
        self.clock.generation_ended(time.monotonic_ns(), done.ended_ago_ns)

    def _replay(self, log: engine_pb2.OutputLog) -> None:
        output = self._new_output(log.output_index)
        output.tokens = token_ids_of(log.token_ids)
        if output.logprobs is not None:
            reader = LogprobReader(log.logprobs)
            output.logprobs = [reader.next() for _ in output.tokens]
        if log.HasField("end"):
            output.end = self.ends[log.output_index] = self._named(log.end)

    def _named(self, end: engine_pb2.OutputEnd) -> engine_pb2.OutputEnd:
        assert self._render is not None, "it is known before any output"
        return self._render.named(end)
