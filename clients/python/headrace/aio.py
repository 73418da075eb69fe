"""The asyncio client: coroutines and async iterators over a grpc.aio channel.

Owns how a task waits. What is sent and how answers are read is in calls.py, what a stream remembers in stream_state.py; client.py is the
same surface for threads, and documents the arguments. Calls go out through the generated stub, typed values and exceptions of
errors.py come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio

from headrace import calls
from headrace.answers import Load, Model, RequestSummary, Submitted
from headrace.channel import RetryPolicy, channel_options
from headrace.client import DEFAULT_SERVER, DEFAULT_TIMEOUT
from headrace.completion import Completion
from headrace.errors import from_rpc_error
from headrace.events import Delta, Event, Ledger, OutputFinished, Reconnecting, Usage
from headrace.spec import GenerationOptions, Messages
from headrace.stream_state import StreamState, SubscriptionState, piece_of
from headrace.v1.inference_pb2_grpc import InferenceServiceStub

T = TypeVar("T")
# What read() returns at the end of a stream; the published type stubs leave it out.
_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class AsyncStream:
    """The events of one generation, as an async iterator and an async context manager.

    Leaving the `async with` block, aclose() or cancelling the task that reads cancels the call; a Generate or Chat is then cancelled on
    the server, a subscription only detached. A stream is read by one task at a time.

    Raises (while iterating):
        HeadraceError: The call failed. Broken connections of subscriptions are yielded as Reconnecting events instead.
    """

    def __init__(self, state: StreamState, open_call: Callable[[StreamState], Any]) -> None:
        self._state = state
        self._open_call = open_call
        self._call: Any = open_call(state)
        self._pause: float | None = None
        self._closed = asyncio.Event()

    @property
    def request_id(self) -> str | None:
        """The request's name; None before the accepted event."""
        return self._state.transcript.request_id

    @property
    def usage(self) -> Usage | None:
        """Tokens counted; None before the end."""
        return self._state.transcript.done.usage if self._state.transcript.done else None

    @property
    def ledger(self) -> Ledger | None:
        """Where the time went; None before the end."""
        return self._state.transcript.done.ledger if self._state.transcript.done else None

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._closed.is_set():
            event = await self._next()
            if event is not None:
                return event
        raise StopAsyncIteration

    async def text(self) -> AsyncIterator[str]:
        """The pieces of text of a single output, as they arrive.

        Raises:
            ValueError: The stream carries more than one output.
            HeadraceError: The output ended with an error.
        """
        async for event in self:
            if isinstance(event, Delta | OutputFinished):
                piece = piece_of(event, self._state.transcript)
                if piece:
                    yield piece

    async def result(self) -> Completion:
        """Reads to the end and returns the whole answer, events yielded before included.

        Raises:
            HeadraceError: The call failed, or an output ended with an error.
        """
        async for _ in self:
            pass
        return self._state.transcript.completion()

    async def aclose(self) -> None:
        """Ends the stream, and with it the call if it still runs. May be called more than once."""
        self._closed.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _next(self) -> Event | None:
        """Reads one message, or opens the call again first; None where there is nothing to yield."""
        if self._pause is not None:
            await self._wait(self._pause)
            if self._closed.is_set():
                return None
            self._pause, self._call = None, self._open_call(self._state)
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            return self._failed(error)
        except asyncio.CancelledError:
            if not self._cancelled_by_aclose():
                self._call.cancel()
                raise
            return None
        if response is not _END:
            return self._state.take(response.event)
        self._state.ended()
        self._closed.set()
        return None

    async def _wait(self, delay: float) -> None:
        """Sleeps, unless the stream is closed meanwhile."""
        try:
            await asyncio.wait_for(self._closed.wait(), delay)
        except TimeoutError:
            pass

    def _cancelled_by_aclose(self) -> bool:
        """Tells aclose() from a cancelled task: grpc.aio raises CancelledError for both."""
        task = asyncio.current_task()
        return self._closed.is_set() and (task is None or not task.cancelling())

    def _failed(self, error: grpc.RpcError) -> Reconnecting | None:
        if self._closed.is_set() or self._state.transcript.done:
            self._closed.set()
            return None
        reconnecting = self._state.failed(from_rpc_error(error, self.request_id))
        self._pause = reconnecting.delay
        return reconnecting


