"""A gRPC method handler with a frame around what it does, whichever of the four kinds it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, _Context], Awaitable[Any]]
# Calls the behaviour that it is given, with the request and the context of the call.
Frame = Callable[[Behaviour, Any, _Context], Awaitable[Any]]


def framed(handler: _Handler, frame: Frame) -> _Handler:
    """Returns a handler of the same kind, whose calls run inside the frame."""
    inner, remade = _parts_of(handler)

    async def answer(request: Any, context: _Context) -> Any:
        return await frame(inner, request, context)

    return remade(
        answer,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _parts_of(handler: _Handler) -> tuple[Behaviour, Callable[..., _Handler]]:
    """Returns what a handler does, and what makes one of its kind."""
    if handler.request_streaming:
        inner, remade = (
            (handler.stream_stream, grpc.stream_stream_rpc_method_handler)
            if handler.response_streaming
            else (handler.stream_unary, grpc.stream_unary_rpc_method_handler)
        )
    else:
        inner, remade = (
            (handler.unary_stream, grpc.unary_stream_rpc_method_handler)
            if handler.response_streaming
            else (handler.unary_unary, grpc.unary_unary_rpc_method_handler)
        )
    assert asyncio.iscoroutinefunction(inner), "handlers of this server are coroutines"
    return cast(Behaviour, inner), remade
