"""The control socket: services watch the models here, and bring operators' requests.

Owns the gRPC server in the private runtime folder and the form of its answers. Short requests are
answered, long ones waited for; everything that is decided is decided in `backend_table`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message

from headrace_protos.control.v1 import control_pb2 as pb
from headrace_supervisor.models.backend_table import BackendTable
from headrace_supervisor.refusals import Refused, invalid

_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ControlService"].full_name
_MAX_GRACE_S = 3600.0
_MAX_MESSAGE_BYTES = 4 << 20
Request = TypeVar("Request", bound=Message)
_Context = grpc.aio.ServicerContext[Any, Any]

_log = structlog.get_logger(process="supervisor")


class ControlServer:
    """ControlService over one table."""

    def __init__(self, table: BackendTable) -> None:
        self._table = table
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)])
        handlers = {
            "Watch": grpc.unary_stream_rpc_method_handler(
                self._watch, pb.WatchRequest.FromString, pb.ServerState.SerializeToString
            ),
            "LoadModel": _unary(pb.LoadModelRequest, self._load),
            "UnloadModel": _unary(pb.UnloadModelRequest, self._unload),
            "SetDraining": _unary(pb.SetDrainingRequest, self._set_draining),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE_NAME, handlers),))

    async def start(self, address: str) -> None:
        """Listens at unix:PATH, in a folder that only this user may enter."""
        if self._server.add_insecure_port(address) == 0:
            raise OSError(f"can't listen on {address}")
        await self._server.start()

    async def stop(self) -> None:
        """Ends all watches and whatever is waited for."""
        await self._server.stop(0)

    async def _watch(self, request: pb.WatchRequest, context: _Context) -> AsyncIterator[pb.ServerState]:
        _log.debug("watched", by=request.service_name[:64])
        async for state in self._table.states():
            yield state

    async def _load(self, request: pb.LoadModelRequest) -> pb.LoadModelResponse:
        model, existing = await self._table.load(request.name, request.memory_bytes)
        return pb.LoadModelResponse(model=model, existing=existing)

    async def _unload(self, request: pb.UnloadModelRequest) -> pb.UnloadModelResponse:
        grace_s = request.grace_ns / 1e9
        if grace_s > _MAX_GRACE_S:
            raise invalid(f"grace: must be at most {_MAX_GRACE_S:.0f} s")
        await self._table.unload(request.name, grace_s)
        return pb.UnloadModelResponse()

    async def _set_draining(self, request: pb.SetDrainingRequest) -> pb.SetDrainingResponse:
        self._table.set_draining(request.draining)
        return pb.SetDrainingResponse()


def _unary(
    request_type: type[Request], handler: Callable[[Request], Awaitable[Message]]
) -> grpc.RpcMethodHandler[Any, Any]:
    async def answer(data: bytes, context: _Context) -> Message:
        try:
            return await handler(request_type.FromString(data))
        except Refused as refused:
            await context.abort(refused.code, str(refused))
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a valid message of this RPC")
        raise AssertionError("abort always raises")

    return grpc.unary_unary_rpc_method_handler(answer, None, lambda message: message.SerializeToString())
