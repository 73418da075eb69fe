"""Certificates for a first installation: a CA of one's own, and what it signs.

Owns what stands in a certificate. Keys are ECDSA on P-256, which every gRPC implementation speaks.
Servers are named by subject alternative names only, as clients look at nothing else; a server's
certificate is good for serving only and a client's for calling only, so that neither passes for the
other. Where the files lie is `certs_command`'s business.
"""

from __future__ import annotations

import datetime
import ipaddress
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# Clocks of clients may be behind.
_BACKDATED = datetime.timedelta(minutes=5)


class Identity(NamedTuple):
    """A private key and the certificate that vouches for it."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    def key_pem(self) -> bytes:
        """Returns the private key, without a passphrase."""
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def certificate_pem(self) -> bytes:
        """Returns the certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @staticmethod
    def from_pem(key: bytes, certificate: bytes) -> Identity:
        """Reads what `key_pem` and `certificate_pem` returned. Raises ValueError."""
        private = serialization.load_pem_private_key(key, password=None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ValueError("the private key is none on an elliptic curve")
        return Identity(private, x509.load_pem_x509_certificate(certificate))


def new_ca(name: str, days: int) -> Identity:
    """Returns a CA that signs servers and clients, but no further CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    builder = _builder(subject, subject, key, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    return Identity(key, builder.sign(key, hashes.SHA256()))


def new_server(ca: Identity, hosts: tuple[str, ...], days: int) -> Identity:
    """Returns a server of these host names and IP addresses.

    Raises:
        ValueError: a host is neither.
    """
    assert hosts
    alternatives = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    return _signed(ca, hosts[0], ExtendedKeyUsageOID.SERVER_AUTH, days, alternatives)


def new_client(ca: Identity, name: str, days: int) -> Identity:
    """Returns a client; the name stands in the audit log."""
    return _signed(ca, name, ExtendedKeyUsageOID.CLIENT_AUTH, days, None)


def _signed(
    ca: Identity, name: str, usage: x509.ObjectIdentifier, days: int, alternatives: x509.SubjectAlternativeName | None
) -> Identity:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name(name), ca.certificate.subject, key, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    builder = builder.add_extension(issuer, critical=False)
    if alternatives is not None:
        builder = builder.add_extension(alternatives, critical=False)
    return Identity(key, builder.sign(ca.key, hashes.SHA256()))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    # A common name holds 64 characters; nobody verifies it.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not host or not host.isascii() or any(character in host for character in " /:"):
            raise ValueError(f"host {host!r} is neither an IP address nor a host name") from None
        return x509.DNSName(host)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
