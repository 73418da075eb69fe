"""What PEM files of certificates and keys must hold before grpc gets them.

Owns the checks: they parse, are whole, belong together, are valid now and have keys that gRPC's
clients speak. grpc itself would accept them, and fail each handshake. What passed is written anew
for grpc and OpenSSL, each of which reads less than an editor leaves: a byte order mark, spaces
before a line, line ends of CR alone, comments in other letters.
"""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from headrace_credentials.files import CredentialError

_MIN_RSA_BITS = 2048
_CURVES = ("secp256r1", "secp384r1")


class Pair(NamedTuple):
    """A certificate and its key.

    Attributes:
        first: the certificate whose key it is.
        chain: PEM of all certificates, the first at the beginning.
        key: PEM of the private key, not encrypted.
    """

    first: x509.Certificate
    chain: bytes
    key: bytes


def certificates(path: pathlib.Path, data: bytes) -> list[x509.Certificate]:
    """Returns the certificates of a file, one at least.

    Raises:
        CredentialError: it holds none, something else, or a part of one.
    """
    # Parsers pass over a certificate that has no end, as of a file that is being written.
    if data.count(b"-----BEGIN ") != data.count(b"-----END "):
        raise CredentialError(f"{path}: ends within a certificate")
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise CredentialError(f"{path}: holds no certificate in PEM form") from None


def encoded(of: Iterable[x509.Certificate]) -> bytes:
    """Returns certificates in PEM form as grpc and OpenSSL read it."""
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in of)


def checked_pair(
    certificate_path: pathlib.Path, certificate_data: bytes, key_path: pathlib.Path, key_data: bytes
) -> Pair:
    """Returns the certificates of a file, if the first is valid now and the other file has its key.

    Raises:
        CredentialError: it is not so.
    """
    chain = certificates(certificate_path, certificate_data)
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    try:
        key = serialization.load_pem_private_key(key_data, password=None)
        belongs = key.public_key().public_bytes(*form) == chain[0].public_key().public_bytes(*form)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise CredentialError(f"{key_path}: holds no private key in PEM form without a passphrase") from None
    if not belongs:
        raise CredentialError(f"{key_path}: is not the key of the first certificate in {certificate_path}")
    _check_key(key_path, key)
    _check_time(certificate_path, chain[0])
    plain = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Pair(chain[0], encoded(chain), plain)


def _check_key(path: pathlib.Path, key: object) -> None:
    """Refuses keys with which handshakes fail: at grpc's clients, or as OpenSSL finds them weak."""
    match key:
        case rsa.RSAPrivateKey() if key.key_size >= _MIN_RSA_BITS:
            return
        case ec.EllipticCurvePrivateKey() if key.curve.name in _CURVES:
            return
        case rsa.RSAPrivateKey():
            found = f"RSA of {key.key_size} bits"
        case ec.EllipticCurvePrivateKey():
            found = f"ECDSA on {key.curve.name}"
        case _:
            found = "of another kind"
    raise CredentialError(
        f"{path}: is {found}; must be RSA of {_MIN_RSA_BITS} bits or more, or ECDSA on P-256 or P-384"
    )


def _check_time(path: pathlib.Path, certificate: x509.Certificate) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    now = datetime.datetime.now(datetime.UTC)
    # Without the time of day: who logs a complaint until it changes would do so each time.
    if not begins <= now < ends:
        state = "has expired" if now >= ends else "is not valid yet"
        raise CredentialError(f"{path}: {state}; it is valid from {begins.isoformat()} to {ends.isoformat()}")
