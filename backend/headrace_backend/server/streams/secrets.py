"""The shared secret that callers of the backend's socket present."""

from __future__ import annotations

import hmac
from typing import Any

import grpc

from headrace_backend.server.streams.statuses import ended


def check_secret(secret: bytes | None, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Raises StreamEnded for a call without the secret; None: none is asked for."""
    if secret is None:
        return
    given = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
    presented = given[0] if len(given) == 1 else ""
    presented_bytes = presented.encode() if isinstance(presented, str) else presented
    if not hmac.compare_digest(presented_bytes, b"Bearer " + secret):
        raise ended(grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is required")
