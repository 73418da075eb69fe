"""What PEM files of certificates and keys must hold before grpc gets them.

Owns the checks: they parse, belong together and are valid now. grpc itself would accept them, and
fail each handshake.
"""

from __future__ import annotations

import datetime
import pathlib

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from headrace_credentials.files import CredentialError


def certificates(path: pathlib.Path, data: bytes) -> list[x509.Certificate]:
    """Returns the certificates of a file, one at least.

    Raises:
        CredentialError: it holds none, or something else.
    """
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise CredentialError(f"{path}: holds no certificate in PEM form") from None


def checked_pair(
    certificate_path: pathlib.Path, certificate_data: bytes, key_path: pathlib.Path, key_data: bytes
) -> x509.Certificate:
    """Returns the first certificate of a file, if it is valid now and the other file holds its key.

    Raises:
        CredentialError: it is not so.
    """
    certificate = certificates(certificate_path, certificate_data)[0]
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    try:
        key = serialization.load_pem_private_key(key_data, password=None)
        belongs = key.public_key().public_bytes(*form) == certificate.public_key().public_bytes(*form)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise CredentialError(f"{key_path}: holds no private key in PEM form without a passphrase") from None
    if not belongs:
        raise CredentialError(f"{key_path}: is not the key of the first certificate in {certificate_path}")
    _check_time(certificate_path, certificate)
    return certificate


def _check_time(path: pathlib.Path, certificate: x509.Certificate) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    now = datetime.datetime.now(datetime.UTC)
    if not begins <= now < ends:
        raise CredentialError(
            f"{path}: is valid from {begins.isoformat()} to {ends.isoformat()}, and it is {now.isoformat(timespec='seconds')}"
        )
