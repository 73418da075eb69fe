"""The channels of a sync client: opened, used in turn, closed.

Owns the grpc channels and how a failed call becomes an exception. Does not know what calls mean
(calls.py) nor what a stream remembers (stream_state.py). Calls as values come in and go out through
generated stubs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc

from headrace.connections.connection import Endpoint, call_timeout
from headrace.errors import from_rpc_error
from headrace.rpc import Streaming, Unary

T = TypeVar("T")


class Transport:
    """The connections of one client. Safe to share between threads."""

    def __init__(self, endpoint: Endpoint, stub: Callable[[grpc.Channel], Any]) -> None:
        """Prepares the channels; each connects with its first call."""
        self._endpoint = endpoint
        self._channels = [_channel(endpoint) for _ in range(endpoint.channels)]
        self._stubs = [stub(channel) for channel in self._channels]
        self._turn = itertools.count()

    def unary(self, call: Unary[T], timeout: float | None) -> T:
        """Runs a call with one answer. Raises HeadraceError."""
        if timeout is None and not call.takes_long:
            timeout = self._endpoint.timeout
        try:
            response = self._rpc(call.rpc)(call.request, timeout=call_timeout(timeout), metadata=self._metadata(call))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return call.convert(response)

    def stream(self, call: Streaming, timeout: float | None) -> Any:
        """Opens a call that answers with a stream."""
        return self._rpc(call.rpc)(call.request, timeout=call_timeout(timeout), metadata=self._metadata(call))

    def session(self, requests: Iterator[Any], timeout: float | None) -> Any:
        """Opens a session that sends what the iterator gives."""
        return self._rpc("Session")(requests, timeout=call_timeout(timeout), metadata=self._endpoint.metadata)

    def close(self) -> None:
        """Closes all connections; calls that still run are cancelled."""
        for channel in self._channels:
            channel.close()

    def _metadata(self, call: Unary[Any] | Streaming) -> Sequence[tuple[str, str]]:
        return (*self._endpoint.metadata, *call.metadata) if call.metadata else self._endpoint.metadata

    def _rpc(self, name: str) -> Any:
        """The method on the channel whose turn it is."""
        return getattr(self._stubs[next(self._turn) % len(self._stubs)], name)


def _channel(endpoint: Endpoint) -> grpc.Channel:
    if endpoint.credentials is None:
        return grpc.insecure_channel(endpoint.server, endpoint.options)
    return grpc.secure_channel(endpoint.server, endpoint.credentials, endpoint.options)
