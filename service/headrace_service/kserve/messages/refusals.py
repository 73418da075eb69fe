"""Refusals in the words that Triton's clients look for.

Owns texts that several rooms of this package share. The texts name tensor, rule and limit, and are
capped by `errors`.
"""

from __future__ import annotations

import grpc

from headrace_service import errors
from headrace_service.errors import ServiceError, Violation

VERSION = "1"
_MAX_VERSION_DIGITS = 18
NOT_FOUND, UNAVAILABLE = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE


def invalid(text: str, field: str) -> ServiceError:
    """Returns INVALID_ARGUMENT with a text of its own; `field` is what a program reads."""
    detail = errors.invalid([Violation(field, text)]).details
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, text, detail)


def unsupported(text: str) -> ServiceError:
    """Returns UNIMPLEMENTED."""
    return ServiceError(grpc.StatusCode.UNIMPLEMENTED, text)


def unknown_model(name: str, version: str = "") -> ServiceError:
    """Returns NOT_FOUND for a model that is not served, or not in that version."""
    of_version = f" version {errors.echo(version)}" if version else ""
    return errors.not_found(f"Request for unknown model: {errors.echo(name)}{of_version} is not found")


def check_name(name: str, field: str) -> None:
    """Raises INVALID_ARGUMENT if no model is named."""
    if not name:
        raise errors.invalid_field(field, "must be set")


def check_version(name: str, version: str) -> None:
    """Raises INVALID_ARGUMENT for what is no version, NOT_FOUND for one that no model has."""
    if version in ("", VERSION):
        return
    if not (version.isascii() and version.isdigit() and len(version) <= _MAX_VERSION_DIGITS and int(version) > 0):
        raise invalid(
            f"failed to get model version from specified version string {errors.echo(version)}, "
            "version should be an integer value > 0",
            "model_version",
        )
    raise unknown_model(name, version)
