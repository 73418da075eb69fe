"""A canned server with TLS and a key, and the certificates it needs: made by openssl for one test session, thrown away after it."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from tests.clients.canned_service import CannedServer, canned_server

API_KEY = "hr-secret-key"


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, as PEM files."""

    certificate: pathlib.Path
    key: pathlib.Path


@dataclass(frozen=True)
class Certificates:
    """An authority, a server that it vouches for as `names`, a caller that it vouches for, and another authority."""

    ca: Pair
    server: Pair
    caller: Pair
    other_ca: Pair


def make_certificates(folder: pathlib.Path) -> Certificates:
    """Writes all of it below `folder`."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    ca, other = _authority(folder, "ca"), _authority(folder, "other")
    return Certificates(
        ca,
        _signed(folder, "server", ca, "subjectAltName=DNS:headrace.test,DNS:localhost,IP:127.0.0.1"),
        _signed(folder, "caller", ca, "subjectAltName=DNS:caller.test"),
        other,
    )


def _authority(folder: pathlib.Path, name: str) -> Pair:
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    _openssl("req", "-x509", "-subj", f"/CN={name}", "-days", "2", *_new_key(pair.key), "-out", str(pair.certificate))
    return pair


def _signed(folder: pathlib.Path, name: str, ca: Pair, extension: str) -> Pair:
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    signer = ("-CA", str(ca.certificate), "-CAkey", str(ca.key))
    _openssl(
        "req", "-x509", "-subj", f"/CN={name}", "-days", "2", "-addext", extension, "-addext", "basicConstraints=CA:FALSE",
        *signer, *_new_key(pair.key), "-out", str(pair.certificate),
    )  # fmt: skip
    return pair


def _new_key(path: pathlib.Path) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(path))


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class KeyCheck(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the key."""

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], details: grpc.HandlerCallDetails
    ) -> Any:
        given = dict(details.invocation_metadata).get("authorization")
        if given == f"Bearer {API_KEY}":
            return continuation(details)
        handler = continuation(details)

        def refuse(_: Any, context: grpc.ServicerContext) -> Any:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "an API key is needed")

        for kind in ("unary_unary", "unary_stream", "stream_stream"):
            if getattr(handler, kind, None) is not None:
                return getattr(grpc, f"{kind}_rpc_method_handler")(
                    refuse, handler.request_deserializer, handler.response_serializer
                )
        return handler


@contextlib.contextmanager
def secured_server(
    certificates: Certificates, *, mutual: bool = False, with_key: bool = True
) -> Iterator[CannedServer]:
    """Serves over TLS; with `mutual`, callers need a certificate of the authority's."""
    pair = certificates.server
    credentials = grpc.ssl_server_credentials(
        [(pair.key.read_bytes(), pair.certificate.read_bytes())],
        root_certificates=certificates.ca.certificate.read_bytes() if mutual else None,
        require_client_auth=mutual,
    )
    with canned_server(credentials=credentials, interceptors=[KeyCheck()] if with_key else []) as server:
        yield server
