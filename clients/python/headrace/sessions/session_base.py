"""What the sync and the asyncio session share: starting, ending and telling apart generations.

Owns everything of a session but waiting, which session.py and aio_session.py do. What is known
about ids and positions is in session_state.py. Requests go out through `_send`; steps come in
and are dealt out to the generations' inboxes.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Generic, Protocol, TypeVar, Unpack

import grpc

from headrace.answers import Submitted
from headrace.completion import Transcript
from headrace.conversations.messages import Messages, Tool, ToolOptions
from headrace.errors import HeadraceError, Internal, from_rpc_error
from headrace.events import Delta, Event, Failed, PromptLogprobs
from headrace.sessions.session_state import SessionEvent, SessionState, SessionStep, submission
from headrace.spec import GenerationOptions
from headrace.trace_context import checked
from headrace.v1 import inference_pb2 as pb


class Inbox:
    """Events of one generation that wait to be handed out, and a transcript of the others."""

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.transcript = Transcript()
        self.arrived: deque[Event] = deque()

    def hand_out(self, event: Event) -> Event:
        """Notes an event that the caller gets."""
        if isinstance(event, Failed):
            event.error.request_id = event.error.request_id or self.transcript.request_id
        self.transcript.add(event)
        return event


class HasInbox(Protocol):
    """A generation, as its session sees it."""

    _inbox: Inbox


G = TypeVar("G", bound=HasInbox)


class SessionBase(ABC, Generic[G]):
    """Starting and ending generations. All state is read and changed under `_lock`."""

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._lock = lock
        self._state = SessionState()
        self._generations: dict[int, G] = {}
        self._reader: str | None = None
        self._finished = False
        self._ended = False
        # By this side: nothing that has arrived is handed out after that.
        self._closed = False
        self._failure: Callable[[str | None], HeadraceError] | None = None

    def submit(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | None = None,
        parallel_tool_calls: bool | None = None,
        continue_last_message: bool | None = None,
        detached: bool | None = None,
        idempotency_key: str | None = None,
        traceparent: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> G:
        """Starts a generation. It is sent at once; nothing is waited for.

        Args:
            prompt: Text; exactly one of prompt, token_ids and messages is given.
            token_ids: The prompt as tokens, used as they are.
            messages: A conversation as the prompt, as in Client.chat.
            tools: Functions that the model may call, as in Client.chat.
            tool_choice: Whether it calls them; see Client.chat.
            parallel_tool_calls: Whether one output may call several; see Client.chat.
            continue_last_message: Whether the last message is continued; see Client.chat.
            detached: Whether it outlives the session, as with Client.submit. Default: it is
                cancelled when the session's call ends early.
            idempotency_key: Makes the call safe to send again, as with Client.submit; only with
                detached.
            traceparent: W3C trace context of this generation. Default: that of the session's call.
            **options: How to sample, when to stop, what to report.

        Raises:
            InvalidRequest: A value that cannot be sent. What the server refuses is raised by the
                generation, or comes as a Failed event.
            RuntimeError: The session is finished or closed.
            HeadraceError: The session's call has failed.
        """
        offered = ToolOptions(tools=tools, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls)
        message = submission(
            prompt, token_ids, messages, offered, continue_last_message, detached, idempotency_key, options
        )
        if traceparent is not None:
            message.traceparent = checked(traceparent)
        return self._start(lambda: self._state.submit(message))

    def attach(self, request: str | Submitted, *, output_index: int | None = None, from_token: int = 0) -> G:
        """Reads a generation that exists, from any token on.

        The arguments are those of Client.subscribe, the errors those of submit.
        """
        return self._start(lambda: self._state.attach(request, output_index, from_token))

    def finish(self) -> None:
        """Says that nothing more will be submitted or attached.

        Once all generations have ended, the session does.
        """
        with self._lock:
            self._finished = True
            self._end_if_idle()

    @abstractmethod
    def _generation(self, inbox: Inbox) -> G:
        """The caller's view of a new generation."""

    @abstractmethod
    def _send(self, request: pb.SessionRequest | None) -> None:
        """Sends a message without waiting; None closes the sending side."""

    def _start(self, message: Callable[[], pb.SessionRequest]) -> G:
        with self._lock:
            self._check(None)
            if self._finished or self._ended:
                raise RuntimeError("the session takes no more generations: it is finished or closed")
            request = message()
            generation = self._generations[request.stream_id] = self._generation(Inbox(request.stream_id))
            self._send(request)
            return generation

    def _cancel(self, stream_id: int) -> None:
        with self._lock:
            request = self._state.cancel(stream_id)
            if request is not None:
                self._send(request)

    def _detach(self, stream_id: int) -> None:
        with self._lock:
            request = self._state.detach(stream_id)
            if request is not None:
                self._send(request)
                self._generations.pop(stream_id)._inbox.arrived.clear()
                self._end_if_idle()

    def _claim(self, reader: str) -> None:
        """Refuses a second way of reading: each event can be handed out once."""
        if self._reader not in (None, reader):
            raise RuntimeError(f"the session is read by {self._reader} already, and can't be read by {reader} besides")
        self._reader = reader

    def _arrived(self, inbox: Inbox) -> Event | None:
        """The next event that has arrived for a generation, if there is one."""
        return inbox.hand_out(inbox.arrived.popleft()) if inbox.arrived and not self._closed else None

    def _is_over(self, inbox: Inbox) -> bool:
        """Whether nothing will come for a generation any more.

        Raises what ended the session, if that was an error.
        """
        if self._closed or not self._state.is_open(inbox.stream_id):
            return True
        self._check(inbox.transcript.request_id)
        return self._ended

    def _check(self, request_id: str | None) -> None:
        """Raises what ended the session, if it was an error."""
        if self._failure is not None:
            raise self._failure(request_id)

    def _call_failed(self, error: grpc.RpcError) -> None:
        """Notes how the call ended; an end that this side asked for is none."""
        if not self._ended:
            self._failure = functools.partial(from_rpc_error, error)
        self._ended = True

    def _call_ended(self) -> None:
        """Notes that the server ended the call."""
        if not self._ended and not self._state.is_idle:
            self._failure = lambda request_id: Internal(
                "the session ended before its generations did", request_id=request_id
            )
        self._ended = True

    def _deal_out(self, step: SessionStep) -> None:
        """Puts a step's events into the inboxes."""
        for generation, event in self._pairs(step):
            generation._inbox.arrived.append(event)

    def _pairs(self, step: SessionStep) -> list[tuple[G, Event]]:
        """A step's events with their generations."""
        pairs = []
        for event in self._state.events(step):
            pairs.append((self._generations[event.stream_id], event.event))
            self._forget_if_ended(event)
        return pairs

    def _noted(self, step: SessionStep) -> SessionStep:
        """Returns a step to hand out as it is.

        An answer to a cancellation that came after the end of its generation is left out.
        """
        events = tuple(event for event in step.events if self._note(event))
        return step if len(events) == len(step.events) else replace(step, events=events)

    def _note(self, event: SessionEvent) -> bool:
        """Keeps what names and ends a generation whose tokens are read in steps.

        Returns False for an event of a generation that has ended.
        """
        generation = self._generations.get(event.stream_id)
        if generation is None:
            return False
        if not isinstance(event.event, Delta | PromptLogprobs):
            generation._inbox.hand_out(event.event)
        self._forget_if_ended(event)
        return True

    def _forget_if_ended(self, event: SessionEvent) -> None:
        if self._state.ended(event):
            self._generations.pop(event.stream_id, None)
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        """Closes the sending side once the last generation has ended.

        Until then a generation can be cancelled.
        """
        if self._finished and self._state.is_idle:
            self._send(None)
