"""For services whose handlers are not ours (health checking, reflection).

Bytes that are no message are the caller's mistake there too.

Owns the rule that `parsing` keeps for our own RPCs. Generated code gives grpc a deserializer that
raises, and grpc answers that with UNKNOWN and the name of a Python class; in its place stands one
that does not, and a handler that refuses what it could not read. Unknown fields are left to those
services.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf import message

from headrace_service import errors
from headrace_service.messages import parsing

_FOREIGN_PREFIXES = ("/grpc.health.", "/grpc.reflection.")
_MALFORMED = object()
_Context = grpc.aio.ServicerContext[Any, Any]
# grpc's class is generic for type checkers only.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class ForeignParsingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Stands next to the handlers; our own pass untouched."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]], details: grpc.HandlerCallDetails
    ) -> _Handler:
        """Returns the method's handler, or one that does the same with what it can read."""
        handler = await continuation(details)
        if handler is None or not details.method.startswith(_FOREIGN_PREFIXES):
            return handler
        return _checked(handler)


def _checked(handler: _Handler) -> _Handler:
    forms = {"request_deserializer": _lenient(handler), "response_serializer": handler.response_serializer}
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(_of_stream(handler.stream_stream), **forms)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(_of_one(handler.unary_stream), **forms)
    return grpc.unary_unary_rpc_method_handler(_of_one(handler.unary_unary), **forms)


def _lenient(handler: _Handler) -> Callable[[bytes], Any]:
    read = handler.request_deserializer
    assert read is not None, "generated code gives every method one"

    def deserialize(data: bytes) -> Any:
        try:
            return read(data)
        except message.DecodeError:
            return _MALFORMED

    return deserialize


def _of_one(inner: Any) -> Any:
    async def answer(request: Any, context: _Context) -> Any:
        await _refuse_unreadable(request, context)
        return await inner(request, context)

    return answer


def _of_stream(inner: Any) -> Any:
    async def checked(requests: AsyncIterator[Any], context: _Context) -> AsyncIterator[Any]:
        async for request in requests:
            await _refuse_unreadable(request, context)
            yield request

    async def answer(requests: AsyncIterator[Any], context: _Context) -> AsyncIterator[Any]:
        async for response in inner(checked(requests, context), context):
            yield response

    return answer


async def _refuse_unreadable(request: Any, context: _Context) -> None:
    if request is _MALFORMED or request is parsing.MISSING:
        error = errors.malformed() if request is _MALFORMED else errors.no_request()
        await context.abort(error.code, error.message, trailing_metadata=errors.trailing_metadata(error))
