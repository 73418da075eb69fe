"""Whether a service serves, asked of itself: grpc.health.v1 at its address for probes.

Owns the wait between start and the ready line. Nothing is inferred from processes being alive. The
public addresses are no place to ask: they may demand certificates and keys that the supervisor does
not have, and would answer for one of several services. A service opens them before it answers here.
"""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

# The first answer comes before the service has heard that the models are loaded; what takes longer
# than that is not to be asked all the time.
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.05


async def until_serving(address: str) -> None:
    """Returns when the service whose probe address this is (unix:PATH) says SERVING.

    Waits without end.
    """
    options = [
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 200),
        ("grpc.enable_http_proxy", 0),
    ]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        pause_s = _FIRST_PAUSE_S
        while not await _serving(stub):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _serving(stub: health_pb2_grpc.HealthStub) -> bool:
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
    except grpc.aio.AioRpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
