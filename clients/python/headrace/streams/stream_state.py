"""What a stream knows between two messages, and whether a broken connection may be opened again.

Owns the logic that the sync and the asyncio stream share. Does not wait and does not read:
stream.py and aio_stream.py hand in each message or failure and do what comes back. A subscription
continues after a broken connection without a lost or doubled token:

- One output: it is asked for again from the token after the last one yielded, or, where broken
  characters were last, from before those: the server gives a character whole whose bytes are on
  both sides of the first token, and while the rest is missing it may yet become one.
- Several outputs, or who knows how many: they stand at different tokens. So they are asked for
  again from where the subscription began.

What was yielded already and comes again is dropped by counting tokens and characters. Text and
tokens of a delta cover each other, and the text is the same however the deltas are cut, so both
counts name the same place.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

from headrace.completion import Transcript
from headrace.connections.channel import RetryPolicy
from headrace.connections.connection import call_timeout
from headrace.errors import HeadraceError, Internal, Unavailable
from headrace.events import (
    Accepted,
    Delta,
    Event,
    OutputFinished,
    PromptLogprobs,
    Reconnecting,
    Started,
    from_proto,
)
from headrace.rpc import Streaming
from headrace.v1 import generation_pb2, inference_pb2


class StreamState:
    """State of a Generate or Chat stream; a failure of its call is final."""

    def __init__(self, call: Streaming, timeout: float | None) -> None:
        self.call = call
        self.transcript = Transcript()
        timeout = call_timeout(timeout)
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def remaining(self) -> float | None:
        """Seconds until the stream's deadline, not below 0; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def take(self, message: generation_pb2.GenerationEvent) -> Event | None:
        """The event to yield for a message; None where there is nothing new in it."""
        event = from_proto(message)
        event = self._new_part(event) if event is not None else None
        if event is not None:
            self.transcript.add(event)
        return event

    def failed(self, error: HeadraceError) -> Reconnecting:
        """Returns what to do about a failed call: an event to yield.

        The event's delay comes before the next opening.

        Raises:
            HeadraceError: The failure, where it is final.
        """
        raise error

    def ended(self) -> None:
        """The call ended without an error.

        Raises:
            Internal: It did so before the generation was done.
        """
        if self.transcript.done is None:
            raise Internal("the stream ended before the generation did", request_id=self.transcript.request_id)

    def _new_part(self, event: Event) -> Event | None:
        return event


@dataclass(slots=True)
class _Replay:
    """How much of one output the server sends again.

    It is the tokens before `tokens` and the first `units` of the contents (see Delta.num_units).
    """

    tokens: int
    units: int


