"""Uvicorn's server within a service process: its sockets, TLS, and its end.

Owns binding, what the sockets ask of the kernel, and the handshake's limit. Signals, logs and the
event loop are the process's own. Uvicorn because it is the ASGI server of most Python services, and
httptools because it parses in C.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from headrace_health.address import host_and_port, joined
from headrace_service.config import ServiceConfig
from headrace_service.listening import MAX_METADATA_BYTES, CannotListen
from headrace_service.openai.http.bounded_protocol import BoundedProtocol, ConnectionLimits
from headrace_service.openai.http.tls_acceptor import TlsAcceptor

# A client keeps idle connections for some seconds up to a minute; who closes first is to be it.
_IDLE_S = 75
_BACKLOG = 2048
_PROBES = 3


class HttpServer(uvicorn.Server):
    """The HTTP server of one process.

    Args:
        config: limits.
        app: answers requests.
        tls: gives each connection to a HOST:PORT its certificate; None: they are plain.
    """

    def __init__(self, config: ServiceConfig, app: ASGIApp, tls: Callable[[], ssl.SSLContext] | None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=1,
                reset_contextvars=True,
            )
        )
        self._service = config
        self._tls = tls
        self._sockets: list[socket.socket] = []
        self._limits = ConnectionLimits(
            max_connections=config.max_connections,
            max_head_bytes=MAX_METADATA_BYTES,
            head_timeout_s=config.handshake_timeout_s,
            write_timeout_s=config.reader_stall_timeout_s,
        )

    def bind(self) -> list[str]:
        """Takes the addresses; returns them with the ports that were given.

        Raises:
            CannotListen: an address is taken, or not this machine's.
        """
        self._sockets = [_bound(address, self._service) for address in self._service.openai_listen]
        return [_address_of(bound) for bound in self._sockets]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen at the addresses taken."""
        self.servers = [await self._new_listener(bound) for bound in self._sockets]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process."""
        yield

    async def _new_listener(self, bound: socket.socket) -> Any:
        """Returns what uvicorn closes in the end."""
        if self._tls is None or bound.family == socket.AF_UNIX:
            return await asyncio.get_running_loop().create_server(self._new_protocol, sock=bound, backlog=_BACKLOG)
        bound.setblocking(False)
        bound.listen(_BACKLOG)
        return TlsAcceptor(bound, self._tls, self._service.handshake_timeout_s, self._new_protocol, self._has_room)

    def _has_room(self, num_handshakes: int) -> bool:
        return len(self.server_state.connections) + num_handshakes < self._limits.max_connections

    def _new_protocol(self) -> BoundedProtocol:
        return BoundedProtocol(self._limits, self.config, self.server_state, {})


def _bound(address: str, config: ServiceConfig) -> socket.socket:
    path = address.removeprefix("unix:")
    try:
        return _bound_unix(path) if path != address else _bound_tcp(address, config)
    except (OSError, UnicodeError) as error:
        raise CannotListen(f"cannot listen on {address}: {getattr(error, 'strerror', None) or error}") from None


def _bound_unix(path: str) -> socket.socket:
    """A socket at a path, in the place of one that an earlier process left there."""
    if pathlib.Path(path).is_socket():
        pathlib.Path(path).unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(path)
    return bound


def _bound_tcp(address: str, config: ServiceConfig) -> socket.socket:
    """A socket whose connections end when a peer has vanished, or takes nothing for too long."""
    host, port = host_and_port(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, sockaddr = found[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if config.reuse_port:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(config.keepalive_s)))
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(config.keepalive_timeout_s / _PROBES)))
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(config.reader_stall_timeout_s * 1e3))
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        bound.bind(sockaddr)
    except OSError:
        bound.close()
        raise
    return bound


def _address_of(bound: socket.socket) -> str:
    name = bound.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host, port = name[:2]
    return joined(host, port)
