"""The certificates by which the engines and services of one deployment know each other.

Owns who gets which: the deployment has a CA of its own, an engine a server's certificate for its
node's address, a service a client's. The CA's key reaches the deployment's actors by Ray, which is
no weaker than what it guards: whoever may speak to the cluster may run any program on its nodes.
"""

from __future__ import annotations

import pathlib
from typing import NamedTuple

from headrace_credentials.client_tls import ClientTlsFiles
from headrace_credentials.server_tls import TlsFiles
from headrace_service.auth import certificates
from headrace_service.auth.certificates import Identity

# Certificates are made when a process's actor starts, and the CA when the deployment comes up.
_DAYS = 3650


class Authority(NamedTuple):
    """A deployment's CA as it travels: PEM."""

    key: bytes
    certificate: bytes

    @staticmethod
    def new(deployment: str) -> Authority:
        """Returns a CA for a deployment of this name."""
        ca = certificates.new_ca(f"Headrace on Ray, {deployment}", _DAYS)
        return Authority(ca.key_pem(), ca.certificate_pem())

    def server_files(self, folder: pathlib.Path, host: str) -> TlsFiles:
        """Writes what a server at the IP address `host` needs to a private folder."""
        paths = self._write(folder, "server", certificates.new_server(self._ca(), (host,), _DAYS))
        return TlsFiles(*paths, self._write_ca(folder))

    def client_files(self, folder: pathlib.Path, name: str) -> ClientTlsFiles:
        """Writes what a client of that name needs to a private folder."""
        paths = self._write(folder, "client", certificates.new_client(self._ca(), name, _DAYS))
        return ClientTlsFiles(self._write_ca(folder), *paths)

    def _ca(self) -> Identity:
        return Identity.from_pem(self.key, self.certificate)

    def _write_ca(self, folder: pathlib.Path) -> pathlib.Path:
        return _write(folder / "ca.pem", self.certificate)

    @staticmethod
    def _write(folder: pathlib.Path, name: str, identity: Identity) -> tuple[pathlib.Path, pathlib.Path]:
        certificate = _write(folder / f"{name}.pem", identity.certificate_pem())
        return certificate, _write(folder / f"{name}.key", identity.key_pem())


def _write(path: pathlib.Path, data: bytes) -> pathlib.Path:
    path.touch(mode=0o600)
    path.write_bytes(data)
    return path
