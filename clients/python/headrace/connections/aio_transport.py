"""The channels of an asyncio client: opened, used in turn, closed.

As transport.py, for one event loop.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from headrace.connections.connection import Endpoint, call_timeout
from headrace.errors import from_rpc_error
from headrace.rpc import Streaming, Unary

T = TypeVar("T")


@functools.cache
def _hold_grpc() -> None:
    """Keeps grpc.aio running for as long as the process lives.

    Otherwise the last of its objects that is collected stops its poller, and may wait for it
    forever, in the middle of a program that uses no client at that moment (grpc#22365).
    """
    grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # public, and not in grpc-stubs


class AsyncTransport:
    """The connections of one client."""

    def __init__(self, endpoint: Endpoint, stub: Callable[[Any], Any]) -> None:
        """Remembers what to open.

        The channels are made by the first call, because grpc.aio ties them to the running loop.
        """
        self._endpoint = endpoint
        self._stub = stub
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[Any] = []
        self._turn = itertools.count()

    async def unary(self, call: Unary[T], timeout: float | None) -> T:
        """Runs a call with one answer. Raises HeadraceError."""
        if timeout is None and not call.takes_long:
            timeout = self._endpoint.timeout
        try:
            response = await self._rpc(call.rpc)(
                call.request, timeout=call_timeout(timeout), metadata=self._metadata(call)
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return call.convert(response)

    def stream(self, call: Streaming, timeout: float | None) -> Any:
        """Opens a call that answers with a stream."""
        return self._rpc(call.rpc)(call.request, timeout=call_timeout(timeout), metadata=self._metadata(call))

    def session(self, requests: AsyncIterator[Any], timeout: float | None) -> Any:
        """Opens a session that sends what the iterator gives."""
        return self._rpc("Session")(requests, timeout=call_timeout(timeout), metadata=self._endpoint.metadata)

    async def close(self) -> None:
        """Closes all connections; calls that still run are cancelled."""
        for channel in self._channels:
            await channel.close(None)

    def _metadata(self, call: Unary[Any] | Streaming) -> Sequence[tuple[str, str]]:
        return (*self._endpoint.metadata, *call.metadata) if call.metadata else self._endpoint.metadata

    def _rpc(self, name: str) -> Any:
        """The method on the channel whose turn it is."""
        if not self._stubs:
            _hold_grpc()
            self._channels = [_channel(self._endpoint) for _ in range(self._endpoint.channels)]
            self._stubs = [self._stub(channel) for channel in self._channels]
        return getattr(self._stubs[next(self._turn) % len(self._stubs)], name)


def _channel(endpoint: Endpoint) -> grpc.aio.Channel:
    if endpoint.credentials is None:
        return grpc.aio.insecure_channel(endpoint.server, endpoint.options)
    return grpc.aio.secure_channel(endpoint.server, endpoint.credentials, endpoint.options)
