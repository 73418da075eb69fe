"""The gRPC entry for those who have Ray Serve: headrace.v1 through Serve's own proxies.

    serve.start(grpc_options={"port": 9000, "grpc_servicer_functions": [gateway.SERVICER]})
    serve.run(gateway.application("headrace"), name="headrace")

Owns the way from a method of `InferenceService` to a service of the deployment, message by message:
no method is written by hand, each follows from the descriptor. Serve's proxies carry messages,
status and its sentence, cancellation and deadlines; they carry no details of a status. A caller who
needs those, or the last of the milliseconds, asks a service itself.
"""

from __future__ import annotations

import asyncio
import itertools
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from ray import serve

from headrace.v1 import inference_pb2
from headrace_ray import deployment, nodes
from headrace_ray.errors import DeploymentError

SERVICER = "headrace.v1.inference_pb2_grpc.add_InferenceServiceServicer_to_server"
# Serve counts streams as requests; a service refuses more than this by itself.
_MOST_CALLS = 4096
_KNOWN_S = 2.0
_MAX_MESSAGE_BYTES = 64 << 20
# What a caller's metadata says to Serve, or to the connection that ends there.
_NOT_PASSED = frozenset({"application", "request_id", "multiplexed_model_id", "session_id", "user-agent", "te"})


class CallEnded(Exception):
    """A call ended with another status than OK; Serve tells the caller which."""


class Gateway:
    """One replica of the entry: its channels to the services of a deployment.

    Args:
        name: the deployment's.
        ca: PEM file on the replica's node of the CA of the services' certificates; None: they speak
            no TLS.
        server_name: name in their certificates; "": their addresses.
    """

    def __init__(self, name: str, ca: str | None, server_name: str) -> None:
        self._name = name
        self._credentials = grpc.ssl_channel_credentials(pathlib.Path(ca).read_bytes()) if ca is not None else None
        named = [("grpc.ssl_target_name_override", server_name)] if server_name else []
        sizes = ("grpc.max_send_message_length", "grpc.max_receive_message_length")
        self._options = [*((size, _MAX_MESSAGE_BYTES) for size in sizes), ("grpc.enable_http_proxy", 0), *named]
        self._own = nodes.own()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._addresses: list[str] = []
        self._known_until_s = 0.0
        self._turn = itertools.count()

    def call(self, method: MethodDescriptor, kind: str) -> Callable[..., Any]:
        """Returns the method of a service that serves, as grpc calls it. Raises CallEnded."""
        if not self._addresses:
            raise CallEnded("no service of the deployment serves")
        address = self._addresses[next(self._turn) % len(self._addresses)]
        if address not in self._channels:
            self._channels[address] = self._new_channel(address)
        path = f"/{method.containing_service.full_name}/{method.name}"
        made: Callable[..., Any] = getattr(self._channels[address], kind)(
            path,
            request_serializer=message_factory.GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        return made

    async def look_around(self) -> None:
        """Learns which services serve, at most every two seconds; the own node's goes first."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._known_until_s and self._addresses:
            return
        self._known_until_s = now_s + _KNOWN_S
        try:
            found = await asyncio.to_thread(deployment.status, self._name)
        except DeploymentError:
            # While the controller moves to another node, the services that were known go on.
            return
        serving = {report.address: report for report in found.services.values() if report.state == "serving"}
        own = [address for address, report in serving.items() if report.node_id == self._own.node_id]
        self._addresses = own or sorted(serving)
        for address in set(self._channels) - set(serving):
            # Streams on it go on to their end; nobody else holds the channel.
            del self._channels[address]

    def _new_channel(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=self._options)
        return grpc.aio.secure_channel(address, self._credentials, options=self._options)


def application(
    name: str = "headrace", *, ca: str | None = None, server_name: str = "", replicas: int = 1
) -> serve.Application:
    """Returns the entry to a deployment for `serve.run`.

    Args:
        name: the deployment's.
        ca: as for `Gateway`.
        server_name: as for `Gateway`.
        replicas: processes that forward.
    """
    made = serve.deployment(
        Gateway,
        name="HeadraceGateway",
        num_replicas=replicas,
        max_ongoing_requests=_MOST_CALLS,
        ray_actor_options={"num_cpus": 0},
    )
    return made.bind(name, ca, server_name)


def _unary(method: MethodDescriptor) -> Callable[..., Any]:
    async def forward(self: Gateway, request: Any, grpc_context: Any) -> Any:
        await self.look_around()
        call = _made(self, method, "unary_unary", request, grpc_context)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise _ended(error, grpc_context) from None
        finally:
            call.cancel()

    return forward


def _stream(method: MethodDescriptor) -> Callable[..., Any]:
    kind = "stream_stream" if method.client_streaming else "unary_stream"

    async def forward(self: Gateway, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        await self.look_around()
        call = _made(self, method, kind, request, grpc_context)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise _ended(error, grpc_context) from None
        finally:
            # The caller has left, or its deadline has passed.
            call.cancel()

    return forward


def _made(gateway: Gateway, method: MethodDescriptor, kind: str, request: Any, grpc_context: Any) -> Any:
    """Begins the call at a service, with what the caller's metadata says to it."""
    passed = [
        (key, value)
        for key, value in grpc_context.invocation_metadata()
        if key not in _NOT_PASSED and not key.startswith("grpc-")
    ]
    try:
        return gateway.call(method, kind)(request, metadata=passed)
    except CallEnded as ended:
        grpc_context.set_code(grpc.StatusCode.UNAVAILABLE)
        grpc_context.set_details(str(ended))
        raise


def _ended(error: grpc.aio.AioRpcError, grpc_context: Any) -> CallEnded:
    """Returns what to raise so that Serve ends the caller's call with a service's status."""
    grpc_context.set_code(error.code())
    grpc_context.set_details(error.details() or "")
    return CallEnded(error.details() or error.code().name)


def _add_methods() -> None:
    for method in inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods:
        forward = _stream(method) if method.server_streaming else _unary(method)
        forward.__name__ = method.name
        forward.__qualname__ = f"Gateway.{method.name}"
        forward.__doc__ = f"Forwards {method.full_name}."
        setattr(Gateway, method.name, forward)


_add_methods()
