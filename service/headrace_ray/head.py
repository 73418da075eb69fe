"""The address of a cluster's head: which one is meant, and whether anybody listens there.

Owns the look before Ray is asked, because Ray tries an address at which nobody listens for minutes.
"""

from __future__ import annotations

import os
import socket

from headrace_health.address import host_and_port, peer_address, port_of
from headrace_ray.errors import DeploymentError

_VARIABLE = "RAY_ADDRESS"
_CONNECT_S = 10.0


def check_head(address: str | None) -> None:
    """Looks whether somebody listens at the head of a cluster.

    Args:
        address: HOST:PORT; None: that in RAY_ADDRESS, of which other forms are left to Ray.

    Raises:
        DeploymentError: It is no such address, or nobody answers there.
    """
    if address is not None:
        _check("address", _checked(address))
        return
    named = os.environ.get(_VARIABLE, "")
    if "://" not in named and port_of(named) is not None:
        _check(_VARIABLE, named)


def _checked(address: str) -> str:
    try:
        return peer_address(address)
    except ValueError as error:
        raise DeploymentError(f"address: {address[:64]!r} {error}") from None


def _check(source: str, address: str) -> None:
    try:
        socket.create_connection(host_and_port(address), _CONNECT_S).close()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DeploymentError(f"{source}: no Ray cluster at {address}: {why}") from None