class AsyncClient:
    """A connection to a Headrace server for one event loop; an async context manager that closes it."""

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        timeout: float | None = DEFAULT_TIMEOUT,
        retry: RetryPolicy | None = None,
    ) -> None:
        """As Client; the channel belongs to the loop that runs the first call."""
        self._server = server
        self._credentials = credentials
        self._metadata = tuple(metadata)
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncStream:
        """Streams the answer to a prompt; as Client.generate, called from a running event loop."""
        return self._stream(StreamState(calls.generate(prompt, token_ids, options), timeout))

    def chat(
        self,
        messages: Messages,
        *,
        continue_last_message: bool | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncStream:
        """Streams the answer to a user message or to a conversation; as Client.chat."""
        return self._stream(StreamState(calls.chat(messages, continue_last_message, options), timeout))

    async def complete(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion:
        """The whole answer to a prompt, in one message."""
        return await self._unary(calls.complete(prompt, token_ids, options), timeout)

    async def submit(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        idempotency_key: str | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Submitted:
        """Starts a generation that outlives its readers; read it with subscribe, end it with cancel."""
        return await self._unary(calls.submit(prompt, token_ids, idempotency_key, options), timeout)

    def subscribe(
        self,
        request: str | Submitted,
        *,
        output_index: int | None = None,
        from_token: int = 0,
        timeout: float | None = None,
    ) -> AsyncStream:
        """Reads a submitted or running generation from any token on, across broken connections; as Client.subscribe."""
        call = calls.subscribe(request, output_index, from_token)
        return self._stream(SubscriptionState(call, timeout, self._retry))

    async def cancel(self, request: str | Submitted, *, timeout: float | None = None) -> bool:
        """Ends a generation; returns whether it was still waiting or running."""
        return await self._unary(calls.cancel(request), timeout)

    async def list_requests(
        self, *, state: str | None = None, page_size: int | None = None, timeout: float | None = None
    ) -> AsyncIterator[RequestSummary]:
        """The caller's own generations, newest first, fetched page by page; `timeout` is for each page."""
        token = ""
        while True:
            page = await self._unary(calls.list_requests(state, page_size, token), timeout)
            for request in page.requests:
                yield request
            token = page.next_page_token
            if not token:
                return

    async def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Text to token ids."""
        return await self._unary(calls.tokenize(text, add_special_tokens, model), timeout)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """Token ids to text."""
        return await self._unary(calls.detokenize(token_ids, skip_special_tokens, model), timeout)

    async def get_model(self, model: str | None = None, *, timeout: float | None = None) -> Model:
        """What one model is and what it allows; the server's default model where none is named."""
        return await self._unary(calls.get_model(model), timeout)

    async def list_models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The models of the server, by name."""
        return await self._unary(calls.list_models(), timeout)

    async def load(self, model: str | None = None, *, timeout: float | None = None) -> Load:
        """How busy the server is."""
        return await self._unary(calls.load(model), timeout)

    async def close(self) -> None:
        """Closes the connection; calls that still run are cancelled."""
        if self._channel is not None:
            await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _rpc(self, name: str) -> Any:
        """The stub's method; the channel is made here, because grpc.aio ties it to the running loop."""
        if self._channel is None:
            options = channel_options(self._server, self._retry)
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self._server, options)
            else:
                self._channel = grpc.aio.secure_channel(self._server, self._credentials, options)
            self._stub = InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        return getattr(self._stub, name)

    def _stream(self, state: StreamState) -> AsyncStream:
        return AsyncStream(state, self._open)

    def _open(self, state: StreamState) -> Any:
        return self._rpc(state.call.rpc)(state.call.request, timeout=state.remaining(), metadata=self._metadata)

    async def _unary(self, call: calls.Unary[T], timeout: float | None) -> T:
        if timeout is None and not call.generates:
            timeout = self._timeout
        try:
            response = await self._rpc(call.rpc)(call.request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return call.convert(response)
