"""The operator's clients, sync and asyncio: models, drain and memory of a running server.

Owns AdminClient and AsyncAdminClient, which are the same surface. What is sent and how answers are
read is in admin_calls.py. Python values come in; typed answers and the exceptions of errors.py come
out. The server asks for a key with the permission "admin".
"""

from __future__ import annotations

import datetime
from typing import Self, Unpack

import grpc

from headrace import admin_calls
from headrace.admin_calls import Draining, Loaded, RepositoryModel
from headrace.answers import MemoryPlan
from headrace.connections.aio_transport import AsyncTransport
from headrace.connections.call_reader import readable
from headrace.connections.connection import DEFAULT_SERVER, ConnectionOptions, endpoint
from headrace.connections.transport import Transport
from headrace.errors import from_rpc_error
from headrace.spec import TraceDetailName
from headrace.v1.admin_pb2_grpc import AdminServiceStub


class AdminClient:
    """What an operator does to a running server.

    Safe to share between threads; a context manager that closes its connections.
    """

    def __init__(self, server: str = DEFAULT_SERVER, **options: Unpack[ConnectionOptions]) -> None:
        """Prepares the connections, as Client."""
        self._transport = Transport(endpoint(server, **options), AdminServiceStub)

    def load_model(self, model: str, *, memory_bytes: int | None = None, timeout: float | None = None) -> Loaded:
        """Starts a backend for a model of the repository folder and returns when it serves.

        It may take minutes.

        Args:
            model: Name of a folder of the repository.
            memory_bytes: Memory of the device that it may take in all. Default: what its
                headrace.toml says, else the server's settings.
            timeout: Seconds to wait. Default: no limit.

        Raises:
            NotFound: There is no such folder.
            Overloaded: The models loaded leave less memory than that; the message has the
                arithmetic.
        """
        return self._transport.unary(admin_calls.load_model(model, memory_bytes), timeout)

    def unload_model(
        self, model: str, *, grace: float | datetime.timedelta | None = None, timeout: float | None = None
    ) -> None:
        """Takes a model away and returns when its memory is free.

        Args:
            model: Name of a served model.
            grace: How long open generations may go on, as seconds or timedelta; at most 1 hour.
                Default: the server's shutdown grace.
            timeout: Seconds to wait. Default: no limit.

        Raises:
            NotFound: No such model is served.
        """
        return self._transport.unary(admin_calls.unload_model(model, grace), timeout)

    def list_repository(self, *, timeout: float | None = None) -> tuple[RepositoryModel, ...]:
        """The models of the repository folder and those served, with their states, by name."""
        return self._transport.unary(admin_calls.list_repository(), timeout)

    def drain(self, *, timeout: float | None = None) -> Draining:
        """Takes no new generations on any model; health is NOT_SERVING, and what runs goes on."""
        return self._transport.unary(admin_calls.drain(resume=False), timeout)

    def resume(self, *, timeout: float | None = None) -> Draining:
        """Takes new generations again."""
        return self._transport.unary(admin_calls.drain(resume=True), timeout)

    def memory_plan(self, model: str | None = None, *, timeout: float | None = None) -> MemoryPlan | None:
        """How a model's memory is divided; None while it loads.

        Default: the server's default model.
        """
        return self._transport.unary(admin_calls.memory_plan(model), timeout)

    def set_trace_detail(self, detail: TraceDetailName, *, timeout: float | None = None) -> None:
        """Sets how much of each token is traced from now on, by all services.

        It holds for requests that do not say so themselves.

        Raises:
            InvalidRequest: Not "off", "array" or "span".
            HeadraceError: FAILED_PRECONDITION; telemetry is off.
        """
        return self._transport.unary(admin_calls.set_trace_detail(detail), timeout)

    def get_trace(
        self, *, request_id: str | None = None, trace_id: str | None = None, timeout: float | None = None
    ) -> bytes:
        """Returns a recent trace as serialized opentelemetry.proto.trace.v1.TracesData.

        It has the request's spans, and those of the steps that it was in.

        Args:
            request_id: The request of the trace; exactly one of both is given.
            trace_id: W3C trace id: 32 lower-case hex digits.
            timeout: Seconds to wait. Default: no limit.

        Raises:
            NotFound: It is not known, was not traced, or has been forgotten.
        """
        call = readable(self._transport.stream(admin_calls.get_trace(request_id, trace_id), timeout))
        parts: list[bytes] = []
        try:
            while True:
                parts.append(next(call).traces_data)
        except StopIteration:
            return b"".join(parts)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def close(self) -> None:
        """Closes the connections; calls that still run are cancelled."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncAdminClient:
    """An AdminClient for one event loop."""

    def __init__(self, server: str = DEFAULT_SERVER, **options: Unpack[ConnectionOptions]) -> None:
        """Takes the arguments of AsyncClient."""
        self._transport = AsyncTransport(endpoint(server, **options), AdminServiceStub)

    async def load_model(self, model: str, *, memory_bytes: int | None = None, timeout: float | None = None) -> Loaded:
        """Does what AdminClient.load_model does."""
        return await self._transport.unary(admin_calls.load_model(model, memory_bytes), timeout)

    async def unload_model(
        self, model: str, *, grace: float | datetime.timedelta | None = None, timeout: float | None = None
    ) -> None:
        """Does what AdminClient.unload_model does."""
        return await self._transport.unary(admin_calls.unload_model(model, grace), timeout)

    async def list_repository(self, *, timeout: float | None = None) -> tuple[RepositoryModel, ...]:
        """Does what AdminClient.list_repository does."""
        return await self._transport.unary(admin_calls.list_repository(), timeout)

    async def drain(self, *, timeout: float | None = None) -> Draining:
        """Does what AdminClient.drain does."""
        return await self._transport.unary(admin_calls.drain(resume=False), timeout)

    async def resume(self, *, timeout: float | None = None) -> Draining:
        """Does what AdminClient.resume does."""
        return await self._transport.unary(admin_calls.drain(resume=True), timeout)

    async def memory_plan(self, model: str | None = None, *, timeout: float | None = None) -> MemoryPlan | None:
        """Does what AdminClient.memory_plan does."""
        return await self._transport.unary(admin_calls.memory_plan(model), timeout)

    async def set_trace_detail(self, detail: TraceDetailName, *, timeout: float | None = None) -> None:
        """Does what AdminClient.set_trace_detail does."""
        return await self._transport.unary(admin_calls.set_trace_detail(detail), timeout)

    async def get_trace(
        self, *, request_id: str | None = None, trace_id: str | None = None, timeout: float | None = None
    ) -> bytes:
        """Does what AdminClient.get_trace does."""
        call = self._transport.stream(admin_calls.get_trace(request_id, trace_id), timeout)
        try:
            return b"".join([response.traces_data async for response in call])
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def close(self) -> None:
        """Closes the connections; calls that still run are cancelled."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
