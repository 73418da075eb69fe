"""The sync client: blocking calls and iterators over a grpc channel.

Owns how a thread waits. What is sent and how answers are read is in calls.py, what a stream remembers in stream_state.py; aio.py is the
same surface for asyncio. Calls go out through the generated stub, typed values and exceptions of errors.py come back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc

from headrace import calls
from headrace.answers import Load, Model, RequestSummary, Submitted
from headrace.channel import RetryPolicy, channel_options
from headrace.completion import Completion
from headrace.errors import from_rpc_error
from headrace.events import Delta, Event, Ledger, OutputFinished, Reconnecting, Usage
from headrace.spec import GenerationOptions, Messages
from headrace.stream_state import StreamState, SubscriptionState, piece_of
from headrace.v1.inference_pb2_grpc import InferenceServiceStub

T = TypeVar("T")
DEFAULT_SERVER = "127.0.0.1:50051"
DEFAULT_TIMEOUT = 60.0


class Stream:
    """The events of one generation, as an iterator and a context manager.

    Leaving the `with` block, close() or dropping the last reference before the end cancels the call; a Generate or Chat is then
    cancelled on the server, a subscription only detached.

    Raises (while iterating):
        HeadraceError: The call failed. Broken connections of subscriptions are yielded as Reconnecting events instead.
    """

    def __init__(self, state: StreamState, open_call: Callable[[StreamState], Any]) -> None:
        self._state = state
        self._open_call = open_call
        self._call: Any = open_call(state)
        self._pause: float | None = None
        self._closed = threading.Event()

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

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while not self._closed.is_set():
            event = self._next()
            if event is not None:
                return event
        raise StopIteration

    def text(self) -> Iterator[str]:
        """The pieces of text of a single output, as they arrive.

        Raises:
            ValueError: The stream carries more than one output.
            HeadraceError: The output ended with an error.
        """
        for event in self:
            if isinstance(event, Delta | OutputFinished):
                piece = piece_of(event, self._state.transcript)
                if piece:
                    yield piece

    def result(self) -> Completion:
        """Reads to the end and returns the whole answer, events yielded before included.

        Raises:
            HeadraceError: The call failed, or an output ended with an error.
        """
        for _ in self:
            pass
        return self._state.transcript.completion()

    def close(self) -> None:
        """Ends the stream, and with it the call if it still runs. May be called from any thread and more than once."""
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self._call.cancel()

    def _next(self) -> Event | None:
        """Reads one message, or opens the call again first; None where there is nothing to yield."""
        if self._pause is not None:
            if self._closed.wait(self._pause):
                return None
            self._pause, self._call = None, self._open_call(self._state)
        try:
            return self._state.take(next(self._call).event)
        except StopIteration:
            self._state.ended()
            self._closed.set()
        except grpc.RpcError as error:
            return self._failed(error)
        return None

    def _failed(self, error: grpc.RpcError) -> Reconnecting | None:
        if self._closed.is_set() or self._state.transcript.done:
            self._closed.set()
            return None
        reconnecting = self._state.failed(from_rpc_error(error, self.request_id))
        self._pause = reconnecting.delay
        return reconnecting


class Client:
    """A connection to a Headrace server. Safe to share between threads; a context manager that closes it."""

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        timeout: float | None = DEFAULT_TIMEOUT,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Prepares the channel; the connection is made by the first call.

        Args:
            server: "host:port", "unix:/path" or any gRPC target.
            credentials: TLS credentials; without them the connection is plaintext.
            metadata: Sent with every call, for example an authorization header.
            timeout: Seconds that calls which do not generate may take, where the call says nothing else. None: no limit.
            retry: What to send again after a broken connection. RetryPolicy(max_attempts=1) sends nothing twice.
        """
        self._retry = retry or RetryPolicy()
        options = channel_options(server, self._retry)
        if credentials is None:
            self._channel = grpc.insecure_channel(server, options)
        else:
            self._channel = grpc.secure_channel(server, credentials, options)
        self._stub: Any = InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = tuple(metadata)
        self._timeout = timeout

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Streams the answer to a prompt; see GenerationOptions for the options.

        Args:
            prompt: Text; exactly one of prompt and token_ids is given.
            token_ids: The prompt as tokens, used as they are.
            timeout: Seconds for the whole stream; also the generation's deadline on the server.
            **options: How to sample, when to stop, what to report.

        Raises:
            InvalidRequest: A value that cannot be sent. What the server refuses is raised by the stream.
        """
        return self._stream(StreamState(calls.generate(prompt, token_ids, options), timeout))

    def chat(
        self,
        messages: Messages,
        *,
        continue_last_message: bool | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Streams the answer to a user message or to a conversation of Message objects or (role, text) pairs."""
        return self._stream(StreamState(calls.chat(messages, continue_last_message, options), timeout))

    def complete(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion:
        """The whole answer to a prompt, in one message."""
        return self._unary(calls.complete(prompt, token_ids, options), timeout)

    def submit(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        idempotency_key: str | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Submitted:
        """Starts a generation that outlives its readers; read it with subscribe, end it with cancel."""
        return self._unary(calls.submit(prompt, token_ids, idempotency_key, options), timeout)

    def subscribe(
        self,
        request: str | Submitted,
        *,
        output_index: int | None = None,
        from_token: int = 0,
        timeout: float | None = None,
    ) -> Stream:
        """Reads a submitted or running generation from any token on.

        A broken connection is opened again, and the stream continues from the last token, after a Reconnecting event.

        Args:
            request: The request id, or what submit returned.
            output_index: Only this output. Default: all.
            from_token: The first token wanted in each output.
            timeout: Seconds for the whole subscription, reconnections included; the generation goes on after it.
        """
        call = calls.subscribe(request, output_index, from_token)
        return self._stream(SubscriptionState(call, timeout, self._retry))

    def cancel(self, request: str | Submitted, *, timeout: float | None = None) -> bool:
        """Ends a generation; returns whether it was still waiting or running."""
        return self._unary(calls.cancel(request), timeout)

    def list_requests(
        self, *, state: str | None = None, page_size: int | None = None, timeout: float | None = None
    ) -> Iterator[RequestSummary]:
        """The caller's own generations, newest first, fetched page by page; `timeout` is for each page."""
        token = ""
        while True:
            page = self._unary(calls.list_requests(state, page_size, token), timeout)
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
        return self._unary(calls.tokenize(text, add_special_tokens, model), timeout)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """Token ids to text."""
        return self._unary(calls.detokenize(token_ids, skip_special_tokens, model), timeout)

    def get_model(self, model: str | None = None, *, timeout: float | None = None) -> Model:
        """What one model is and what it allows; the server's default model where none is named."""
        return self._unary(calls.get_model(model), timeout)

    def list_models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The models of the server, by name."""
        return self._unary(calls.list_models(), timeout)

    def load(self, model: str | None = None, *, timeout: float | None = None) -> Load:
        """How busy the server is."""
        return self._unary(calls.load(model), timeout)

    def close(self) -> None:
        """Closes the connection; calls that still run are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, state: StreamState) -> Stream:
        return Stream(state, self._open)

    def _open(self, state: StreamState) -> Any:
        rpc = getattr(self._stub, state.call.rpc)
        return rpc(state.call.request, timeout=state.remaining(), metadata=self._metadata)

    def _unary(self, call: calls.Unary[T], timeout: float | None) -> T:
        if timeout is None and not call.generates:
            timeout = self._timeout
        try:
            response = getattr(self._stub, call.rpc)(call.request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return call.convert(response)
