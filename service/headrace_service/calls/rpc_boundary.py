"""Between grpc and the handlers: every call ends with one status that names no internals.

Owns parsing before a handler runs, and the status that ends a call whose handler raised
(`failures` says which). Handlers take a parsed request and a `Call`, and raise `ServiceError`.
Cancellation passes through untouched.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf import message

from headrace_service import errors
from headrace_service.calls import failures
from headrace_service.calls.call import Call, Context
from headrace_service.messages import parsing

Request = TypeVar("Request", bound=message.Message)
Response = TypeVar("Response", bound=message.Message)


def unary(
    request_type: type[Request], response_type: type[Response], handler: Callable[[Request, Call], Awaitable[Response]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns the method handler of an RPC with one answer."""
    return _unary(request_type, handler, response_type.SerializeToString)


def unary_encoded(
    request_type: type[Request], handler: Callable[[Request, Call], Awaitable[bytes]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns the method handler of an RPC with one answer, which its handler gives serialized."""
    return _unary(request_type, handler, None)


def _unary(
    request_type: type[Request], handler: Callable[[Request, Call], Awaitable[Any]], serializer: Any
) -> grpc.RpcMethodHandler[Any, Any]:
    async def answer(request: parsing.Unparsed[Request], context: Context) -> Any:
        try:
            call = Call.of(context)
            with call.caller.open_call():
                return await handler(request.parse(), call)
        except Exception as error:
            await _abort(context, error)
            raise AssertionError("abort always raises") from error

    return grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=parsing.deserializer(request_type), response_serializer=serializer
    )


def streaming(
    request_type: type[Request], handler: Callable[[Request, Call], Awaitable[None]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns the method handler of an RPC that streams.

    Its handler writes serialized messages to `call.context`.
    """

    async def stream(request: parsing.Unparsed[Request], context: Context) -> None:
        try:
            call = Call.of(context)
            with call.caller.open_call():
                await handler(request.parse(), call)
        except Exception as error:
            await _abort(context, error)

    return grpc.unary_stream_rpc_method_handler(
        stream, request_deserializer=parsing.deserializer(request_type), response_serializer=None
    )


def bidirectional(
    request_type: type[Request],
    handler: Callable[[AsyncIterator[parsing.Unparsed[Request]], Call], Awaitable[None]],
) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns the method handler of an RPC that streams both ways.

    Its handler parses each request and writes serialized messages.
    """

    async def stream(requests: AsyncIterator[parsing.Unparsed[Request]], context: Context) -> None:
        try:
            call = Call.of(context)
            with call.caller.open_call():
                await handler(requests, call)
        except Exception as error:
            await _abort(context, error)

    return grpc.stream_stream_rpc_method_handler(
        stream, request_deserializer=parsing.deserializer(request_type), response_serializer=None
    )


async def _abort(context: Context, error: Exception) -> None:
    """Ends the call with the status that the error stands for, and the trailers it has already."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    failure = failures.failure_of(context, error)
    trailers = (*errors.trailing_metadata(failure), *(context.trailing_metadata() or ()))
    await context.abort(failure.code, failure.message, trailing_metadata=trailers)
