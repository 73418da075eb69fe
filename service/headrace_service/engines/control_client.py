"""The service's side of the supervisor's control socket.

It brings which models there are, and takes operators' requests there.

Owns the watch, which is made anew whenever it breaks (what was known last holds until then), and
the turning of the supervisor's refusals into `ServiceError`s. What the state means for this process
is `served_models`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from headrace_protos.control.v1 import control_pb2 as pb
from headrace_service import errors
from headrace_service.errors import ServiceError

_PAUSE_S = 0.2
_METHOD = "/headrace_control.v1.ControlService/"
_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
]
# What the supervisor answers on purpose; anything else is a failure of the connection.
_MEANT = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)

_log = structlog.get_logger("headrace.service")


class ControlClient:
    """One service's connection to its supervisor.

    Args:
        address: of the control socket, unix:PATH.
        service_name: names this process in the supervisor's logs.
        on_state: called with every state.
    """

    def __init__(self, address: str, service_name: str, on_state: Callable[[pb.ServerState], None]) -> None:
        self._address = address
        self._service_name = service_name
        self._on_state = on_state
        self._channel: grpc.aio.Channel | None = None

    async def run(self) -> None:
        """Watches until cancelled."""
        async with grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
            self._channel = channel
            watch = channel.unary_stream(
                f"{_METHOD}Watch",
                request_serializer=pb.WatchRequest.SerializeToString,
                response_deserializer=pb.ServerState.FromString,
            )
            while True:
                try:
                    async for state in watch(pb.WatchRequest(service_name=self._service_name), wait_for_ready=True):
                        self._on_state(state)
                except grpc.aio.AioRpcError as error:
                    _log.warning("control.disconnected", code=error.code().name)
                await asyncio.sleep(_PAUSE_S)

    async def load(self, name: str, memory_bytes: int) -> pb.LoadModelResponse:
        """Has a model loaded; returns when its backend is ready.

        Raises:
            ServiceError: what the supervisor refused it with.
        """
        request = pb.LoadModelRequest(name=name, memory_bytes=memory_bytes)
        response: pb.LoadModelResponse = await self._ask("LoadModel", request, pb.LoadModelResponse)
        return response

    async def unload(self, name: str, grace_ns: int) -> None:
        """Has a model unloaded; returns when its backend has ended.

        Raises ServiceError: what the supervisor refused it with.
        """
        request = pb.UnloadModelRequest(name=name, grace_ns=grace_ns)
        await self._ask("UnloadModel", request, pb.UnloadModelResponse)

    async def set_draining(self, draining: bool) -> None:
        """Has all services refuse new generations, or take them again.

        Raises ServiceError: UNAVAILABLE.
        """
        await self._ask("SetDraining", pb.SetDrainingRequest(draining=draining), pb.SetDrainingResponse)

    async def _ask(self, method: str, request: Any, response_type: Any) -> Any:
        if self._channel is None:
            raise errors.unavailable("the supervisor cannot be reached yet")
        ask = self._channel.unary_unary(
            _METHOD + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response_type.FromString,
        )
        try:
            return await ask(request)
        except grpc.aio.AioRpcError as error:
            if error.code() in _MEANT:
                raise ServiceError(error.code(), error.details() or "refused by the supervisor") from None
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise errors.unavailable(error.details() or "the supervisor cannot be reached") from None
            raise
