"""A supervisor without processes.

Serves the control socket, and its models are engines that the test made.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from headrace_protos.control.v1 import control_pb2 as pb
from headrace_protos.control.v1 import control_pb2_grpc


class FakeSupervisor(control_pb2_grpc.ControlServiceServicer):
    """One control socket; `state` is the test's, `tell` sends it."""

    def __init__(self, default_model: str) -> None:
        self.state = pb.ServerState(default_model=default_model)
        self.requests: list[Any] = []
        # What the next requests are refused with.
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        # Addresses of engines, by the name under which they can be loaded.
        self.loadable: dict[str, str] = {}
        self.num_watches = 0
        self._change = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self, address: str) -> None:
        self._server = grpc.aio.server()
        control_pb2_grpc.add_ControlServiceServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(address)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    def set_model(self, name: str, state: pb.BackendState, address: str = "", **fields: Any) -> None:
        """Says of one model where it is, and tells everybody."""
        others = [model for model in self.state.models if model.name != name]
        reported = pb.ModelBackend(name=name, state=state, engine_address=address, **fields)
        del self.state.models[:]
        self.state.models.extend(sorted([*others, reported], key=lambda model: model.name))
        self.tell()

    def tell(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> Any:
        self.num_watches += 1
        while True:
            change = self._change
            yield self.state
            await change.wait()

    async def LoadModel(self, request: pb.LoadModelRequest, context: Any) -> pb.LoadModelResponse:
        await self._take(request, context)
        existing = any(m.name == request.name and m.state == pb.BACKEND_STATE_READY for m in self.state.models)
        address, budget = self.loadable[request.name], request.memory_bytes
        self.set_model(request.name, pb.BACKEND_STATE_READY, address, memory_bytes=budget)
        return pb.LoadModelResponse(
            model=next(m for m in self.state.models if m.name == request.name), existing=existing
        )

    async def UnloadModel(self, request: pb.UnloadModelRequest, context: Any) -> pb.UnloadModelResponse:
        await self._take(request, context)
        self.set_model(request.name, pb.BACKEND_STATE_UNLOADED)
        return pb.UnloadModelResponse()

    async def SetDraining(self, request: pb.SetDrainingRequest, context: Any) -> pb.SetDrainingResponse:
        await self._take(request, context)
        self.state.draining = request.draining
        self.tell()
        return pb.SetDrainingResponse()

    async def _take(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        if self.refusal is not None:
            await context.abort(*self.refusal)
