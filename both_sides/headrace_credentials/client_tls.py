"""What a client of ours shows to a server with TLS or mTLS, and the channel on which it does.

Owns reading the files anew for each connection, so that a renewed certificate needs no
restart.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import grpc
import grpc.aio

from headrace_credentials import files as credential_files
from headrace_credentials import pem


class ClientTlsFiles(NamedTuple):
    """Paths of a client's certificates.

    Attributes:
        ca: PEM; the server must have a certificate of one of these CAs.
        certificate: PEM, the client's own first. None: it shows none, as without mTLS.
        key: PEM, its private key, not encrypted; None without a certificate.
    """

    ca: pathlib.Path
    certificate: pathlib.Path | None = None
    key: pathlib.Path | None = None


def channel_credentials(files: ClientTlsFiles) -> grpc.ChannelCredentials:
    """Returns credentials for a new channel.

    Raises:
        CredentialError: a file cannot be used.
    """
    ca = pem.encoded(pem.certificates(files.ca, credential_files.read(files.ca, private=False)))
    if files.certificate is None or files.key is None:
        return grpc.ssl_channel_credentials(ca)
    certificate = credential_files.read(files.certificate, private=False)
    key = credential_files.read(files.key, private=True)
    pair = pem.checked_pair(files.certificate, certificate, files.key, key)
    return grpc.ssl_channel_credentials(ca, pair.key, pair.chain)


def new_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, int | str]]
) -> grpc.aio.Channel:
    """Returns a channel with these credentials, or without any.

    Sockets that their folder protects need none.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)
