"""Certificates of the backend's socket: services and backend know each other by them on HOST:PORT.

Owns which settings go together, and looking after the files while the backend runs: restarting it
for a new certificate would end every request.
"""

from __future__ import annotations

import asyncio

from headrace_backend.config import BackendConfig
from headrace_backend.server.lifetime import ListenAddress, StartRefused
from headrace_backend.server.logs import get_logger
from headrace_credentials.files import CredentialError
from headrace_credentials.server_tls import ServerTls, TlsFiles

_LOOK_EVERY_S = 2.0


def read_tls(config: BackendConfig, address: ListenAddress) -> ServerTls | None:
    """The socket's certificate; None where the configuration names none.

    Raises:
        StartRefused: The settings do not go together, or a file can't be used.
    """
    named = {name: getattr(config, name) for name in ("tls_cert", "tls_key", "tls_client_ca")}
    if not any(named.values()):
        return None
    missing = [name for name, path in named.items() if path is None]
    if missing:
        raise StartRefused(
            f"{missing[0]} is needed too; certificates of services and backend are checked on both sides"
        )
    if address.socket_path is not None:
        raise StartRefused(f"tls_cert: listen is {address.target!r}, and a unix: address speaks no TLS")
    try:
        return ServerTls(TlsFiles(**dict(zip(TlsFiles._fields, named.values(), strict=True))), get_logger())
    except CredentialError as error:
        raise StartRefused(str(error)) from error


async def follow(tls: ServerTls | None) -> None:
    """Takes new certificates, for ever."""
    while tls is not None:
        await asyncio.sleep(_LOOK_EVERY_S)
        await asyncio.to_thread(tls.reload)
