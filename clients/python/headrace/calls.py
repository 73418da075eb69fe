"""Every call of the API as a value: which RPC, what to send, how to read the answer.

Owns the pairing of requests with typed answers, so that the sync and the asyncio client differ in
how they wait and in nothing else. Does not open channels. Python values come in, Unary and
Streaming values go out, which client.py and aio.py run.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import Message as ProtobufMessage

from headrace import answers, completion
from headrace.conversations.messages import Messages, ToolOptions, assign_tools, chat_messages
from headrace.errors import invalid
from headrace.protobuf_fields import assign
from headrace.rpc import Streaming, Unary
from headrace.spec import GenerationOptions, chat_spec, generation_spec
from headrace.trace_context import metadata_of
from headrace.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Page:
    """One page of list_requests."""

    requests: tuple[answers.RequestSummary, ...]
    next_page_token: str


def generate(
    prompt: str | None, token_ids: Sequence[int] | None, traceparent: str | None, options: GenerationOptions
) -> Streaming:
    """Streams the answer to a prompt."""
    request = pb.GenerateRequest(spec=generation_spec(options, prompt, token_ids))
    return Streaming("Generate", request, metadata=metadata_of(traceparent))


def chat(
    messages: Messages,
    continue_last_message: bool | None,
    tools: ToolOptions,
    traceparent: str | None,
    options: GenerationOptions,
) -> Streaming:
    """Streams the answer to a conversation."""
    request = pb.ChatRequest(messages=chat_messages(messages), spec=chat_spec(options))
    assign_given(request, "continue_last_message", continue_last_message)
    assign_tools(request, tools)
    return Streaming("Chat", request, metadata=metadata_of(traceparent))


def complete(
    prompt: str | None, token_ids: Sequence[int] | None, traceparent: str | None, options: GenerationOptions
) -> Unary[completion.Completion]:
    """The whole answer to a prompt."""
    request = pb.CompleteRequest(spec=generation_spec(options, prompt, token_ids))
    convert = completion.completion_from_proto
    return Unary("Complete", request, convert, takes_long=True, metadata=metadata_of(traceparent))


def submit(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Messages | None,
    tools: ToolOptions,
    idempotency_key: str | None,
    traceparent: str | None,
    options: GenerationOptions,
) -> Unary[answers.Submitted]:
    """Starts a generation that outlives its readers.

    Without a key of the caller's, one is drawn: Submit may then be sent again after a broken
    connection (see channel.py) and still starts one generation only.
    """
    request = pb.SubmitRequest()
    assign_prompt(request, prompt, token_ids, messages, options)
    assign_tools(request, tools)
    assign(request, "idempotency_key", idempotency_key or uuid.uuid4().hex, "idempotency_key")
    num_outputs = request.spec.n if request.spec.HasField("n") else 1
    return Unary(
        "Submit",
        request,
        lambda response: answers.submitted_from_proto(response, num_outputs),
        metadata=metadata_of(traceparent),
    )


def assign_prompt(
    request: pb.SubmitRequest | pb.SessionSubmit,
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Messages | None,
    options: GenerationOptions,
) -> None:
    """Gives a request its spec, and its prompt in one of three ways.

    Raises:
        InvalidRequest: A value that the wire cannot carry, or not exactly one kind of prompt.
    """
    if messages is None:
        request.spec.CopyFrom(generation_spec(options, prompt, token_ids))
    elif prompt is not None or token_ids is not None:
        raise invalid("spec.prompt", "exactly one of prompt, token_ids and messages must be given")
    else:
        request.spec.CopyFrom(chat_spec(options))
        request.messages.extend(chat_messages(messages))


def subscribe(request: str | answers.Submitted, output_index: int | None, from_token: int) -> Streaming:
    """Reads a submitted or running generation from any token on."""
    message = pb.SubscribeRequest()
    assign(message, "request_id", request_id_of(request), "request_id")
    assign_given(message, "output_index", output_index)
    assign(message, "from_token", from_token, "from_token")
    return Streaming("Subscribe", message, request.num_outputs if isinstance(request, answers.Submitted) else None)


def cancel(request: str | answers.Submitted) -> Unary[bool]:
    """Ends a generation; the answer is whether it was still waiting or running."""
    message = pb.CancelRequest()
    assign(message, "request_id", request_id_of(request), "request_id")
    return Unary("Cancel", message, lambda response: bool(response.cancelled))


def list_requests(state: str | None, model: str | None, page_size: int | None, page_token: str) -> Unary[Page]:
    """One page of the caller's own generations, newest first."""
    request = pb.ListRequestsRequest(page_token=page_token)
    assign_given(request, "page_size", page_size)
    assign_given(request, "model", model)
    if state is not None:
        request.state = _state_number(state)
    return Unary("ListRequests", request, _page)


def tokenize(text: str, add_special_tokens: bool | None, model: str | None) -> Unary[tuple[int, ...]]:
    """Text to token ids."""
    request = pb.TokenizeRequest()
    assign(request, "text", text, "text")
    assign_given(request, "add_special_tokens", add_special_tokens)
    assign_given(request, "model", model)
    return Unary("Tokenize", request, lambda response: tuple(response.token_ids))


def detokenize(token_ids: Sequence[int], skip_special_tokens: bool | None, model: str | None) -> Unary[str]:
    """Token ids to text."""
    request = pb.DetokenizeRequest()
    assign(request, "token_ids", token_ids, "token_ids")
    assign_given(request, "skip_special_tokens", skip_special_tokens)
    assign_given(request, "model", model)
    return Unary("Detokenize", request, lambda response: str(response.text))


def get_model(model: str | None) -> Unary[answers.Model]:
    """What one model is and what it allows."""
    request = pb.GetModelRequest()
    assign_given(request, "model", model)
    return Unary("GetModel", request, lambda response: answers.model_from_proto(response.model))


def list_models() -> Unary[tuple[answers.Model, ...]]:
    """The models of the server."""
    return Unary("ListModels", pb.ListModelsRequest(), lambda r: tuple(map(answers.model_from_proto, r.models)))


def load(model: str | None) -> Unary[answers.Load]:
    """How busy the server is."""
    request = pb.GetLoadRequest()
    assign_given(request, "model", model)
    return Unary("GetLoad", request, answers.load_from_proto)


def request_id_of(request: str | answers.Submitted) -> str:
    """The id of a request that is given by its id or by what submit returned."""
    return request.request_id if isinstance(request, answers.Submitted) else request


def assign_given(request: ProtobufMessage, field: str, value: object) -> None:
    """Sets a field that is absent when the caller left it out."""
    if value is not None:
        assign(request, field, value, field)


def _state_number(state: str) -> pb.RequestState:
    try:
        return answers.STATE_NUMBERS[answers.RequestState(state)]
    except ValueError as error:
        names = ", ".join(answers.RequestState)
        raise invalid("state", f"must be one of {names} (given: {state!r:.80})") from error


def _page(response: pb.ListRequestsResponse) -> Page:
    return Page(tuple(map(answers.summary_from_proto, response.requests)), response.next_page_token)
