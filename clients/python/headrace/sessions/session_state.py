"""What a session knows between two messages: its open ids, and where each output stands.

It makes typed events of messages.

Owns SessionStep, the batch of one message, and the logic that the sync and the asyncio session
share. Does not wait and does not read (session.py, aio_session.py). What a caller wants comes in
and SessionRequest messages go out; SessionResponse messages come in, and steps or events go out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.answers import Submitted
from headrace.calls import assign_given, assign_prompt, request_id_of
from headrace.conversations.messages import Messages, ToolOptions, assign_tools
from headrace.errors import from_status
from headrace.events import Delta, Done, Event, Failed, from_proto
from headrace.protobuf_fields import assign
from headrace.spec import GenerationOptions
from headrace.v1 import inference_pb2 as pb

MAX_STREAM_ID = 2**32 - 1


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """One event of the generation `stream_id`."""

    stream_id: int
    event: Event


@dataclass(frozen=True, slots=True)
class SessionStep:
    """What is new in all generations of a session since the step before.

    The first four are columns of equal length: entry i of each belongs to the same token, in order
    within an output. Tokens with log probabilities, and the first ones of a generation attached
    past its beginning, come as Delta events instead. A generation's events come after its tokens.

    Attributes:
        stream_ids: Which generation.
        output_indices: Which of its n outputs.
        token_ids: The token.
        texts: Its text; "" where it has none of its own, and with token_ids_only. The text of
            tokens that come together may stand with the last of them.
        events: Everything that is no token in the columns.
    """

    stream_ids: tuple[int, ...]
    output_indices: tuple[int, ...]
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    events: tuple[SessionEvent, ...]


class SessionState:
    """Ids and positions of one session.

    Not safe to share between threads: session.py holds a lock around it.
    """

    def __init__(self) -> None:
        self._next_stream_id = 1
        # Per open generation and output: position of the next token.
        self._positions: dict[int, defaultdict[int, int]] = {}

    def submit(self, submission: pb.SessionSubmit) -> pb.SessionRequest:
        """The message that starts a generation, under an id of its own."""
        return pb.SessionRequest(stream_id=self._open(0), submit=submission)

    def attach(self, request: str | Submitted, output_index: int | None, from_token: int) -> pb.SessionRequest:
        """The message that reads a generation from a token on."""
        message = pb.SessionAttach()
        assign(message, "request_id", request_id_of(request), "request_id")
        assign_given(message, "output_index", output_index)
        assign(message, "from_token", from_token, "from_token")
        return pb.SessionRequest(stream_id=self._open(from_token), attach=message)

    def cancel(self, stream_id: int) -> pb.SessionRequest | None:
        """The message that ends a generation; None where it has ended already."""
        if stream_id not in self._positions:
            return None
        return pb.SessionRequest(stream_id=stream_id, cancel=pb.SessionCancel())

    def detach(self, stream_id: int) -> pb.SessionRequest | None:
        """Returns the message that gives up reading a generation; None where it has ended already.

        Its events are dropped from here on.
        """
        if self._positions.pop(stream_id, None) is None:
            return None
        return pb.SessionRequest(stream_id=stream_id, cancel=pb.SessionCancel(detach=True))

    def is_open(self, stream_id: int) -> bool:
        """Whether more may come of a generation."""
        return stream_id in self._positions

    @property
    def is_idle(self) -> bool:
        """Whether no generation is open."""
        return not self._positions

    def ended(self, event: SessionEvent) -> bool:
        """Notes an event; whether it is the last one of its generation."""
        last = isinstance(event.event, Done | Failed)
        if last:
            self._positions.pop(event.stream_id, None)
        return last

    def events(self, step: SessionStep) -> Iterator[SessionEvent]:
        """Returns a step as events: first one Delta for each output with tokens, then the rest.

        What nobody reads any more is left out.
        """
        yield from self._deltas(step)
        for event in step.events:
            positions = self._positions.get(event.stream_id)
            if positions is None:
                continue
            if isinstance(event.event, Delta):
                delta = event.event
                positions[delta.output_index] = delta.first_token_index + len(delta.token_ids)
            yield event

    def _deltas(self, step: SessionStep) -> Iterator[SessionEvent]:
        rows: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for row, key in enumerate(zip(step.stream_ids, step.output_indices, strict=True)):
            rows[key].append(row)
        for (stream_id, output_index), run in rows.items():
            positions = self._positions.get(stream_id)
            if positions is None:
                continue
            first = positions[output_index]
            positions[output_index] = first + len(run)
            ids, text = tuple(step.token_ids[row] for row in run), "".join(step.texts[row] for row in run)
            yield SessionEvent(stream_id, Delta(output_index, first, ids, text))

    def _open(self, first_token: int) -> int:
        """A stream id that was never used in this session."""
        stream_id = self._next_stream_id
        if stream_id > MAX_STREAM_ID:
            raise RuntimeError("the session has used all of its stream ids: open another one")
        self._next_stream_id += 1
        self._positions[stream_id] = defaultdict(lambda: first_token)
        return stream_id


def submission(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Messages | None,
    tools: ToolOptions,
    continue_last_message: bool | None,
    detached: bool | None,
    idempotency_key: str | None,
    options: GenerationOptions,
) -> pb.SessionSubmit:
    """The generation to start; arguments as in Session.submit.

    Raises:
        InvalidRequest: A value that the wire cannot carry, or not exactly one kind of prompt.
    """
    message = pb.SessionSubmit()
    assign_prompt(message, prompt, token_ids, messages, options)
    assign_tools(message, tools)
    assign_given(message, "continue_last_message", continue_last_message)
    assign_given(message, "detached", detached)
    assign_given(message, "idempotency_key", idempotency_key)
    return message


def step_from_proto(response: pb.SessionResponse) -> SessionStep:
    """The step of a message.

    Columns that the wire leaves out because they say nothing are filled up.
    """
    tokens = response.tokens
    stream_ids = tuple(tokens.stream_ids)
    count = len(stream_ids)
    return SessionStep(
        stream_ids,
        tuple(tokens.output_indices) or (0,) * count,
        tuple(tokens.token_ids),
        tuple(tokens.texts) or ("",) * count,
        tuple(_known_events(response.events)),
    )


def _known_events(messages: Sequence[pb.SessionEvent]) -> Iterator[SessionEvent]:
    """The typed events; kinds newer than this client are left out."""
    for message in messages:
        if message.HasField("error"):
            yield SessionEvent(message.stream_id, Failed(from_status(message.error)))
        elif (event := from_proto(message.event)) is not None:
            yield SessionEvent(message.stream_id, event)
