"""grpc.health.v1: whether this process would answer a generation that arrives now.

Owns Check and Watch. SERVING means progress, not a live process: it follows the engine's own state,
and a state grown stale counts as not serving. (The servicer that ships with grpcio-health-checking
loses a watcher's updates when another watcher of the same service leaves, and lets one slow watcher
hold up the others.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

_LOOK_EVERY_S = 0.1
_ENGINE = "engine/"
_Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health of this process.

    Args:
        is_serving: asked at every Check, and ten times a second while anybody watches.
        service_names: the services known, besides "" for the whole server.
        engines: asked for the engines of the configuration and whether each serves; they are known
            as "engine/ADDRESS".
    """

    def __init__(
        self, is_serving: Callable[[], bool], service_names: Iterable[str], engines: Callable[[], Mapping[str, bool]]
    ) -> None:
        self._is_serving = is_serving
        self._known = {"", *service_names}
        self._engines = engines

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> Any:
        """Answers the status of one service, or NOT_FOUND."""
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no service of that name")
        return HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """Sends the status now, and whenever it has changed."""
        sent = None
        while True:
            status = self._status(request.service)
            if status != sent:
                await context.write(HealthCheckResponse(status=status))
                sent = status
            await asyncio.sleep(_LOOK_EVERY_S)

    def _status(self, service: str) -> Any:
        serves: bool | None = None
        if service in self._known:
            serves = self._is_serving()
        elif service.startswith(_ENGINE):
            serves = self._engines().get(service.removeprefix(_ENGINE))
        if serves is None:
            return HealthCheckResponse.SERVICE_UNKNOWN
        return HealthCheckResponse.SERVING if serves else HealthCheckResponse.NOT_SERVING