class SubscriptionState(StreamState):
    """State of a Subscribe stream, which is opened again from the last token."""

    def __init__(self, call: Streaming, timeout: float | None, retry: RetryPolicy) -> None:
        super().__init__(call, timeout)
        assert isinstance(call.request, inference_pb2.SubscribeRequest)
        self._first: inference_pb2.SubscribeRequest = call.request
        self._retry = retry
        self._failures = 0
        self._replays: dict[int, _Replay] = {}
        self._started = False

    def take(self, message: generation_pb2.GenerationEvent) -> Event | None:
        """Does what StreamState.take does; any message ends a row of failures."""
        self._failures = 0
        return super().take(message)

    def failed(self, error: HeadraceError) -> Reconnecting:
        """Prepares the call that continues the stream.

        Final are all failures but UNAVAILABLE, and too many in a row.
        """
        self._failures += 1
        if not isinstance(error, Unavailable) or self._failures >= self._retry.max_attempts:
            raise error
        delay = self._retry.backoff(self._failures) * random.uniform(0.8, 1.2)
        delay = max(delay, error.retry_after or 0.0)
        remaining = self.remaining()
        if remaining is not None and remaining <= delay:
            raise error
        self.call = replace(self.call, request=self._continuation())
        return Reconnecting(error, self._failures, delay)

    def _continuation(self) -> inference_pb2.SubscribeRequest:
        request = inference_pb2.SubscribeRequest()
        request.CopyFrom(self._first)
        outputs = self.transcript.outputs
        if not self._first.HasField("output_index") and self.call.num_outputs != 1:
            self._replays = {i: _Replay(self._position(i), outputs[i].num_units) for i in outputs}
            return request
        index = request.output_index = self._first.output_index
        output = outputs[index]
        if output.sure_token_index is not None and output.sure_token_index >= self._first.from_token:
            request.from_token = output.sure_token_index
            self._replays = {index: _Replay(self._position(index), output.num_units - output.sure_num_units)}
        else:
            self._replays = {index: _Replay(self._position(index), output.num_units)}
        return request

    def _position(self, output_index: int) -> int:
        """Position in the output of the next token to yield."""
        output = self.transcript.outputs[output_index]
        return self._first.from_token if output.first_token_index is None else output.next_token_index

    def _new_part(self, event: Event) -> Event | None:
        """Returns the event without what was yielded before.

        A continuation repeats accepted, started and ended outputs.
        """
        if isinstance(event, Delta):
            return self._new_tokens(event)
        if isinstance(event, PromptLogprobs):
            return self._new_prompt_tokens(event)
        if isinstance(event, Accepted):
            known = self.transcript.accepted is not None
        elif isinstance(event, OutputFinished):
            known = self.transcript.outputs[event.output_index].finished is not None
        elif isinstance(event, Started):
            known, self._started = self._started, True
        else:
            known = False
        return None if known else event

    def _new_prompt_tokens(self, part: PromptLogprobs) -> PromptLogprobs | None:
        """Returns the part without what was yielded before.

        A continuation repeats all of the prompt, perhaps cut differently.
        """
        parts = self.transcript.prompt_logprobs
        known = max(0, parts[-1].next_token_index - part.first_token_index) if parts else 0
        if not part.logprobs.sampled[known:]:
            return None
        return PromptLogprobs(part.first_token_index + known, part.logprobs.from_position(known))

    def _new_tokens(self, delta: Delta) -> Delta | None:
        """The delta without what was yielded before the connection broke.

        Raises:
            Internal: Tokens between the last one yielded and this delta are missing.
        """
        expected = self._position(delta.output_index)
        delta = self._without_replay(delta)
        if not delta.token_ids and not delta.text and not delta.content:
            return None
        # The first delta may start before from_token, where a character is spread over tokens on
        # both sides of it.
        is_first = self.transcript.outputs[delta.output_index].first_token_index is None
        if delta.first_token_index > expected or (delta.first_token_index < expected and not is_first):
            raise Internal(
                f"output {delta.output_index} continues at token {delta.first_token_index}, expected {expected}",
                request_id=self.transcript.request_id,
            )
        return delta

    def _without_replay(self, delta: Delta) -> Delta:
        replay = self._replays.get(delta.output_index)
        if replay is None:
            return delta
        known_tokens = min(max(0, replay.tokens - delta.first_token_index), len(delta.token_ids))
        known_units = min(replay.units, delta.num_units)
        replay.units -= known_units
        return replace(
            delta.without_units(known_units),
            first_token_index=delta.first_token_index + known_tokens,
            token_ids=delta.token_ids[known_tokens:],
            logprobs=delta.logprobs.from_position(known_tokens) if delta.logprobs else None,
        )


def piece_of(event: Delta | OutputFinished, transcript: Transcript) -> str:
    """The text that an event adds to a stream of a single output.

    Raises:
        ValueError: The stream carries more than one output, whose texts would be mixed.
        HeadraceError: The output ended with an error.
    """
    if len(transcript.outputs) > 1:
        raise ValueError(
            "text() reads one output, but this stream carries several: iterate its events, or use result()"
        )
    if isinstance(event, Delta):
        return event.text
    if event.error is not None:
        raise event.error
    return ""
