"""grpc.health.v1 of a process: Check and Watch.

Owns the answers. What SERVING means is the process's: progress, not being alive. (The servicer that
ships with grpcio-health-checking loses a watcher's updates when another watcher of the same service
leaves, and lets one slow watcher hold up the others.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

_LOOK_EVERY_S = 0.1
_Context = grpc.aio.ServicerContext[Any, Any]
# Whether the service of a name serves; "" is the whole process, None says that there is no such
# service.
Serves = Callable[[str], bool | None]


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health of a process.

    Args:
        serves: asked at every Check, and ten times a second while anybody watches.
    """

    def __init__(self, serves: Serves) -> None:
        self._serves = serves

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
        serves = self._serves(service)
        if serves is None:
            return HealthCheckResponse.SERVICE_UNKNOWN
        return HealthCheckResponse.SERVING if serves else HealthCheckResponse.NOT_SERVING
