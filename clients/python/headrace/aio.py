"""The asyncio client: coroutines and async iterators.

As client.py, which documents the arguments.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Self, Unpack

from headrace import calls
from headrace.answers import Load, Model, RequestSummary, Submitted
from headrace.completion import Completion
from headrace.connections.aio_transport import AsyncTransport
from headrace.connections.connection import DEFAULT_SERVER, ConnectionOptions, endpoint
from headrace.conversations.messages import Messages, Tool, ToolOptions
from headrace.sessions.aio_session import AsyncSession
from headrace.spec import GenerationOptions
from headrace.streams.aio_stream import AsyncStream
from headrace.streams.stream_state import StreamState, SubscriptionState
from headrace.v1.inference_pb2_grpc import InferenceServiceStub


class AsyncClient:
    """A client of a Headrace server for one event loop.

    It is an async context manager that closes its connections.
    """

    def __init__(self, server: str = DEFAULT_SERVER, **options: Unpack[ConnectionOptions]) -> None:
        """Takes Client's arguments; the connections belong to the loop that runs the first call."""
        self._endpoint = endpoint(server, **options)
        self._transport = AsyncTransport(self._endpoint, InferenceServiceStub)

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        traceparent: str | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncStream:
        """Streams the answer to a prompt; as Client.generate, called from a running event loop."""
        return self._stream(StreamState(calls.generate(prompt, token_ids, traceparent, options), timeout))

    def chat(
        self,
        messages: Messages,
        *,
        continue_last_message: bool | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | None = None,
        parallel_tool_calls: bool | None = None,
        traceparent: str | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncStream:
        """Streams the answer to a user message or to a conversation; as Client.chat."""
        offered = ToolOptions(tools=tools, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls)
        return self._stream(
            StreamState(calls.chat(messages, continue_last_message, offered, traceparent, options), timeout)
        )

    async def complete(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        traceparent: str | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion:
        """The whole answer to a prompt, in one message."""
        return await self._transport.unary(calls.complete(prompt, token_ids, traceparent, options), timeout)

    async def submit(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | None = None,
        parallel_tool_calls: bool | None = None,
        idempotency_key: str | None = None,
        traceparent: str | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Submitted:
        """Starts a generation that outlives its readers.

        Read it with subscribe, end it with cancel.
        """
        offered = ToolOptions(tools=tools, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls)
        return await self._transport.unary(
            calls.submit(prompt, token_ids, messages, offered, idempotency_key, traceparent, options), timeout
        )

    def subscribe(
        self,
        request: str | Submitted,
        *,
        output_index: int | None = None,
        from_token: int = 0,
        timeout: float | None = None,
    ) -> AsyncStream:
        """Reads a submitted or running generation from any token on, as Client.subscribe does.

        Broken connections are opened again.
        """
        call = calls.subscribe(request, output_index, from_token)
        return self._stream(SubscriptionState(call, timeout, self._endpoint.retry))

    def session(self, *, timeout: float | None = None) -> AsyncSession:
        """Opens a session of many generations over one stream, for gateways.

        It takes the arguments of Client.session and is called from a running event loop.
        """
        return AsyncSession(lambda requests: self._transport.session(requests, timeout))

    async def cancel(self, request: str | Submitted, *, timeout: float | None = None) -> bool:
        """Ends a generation; returns whether it was still waiting or running."""
        return await self._transport.unary(calls.cancel(request), timeout)

    async def list_requests(
        self,
        *,
        state: str | None = None,
        model: str | None = None,
        page_size: int | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[RequestSummary]:
        """Yields the caller's own generations, newest first, as Client.list_requests does.

        They are fetched page by page.
        """
        token = ""
        while True:
            page = await self._transport.unary(calls.list_requests(state, model, page_size, token), timeout)
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
        return await self._transport.unary(calls.tokenize(text, add_special_tokens, model), timeout)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """Token ids to text."""
        return await self._transport.unary(calls.detokenize(token_ids, skip_special_tokens, model), timeout)

    async def get_model(self, model: str | None = None, *, timeout: float | None = None) -> Model:
        """What one model is and what it allows; the server's default model where none is named."""
        return await self._transport.unary(calls.get_model(model), timeout)

    async def list_models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The models of the server, by name."""
        return await self._transport.unary(calls.list_models(), timeout)

    async def load(self, model: str | None = None, *, timeout: float | None = None) -> Load:
        """How busy the server is."""
        return await self._transport.unary(calls.load(model), timeout)

    async def close(self) -> None:
        """Closes the connections; calls that still run are cancelled."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _stream(self, state: StreamState) -> AsyncStream:
        return AsyncStream(state, lambda state: self._transport.stream(state.call, state.remaining()))
