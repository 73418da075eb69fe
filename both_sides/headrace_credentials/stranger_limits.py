"""What a peer may cost a server that listens, before it has shown a certificate or a key.

Owns the options of gRPC servers that bound it, and what each of them corrects.
`docs/upstream-continuation-flood.md` has the figures.
"""

from __future__ import annotations

# As much as one connection's reads are prepared for. Unset, gRPC prepares for what came before the
# last pause: a peer that sends without one, as a header block without end lets it, was given 48 to
# 118 MiB. A message of 15 MiB takes as long with 64 KiB as with any more.
_READ_BUFFER_BYTES = 64 << 10


def server_options(begin_timeout_s: float, max_metadata_bytes: int) -> list[tuple[str, int]]:
    """Options of a gRPC server.

    Args:
        begin_timeout_s: seconds that a connection has for TLS, for HTTP/2 and, from then on, to
            acknowledge this server's settings.
        max_metadata_bytes: largest metadata of a call. gRPC asks for it of peers that acknowledged
            the settings; others may send 16 MiB.
    """
    begin_timeout_ms = int(begin_timeout_s * 1000)
    return [
        ("grpc.server_handshake_timeout_ms", begin_timeout_ms),
        # Otherwise at least a minute, in which metadata of 16 MiB can be held.
        ("grpc.http2.settings_timeout", begin_timeout_ms),
        ("grpc.experimental.tcp_max_read_buffer_size", _READ_BUFFER_BYTES),
        # One limit instead of a range in which requests are refused at random.
        ("grpc.max_metadata_size", max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", max_metadata_bytes),
    ]
