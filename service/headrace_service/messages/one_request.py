"""Calls that must hold one request: one that ends its sending without any is refused.

grpc reads the request of such a call itself, and leaves a call without one unanswered until its
deadline, which may be never. So grpc is given a handler of a stream in its place, which reads the
one request, or finds that there is none, and hands that on. What comes behind the first request is
not read: the first is answered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc

from headrace_service.messages import parsing

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context = grpc.aio.ServicerContext[Any, Any]


class OneRequestInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """An interceptor that goes before those that look at requests.

    They see handlers of one request.
    """

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]], details: grpc.HandlerCallDetails
    ) -> _Handler:
        """Returns the method's handler, or one that reads the request of a handler of one."""
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        return _reading(handler)


def _reading(handler: _Handler) -> _Handler:
    behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
    inner = cast(Callable[[Any, _Context], Awaitable[Any]], behaviour)
    remade = (
        grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    )

    async def answer(_: AsyncIterator[Any], context: _Context) -> Any:
        request = await context.read()
        is_missing = request is grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
        return await inner(parsing.MISSING if is_missing else request, context)

    return remade(
        answer,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
