"""The sync client: blocking calls and iterators.

Owns the surface that threads see. What is sent and how answers are read is in calls.py, what goes
over which connection in transport.py, how a stream is read in stream.py and session.py; aio.py is
the same surface for asyncio. Python values come in; typed values, streams and the exceptions of
errors.py come out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self, Unpack

from headrace import calls
from headrace.answers import Load, Model, RequestSummary, Submitted
from headrace.completion import Completion
from headrace.connections.connection import DEFAULT_SERVER, ConnectionOptions, endpoint
from headrace.connections.transport import Transport
from headrace.conversations.messages import Messages, Tool, ToolOptions
from headrace.sessions.session import Session
from headrace.spec import GenerationOptions
from headrace.streams.stream import Stream
from headrace.streams.stream_state import StreamState, SubscriptionState
from headrace.v1.inference_pb2_grpc import InferenceServiceStub


class Client:
    """A client of a Headrace server.

    Safe to share between threads; a context manager that closes its connections.
    """

    def __init__(self, server: str = DEFAULT_SERVER, **options: Unpack[ConnectionOptions]) -> None:
        """Prepares the connections; each is made by its first call.

        Args:
            server: "host:port", "unix:/path" or any gRPC target.
            **options: Key, TLS, number of connections, timeout, retries; see ConnectionOptions.

        Raises:
            ValueError: Options that contradict each other, or an api_key that would go over a
                network in the clear.
            OSError: A TLS file cannot be read.
        """
        self._endpoint = endpoint(server, **options)
        self._transport = Transport(self._endpoint, InferenceServiceStub)

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        traceparent: str | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Streams the answer to a prompt; see GenerationOptions for the options.

        Args:
            prompt: Text; exactly one of prompt and token_ids is given.
            token_ids: The prompt as tokens, used as they are.
            traceparent: W3C trace context of the caller, whose trace the server's spans join; with
                the flag 01 they are always recorded.
            timeout: Seconds for the whole stream; also the generation's deadline on the server.
            **options: How to sample, when to stop, what to report.

        Raises:
            InvalidRequest: A value that cannot be sent. What the server refuses is raised by the
                stream.
        """
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
    ) -> Stream:
        """Streams the answer to a user message or a conversation.

        A conversation is Message objects or (role, text) pairs.

        Args:
            messages: The conversation, oldest first.
            continue_last_message: Whether the last message, the assistant's, is continued.
            tools: Functions that the model may call. Its calls come as the content of deltas, and
                in the result's `tool_calls`.
            tool_choice: Whether it calls them: "auto", "none", "required", or the name of one that
                it must call. Default: "auto".
            parallel_tool_calls: Whether one output may call several. Default: True.
            traceparent: W3C trace context, as in generate.
            timeout: Seconds for the whole stream.
            **options: How to sample, when to stop, what to report.
        """
        offered = ToolOptions(tools=tools, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls)
        return self._stream(
            StreamState(calls.chat(messages, continue_last_message, offered, traceparent, options), timeout)
        )

    def complete(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        traceparent: str | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion:
        """The whole answer to a prompt, in one message."""
        return self._transport.unary(calls.complete(prompt, token_ids, traceparent, options), timeout)

    def submit(
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
        return self._transport.unary(
            calls.submit(prompt, token_ids, messages, offered, idempotency_key, traceparent, options), timeout
        )

    def subscribe(
        self,
        request: str | Submitted,
        *,
        output_index: int | None = None,
        from_token: int = 0,
        timeout: float | None = None,
    ) -> Stream:
        """Reads a submitted or running generation from any token on.

        A broken connection is opened again, and the stream continues from the last token, after a
        Reconnecting event.

        Args:
            request: The request id, or what submit returned.
            output_index: Only this output. Default: all.
            from_token: The first token wanted in each output.
            timeout: Seconds for the whole subscription, reconnections included; the generation goes
                on after it.
        """
        call = calls.subscribe(request, output_index, from_token)
        return self._stream(SubscriptionState(call, timeout, self._endpoint.retry))

    def session(self, *, timeout: float | None = None) -> Session:
        """Many generations over one stream, for gateways; `timeout` is for the whole session."""
        return Session(lambda requests: self._transport.session(requests, timeout))

    def cancel(self, request: str | Submitted, *, timeout: float | None = None) -> bool:
        """Ends a generation; returns whether it was still waiting or running."""
        return self._transport.unary(calls.cancel(request), timeout)

    def list_requests(
        self,
        *,
        state: str | None = None,
        model: str | None = None,
        page_size: int | None = None,
        timeout: float | None = None,
    ) -> Iterator[RequestSummary]:
        """Yields the caller's own generations, newest first, fetched page by page.

        Args:
            state: Only requests in this state: "queued", "running" or "finished". Default: all.
            model: Only requests of this model. Default: of all models.
            page_size: Requests per page. Default: the server's.
            timeout: Seconds for each page.
        """
        token = ""
        while True:
            page = self._transport.unary(calls.list_requests(state, model, page_size, token), timeout)
            yield from page.requests
            token = page.next_page_token
            if not token:
                return

    def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Text to token ids."""
        return self._transport.unary(calls.tokenize(text, add_special_tokens, model), timeout)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """Token ids to text."""
        return self._transport.unary(calls.detokenize(token_ids, skip_special_tokens, model), timeout)

    def get_model(self, model: str | None = None, *, timeout: float | None = None) -> Model:
        """What one model is and what it allows; the server's default model where none is named."""
        return self._transport.unary(calls.get_model(model), timeout)

    def list_models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The models of the server, by name."""
        return self._transport.unary(calls.list_models(), timeout)

    def load(self, model: str | None = None, *, timeout: float | None = None) -> Load:
        """How busy the server is."""
        return self._transport.unary(calls.load(model), timeout)

    def close(self) -> None:
        """Closes the connections; calls that still run are cancelled."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, state: StreamState) -> Stream:
        # A subscription that is opened again may meet another connection, and with it a service
        # process that lives.
        return Stream(state, lambda state: self._transport.stream(state.call, state.remaining()))
