"""A canned server with TLS and a key.

The certificates it needs are made anew for each run of the tests.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from tests.clients.canned_service import CannedServer, canned_server

from headrace_service.auth.certificates import Identity, new_ca, new_client, new_server

API_KEY = "hr-secret-key"
DAYS = 2


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, as PEM files."""

    certificate: pathlib.Path
    key: pathlib.Path


@dataclass(frozen=True)
class Certificates:
    """Makes an authority, and another one that nobody trusts.

    The first vouches for a server as `names`, and for a caller.
    """

    ca: Pair
    server: Pair
    caller: Pair
    other_ca: Pair


def make_certificates(folder: pathlib.Path) -> Certificates:
    """Writes all of it below `folder`."""
    ca, other = new_ca("ca", DAYS), new_ca("other", DAYS)
    server = new_server(ca, ("headrace.test", "localhost", "127.0.0.1"), DAYS)
    return Certificates(
        ca=_written(folder, "ca", ca),
        server=_written(folder, "server", server),
        caller=_written(folder, "caller", new_client(ca, "caller", DAYS)),
        other_ca=_written(folder, "other", other),
    )


def _written(folder: pathlib.Path, name: str, identity: Identity) -> Pair:
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    pair.certificate.write_bytes(identity.certificate_pem())
    pair.key.write_bytes(identity.key_pem())
    return pair


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
