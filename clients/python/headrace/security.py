"""TLS files, API keys, and over which connections a key may go.

Owns the reading and checking of certificates, so that a wrong file is refused by name and not as a
failed handshake, and the rule that a key never crosses a network in the clear. Does not open
channels (transport.py). Paths and keys come in; gRPC credentials and metadata go out. Nothing here
prints a key: messages name the option, never its value.
"""

from __future__ import annotations

import ipaddress
import os
import pathlib
import re
import ssl
from dataclasses import dataclass

import grpc

FilePath = str | os.PathLike[str]
# Where systems keep the certificates they trust, for interpreters whose own default names a file
# that is not there.
SYSTEM_ROOTS = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_SOCKET_SCHEMES = ("unix:", "unix-abstract:")
_ADDRESS_SCHEMES = ("dns:///", "dns:", "ipv4:", "ipv6:")
_BRACKETED = re.compile(r"\[([^\]]*)\](?::\d+)?")


@dataclass(frozen=True, slots=True)
class Tls:
    """How a connection is encrypted, and who proves what to whom.

    Files are PEM and are read when the client is made.

    Attributes:
        ca: Certificates of the authorities that may vouch for the server. Default: those that the
            system trusts.
        certificate: The caller's own certificate (and its chain), for servers that ask for one
            (mTLS).
        key: Private key of `certificate`, not encrypted.
        server_name: The name that the server's certificate must be for. Default: the host of the
            address.
    """

    ca: FilePath | None = None
    certificate: FilePath | None = None
    key: FilePath | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together: give both, or neither")

    def credentials(self) -> grpc.ChannelCredentials:
        """The channel credentials.

        Raises:
            OSError: A file cannot be read.
            ValueError: A file holds no certificate or key, or key and certificate do not belong
                together.
        """
        roots = _checked_roots(self.ca) if self.ca is not None else system_roots()
        if self.certificate is None or self.key is None:
            return grpc.ssl_channel_credentials(roots)
        _check_pair(self.certificate, self.key)
        return grpc.ssl_channel_credentials(roots, _read(self.key), _read(self.certificate))


def system_roots() -> bytes | None:
    """Returns the certificates that the system trusts (SSL_CERT_FILE, else the system's own file).

    None stands for those that come with gRPC.
    """
    default = ssl.get_default_verify_paths().cafile
    for path in (default, *SYSTEM_ROOTS):
        if path and os.path.isfile(path):
            return _read(path)
    return None


def bearer(api_key: str) -> tuple[str, str]:
    """The metadata entry that carries an API key.

    Raises:
        ValueError: The key is empty, or has characters that no header can carry (a line break from
            the file it was in, for example).
    """
    if not api_key or not all(" " < character <= "~" for character in api_key):
        raise ValueError("api_key must be one or more visible ASCII characters, without spaces or line breaks")
    return ("authorization", f"Bearer {api_key}")


def is_local(server: str) -> bool:
    """Returns whether a gRPC target is this machine for certain.

    Unix sockets, localhost and loopback addresses are.

    Names are not looked up: a name that happens to resolve to a loopback address today is not
    local.
    """
    if server.startswith(_SOCKET_SCHEMES):
        return True
    for scheme in _ADDRESS_SCHEMES:
        if server.startswith(scheme):
            server = server[len(scheme) :]
            break
    return all(_is_loopback(_host(address)) for address in server.split(","))


def _host(address: str) -> str:
    """The host of host, host:port, [v6] or [v6]:port."""
    bracketed = _BRACKETED.fullmatch(address)
    if bracketed:
        return bracketed[1]
    host, colon, port = address.rpartition(":")
    return host if colon and ":" not in host and port.isdigit() else address


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: FilePath) -> bytes:
    return pathlib.Path(path).read_bytes()


def _checked_roots(path: FilePath) -> bytes:
    # Without other letters: those of comments, or a byte order mark, with which gRPC passes over
    # the first certificate.
    roots = _read(path).decode("ascii", "ignore")
    try:
        ssl.create_default_context(cadata=roots)
    except (ssl.SSLError, ValueError):
        raise ValueError(f"{os.fspath(path)} holds no PEM certificates") from None
    return roots.encode()


def _check_pair(certificate: FilePath, key: FilePath) -> None:
    """Refuses what would otherwise show as a handshake that fails for no stated reason."""
    for path in (certificate, key):
        _read(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        # Without the password, an encrypted key would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise ValueError(
            f"{os.fspath(certificate)} and {os.fspath(key)} are no certificate and its unencrypted key: {reason}"
        ) from None
