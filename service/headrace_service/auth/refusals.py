"""What callers without the right get to hear.

Owns the texts. UNAUTHENTICATED has one for every cause, so that nobody learns from it which keys
exist, which have expired, or what a key looks like. PERMISSION_DENIED goes to callers who are
known, and names what they lack.
"""

from __future__ import annotations

import grpc

from headrace_service.errors import ServiceError, echo

UNAUTHENTICATED_TEXT = "a valid API key is needed, as metadata authorization: Bearer KEY"


def unauthenticated() -> ServiceError:
    """Returns UNAUTHENTICATED, the same for every cause."""
    return ServiceError(grpc.StatusCode.UNAUTHENTICATED, UNAUTHENTICATED_TEXT)


def method_denied(method: str, permission: str) -> ServiceError:
    """Returns PERMISSION_DENIED for a method that the caller's key does not allow."""
    return ServiceError(
        grpc.StatusCode.PERMISSION_DENIED,
        f"this key does not allow {echo(method)}; it needs the permission {permission}",
    )


def model_denied(model: str) -> ServiceError:
    """Returns PERMISSION_DENIED for a model that the caller's key does not allow.

    The answer does not depend on whether there is such a model.
    """
    return ServiceError(grpc.StatusCode.PERMISSION_DENIED, f"this key does not allow the model {echo(model)}")


def admin_off() -> ServiceError:
    """Returns UNIMPLEMENTED for administration on a server that does not serve it."""
    return ServiceError(
        grpc.StatusCode.UNIMPLEMENTED,
        "this server does not serve administration (admin is off, or it is open to others without keys)",
    )


def metadata_too_large(num_bytes: int, limit: int) -> ServiceError:
    """Returns RESOURCE_EXHAUSTED for metadata above the limit."""
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, f"the call's metadata has {num_bytes} bytes; must have at most {limit}"
    )
