"""The certificate of a listener, and its files' changes.

Owns the exchange while the server runs; what makes files valid is `pem`'s. grpc asks
for the certificate before every handshake, from one of its own threads and holding up that
handshake: the answer is an object that lies ready. Reading and checking happens in `reload`. New
connections get the new certificate, open ones live on with theirs. New files that are invalid are
logged, and the certificate in force stays; so do the moments in which only one of two files has
been replaced. That the one in force has expired is logged alike.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import ssl
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc

from headrace_credentials import files as credential_files
from headrace_credentials import pem
from headrace_credentials.files import CredentialError


class TlsFiles(NamedTuple):
    """Paths of a server's certificates.

    Attributes:
        certificate: PEM, the server's own first, then those up to its CA.
        key: PEM, its private key, not encrypted.
        client_ca: PEM; clients must have a certificate of one of these CAs. None: clients need
            none.
    """

    certificate: pathlib.Path
    key: pathlib.Path
    client_ca: pathlib.Path | None


class _Loaded(NamedTuple):
    configuration: grpc.ServerCertificateConfiguration
    context: ssl.SSLContext
    fingerprint: bytes
    expires: datetime.datetime


class ServerTls:
    """The certificate of one process.

    Args:
        files: where it lies.
        log: a structlog logger, for changes of the files.

    Raises:
        CredentialError: a file cannot be used.
    """

    def __init__(self, files: TlsFiles, log: Any) -> None:
        self._files = files
        self._log = log
        self._loaded = _load(files)
        self._complained_of = ""

    @property
    def expires(self) -> datetime.datetime:
        """When the certificate in force ends."""
        return self._loaded.expires

    def port_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials for one port.

        Another port needs others, because grpc asks each for what is new to it.
        """
        given = self._loaded

        def newer() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            if given is self._loaded:
                return None
            given = self._loaded
            return given.configuration

        return grpc.dynamic_ssl_server_credentials(
            given.configuration,
            newer,  # type: ignore[arg-type]
            require_client_authentication=self._files.client_ca is not None,
        )

    def ssl_context(self) -> ssl.SSLContext:
        """Returns the context for the next connection of a listener that is not grpc's.

        Each content of the files has a context of its own, and with it its own sessions: a client
        cannot resume what began under a client CA that has been replaced.
        """
        return self._loaded.context

    def reload(self) -> None:
        """Takes the files' certificate if it has changed and is valid, or is valid again.

        Blocks on the disk; may run in another thread.
        """
        try:
            contents = _contents(self._files)
            is_in_force = credential_files.fingerprint(*contents) == self._loaded.fingerprint
            has_expired = datetime.datetime.now(datetime.UTC) >= self.expires
            if is_in_force and not has_expired and not self._complained_of:
                return
            # What is in force already is taken anew, once, where the log says that it was not.
            loaded = _checked(self._files, contents)
        except CredentialError as error:
            self._complain(str(error))
            return
        self._loaded, self._complained_of = loaded, ""
        self._log.info("tls.reloaded", expires=loaded.expires.isoformat())

    def _complain(self, why: str) -> None:
        """Logs once what is wrong with the files, until that changes."""
        if why != self._complained_of:
            self._log.error("tls.not_reloaded", why=why, expires=self.expires.isoformat())
        self._complained_of = why


def _load(files: TlsFiles) -> _Loaded:
    return _checked(files, _contents(files))


def _contents(files: TlsFiles) -> list[bytes]:
    """Returns certificate, key and, if there is one, client CA."""
    contents = [
        credential_files.read(files.certificate, private=False),
        credential_files.read(files.key, private=True),
    ]
    if files.client_ca is not None:
        contents.append(credential_files.read(files.client_ca, private=False))
    return contents


def _checked(files: TlsFiles, contents: list[bytes]) -> _Loaded:
    pair = pem.checked_pair(files.certificate, contents[0], files.key, contents[1])
    client_ca = pem.encoded(pem.certificates(files.client_ca, contents[2])) if files.client_ca is not None else None
    configuration = grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], root_certificates=client_ca)
    try:
        context = _ssl_context(pair, client_ca)
    except ssl.SSLError as error:
        raise CredentialError(f"{files.certificate}: OpenSSL refuses it: {error.reason}") from None
    return _Loaded(configuration, context, credential_files.fingerprint(*contents), pair.first.not_valid_after_utc)


def _ssl_context(pair: pem.Pair, client_ca: bytes | None) -> ssl.SSLContext:
    """Returns a context of files that were checked; as read then, whatever is on the disk now."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with _as_file(pair.chain) as certificate_path, _as_file(pair.key) as key_path:
        context.load_cert_chain(certificate_path, key_path)
    if client_ca is not None:
        context.load_verify_locations(cadata=client_ca.decode())
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Gives a path to some bytes, which are in memory alone."""
    descriptor = os.memfd_create("headrace-credential")
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
