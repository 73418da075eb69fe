"""An address that answers health checks alone: for a supervisor, a container's check, a kubelet.

Owns the listener and its bounds. It speaks neither TLS nor keys, because what probes a process
seldom has any, and tells nothing but whether the process serves. Two services are known: "" is what
the process says of itself, to decide whether it gets work; ALIVE is SERVING whenever there is an
answer, to decide whether it has to be killed. The answer comes from the process's event loop, so
one that hangs gives none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from headrace_credentials import stranger_limits
from headrace_health.address import host_and_port, joined
from headrace_health.servicer import HealthServicer, Serves

ALIVE: Final = "alive"
_BEGIN_TIMEOUT_S = 5.0
_MAX_METADATA_BYTES = 8 << 10
_MAX_MESSAGE_BYTES = 4 << 10
_MAX_CONNECTIONS = 64
_MAX_CALLS = 16
_STOP_S = 1.0


class CannotProbe(Exception):
    """The address is taken, or not this machine's; the message names it."""


class Probe:
    """One listener, from its start to its end.

    Args:
        address: unix:PATH, or HOST:PORT.
        serves: whether the process serves; ALIVE is not asked for.
        interceptors: what stands before the handlers.
    """

    def __init__(
        self,
        address: str,
        serves: Serves,
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    ) -> None:
        self._address = address
        self._server = grpc.aio.server(interceptors=list(interceptors), options=_options())
        servicer = HealthServicer(lambda service: service == ALIVE or serves(service))
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)

    async def start(self) -> str:
        """Listens.

        Returns:
            The address with the port that was given.

        Raises:
            CannotProbe: the address can't be listened on.
        """
        try:
            port = self._server.add_insecure_port(self._address)
        except RuntimeError:
            port = 0
        if not port:
            raise CannotProbe(f"cannot listen on {self._address} for probes: it is taken, or not this machine's")
        await self._server.start()
        return self._address if self._address.startswith("unix:") else joined(host_and_port(self._address)[0], port)

    async def stop(self) -> None:
        """Ends the listener, and watchers after a second."""
        await self._server.stop(_STOP_S)


def _options() -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", _MAX_CALLS),
        ("grpc.max_allowed_incoming_connections", _MAX_CONNECTIONS),
        *stranger_limits.server_options(_BEGIN_TIMEOUT_S, _MAX_METADATA_BYTES),
    ]
