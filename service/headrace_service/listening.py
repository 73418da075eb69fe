"""Addresses and connections of a service process.

Owns the options of the gRPC server, what each of them corrects, and binding: with TLS on HOST:PORT
where there is a certificate, plain on Unix sockets.
"""

from __future__ import annotations

import grpc

from headrace_credentials import stranger_limits
from headrace_credentials.server_tls import ServerTls
from headrace_health.address import host_and_port, joined
from headrace_service.config import ServiceConfig
from headrace_service.errors import CannotStart

MAX_METADATA_BYTES = 8 << 10
# What calls that are open still get when their server stops, in seconds.
STOP_S = 1.0
# Above what the interceptor allows, so that it can answer a key of 64 KiB as it answers any other
# wrong one.
_MAX_TRANSPORT_METADATA_BYTES = 80 << 10


class CannotListen(CannotStart):
    """An address is taken or not ours; the text names it."""


def channel_options(config: ServiceConfig) -> list[tuple[str, int]]:
    """Returns the server's options.

    Each corrects a default that was measured to harm (unbounded messages, a shared port, late
    pings).
    """
    options = [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.so_reuseport", int(config.reuse_port)),
        ("grpc.max_concurrent_streams", config.max_connection_streams),
        # Counted for each address. What comes beyond is closed before its handshake.
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        # Calls that wait for the event loop; beyond these they end CANCELLED before any handler
        # sees them, and admission is ours. Each may hold metadata of the size below: 5,000 at once
        # with 65 kB took 310 MiB.
        ("grpc.server.max_pending_requests", 8_000),
        ("grpc.server.max_pending_requests_hard_limit", 16_000),
        ("grpc.keepalive_time_ms", int(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(config.keepalive_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(config.keepalive_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        # A client that pings more often, twice in a row, is sent away.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 2),
        *stranger_limits.server_options(config.handshake_timeout_s, _MAX_TRANSPORT_METADATA_BYTES),
    ]
    ends = (("idle", config.max_connection_idle_s), ("age", config.max_connection_age_s))
    return options + [
        (f"grpc.max_connection_{kind}_ms", max(1, int(seconds * 1000))) for kind, seconds in ends if seconds
    ]


def bind(server: grpc.aio.Server, address: str, tls: ServerTls | None) -> str:
    """Makes a server listen on an address, with TLS if there is any and the address is HOST:PORT.

    Returns:
        The address with the port that was given.

    Raises:
        CannotListen: the address is taken or not this machine's.
    """
    try:
        if tls is None or address.startswith("unix:"):
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.port_credentials())
    except RuntimeError:
        port = 0
    if port == 0:
        why = "its folder is missing or not this user's" if address.startswith("unix:") else "it is not this machine's"
        raise CannotListen(f"cannot listen on {address}: the address is taken, or {why}")
    if address.startswith("unix:"):
        return address
    return joined(host_and_port(address)[0], port)
