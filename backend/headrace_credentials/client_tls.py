"""What a client of ours shows to a server with mTLS.

Owns reading the three files anew for each connection, so that a renewed certificate needs no restart.
"""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import grpc

from headrace_credentials import files as credential_files
from headrace_credentials import pem


class ClientTlsFiles(NamedTuple):
    """Where they lie.

    Attributes:
        ca: PEM; the server must have a certificate of one of these CAs.
        certificate: PEM, the client's own first.
        key: PEM, its private key, not encrypted.
    """

    ca: pathlib.Path
    certificate: pathlib.Path
    key: pathlib.Path


def channel_credentials(files: ClientTlsFiles) -> grpc.ChannelCredentials:
    """Returns credentials for a new channel.

    Raises:
        CredentialError: a file cannot be used.
    """
    ca = credential_files.read(files.ca, private=False)
    pem.certificates(files.ca, ca)
    certificate = credential_files.read(files.certificate, private=False)
    key = credential_files.read(files.key, private=True)
    pem.checked_pair(files.certificate, certificate, files.key, key)
    return grpc.ssl_channel_credentials(ca, key, certificate)
