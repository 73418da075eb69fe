"""Keys and certificates of one test, and channels that present them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc

from headrace_service.auth import api_keys, certificates
from headrace_service.auth.api_keys import ApiKey, KeyFile
from headrace_service.auth.certificates import Identity

GENERATE_AND_READ = ("generate", "read")


def entry(key: str, key_id: str, permissions: Iterable[str] = GENERATE_AND_READ, **fields: Any) -> ApiKey:
    """The entry of a key; all models unless `fields` says which."""
    fields.setdefault("models", ("*",))
    return ApiKey(id=key_id, sha256=api_keys.digest_of(key).hex(), permissions=tuple(permissions), **fields)


def write_keys(path: pathlib.Path, *entries: ApiKey) -> pathlib.Path:
    """Replaces a key file in one step."""
    return replace(path, KeyFile(entries).encode())


def replace(path: pathlib.Path, data: bytes, mode: int = 0o600) -> pathlib.Path:
    """Replaces a file in one step."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    new.chmod(mode)
    os.replace(new, path)
    return path


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """The metadata that presents a key."""
    return (("authorization", f"Bearer {key}"),)


@dataclasses.dataclass(frozen=True)
class CertificateFolder:
    """A CA, and files of a server's certificate that it signed."""

    folder: pathlib.Path
    ca: Identity

    @staticmethod
    def make(folder: pathlib.Path, hosts: tuple[str, ...] = ("localhost", "127.0.0.1")) -> CertificateFolder:
        made = CertificateFolder(folder, certificates.new_ca("test CA", 2))
        replace(folder / "ca.pem", made.ca.certificate_pem())
        made.put(certificates.new_server(made.ca, hosts, 2))
        return made

    @property
    def certificate(self) -> pathlib.Path:
        return self.folder / "server.pem"

    @property
    def key(self) -> pathlib.Path:
        return self.folder / "server.key"

    def put(self, server: Identity) -> None:
        """Replaces the server's files."""
        replace(self.key, server.key_pem())
        replace(self.certificate, server.certificate_pem())

    def settings(self, *, mutual: bool = False) -> dict[str, pathlib.Path]:
        """The service's settings for these files."""
        settings = {"tls_cert": self.certificate, "tls_key": self.key}
        return {**settings, "tls_client_ca": self.folder / "ca.pem"} if mutual else settings

    def channel_credentials(self, client: Identity | None = None) -> grpc.ChannelCredentials:
        """What a client needs that trusts this CA."""
        pair = (client.key_pem(), client.certificate_pem()) if client is not None else (None, None)
        return grpc.ssl_channel_credentials(self.ca.certificate_pem(), *pair)


@contextlib.asynccontextmanager
async def channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_metadata_size", 1 << 20)]
    if credentials is None:
        made = grpc.aio.insecure_channel(address, options=options)
    else:
        made = grpc.aio.secure_channel(address, credentials, options=options)
    async with made:
        yield made
