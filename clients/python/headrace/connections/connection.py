"""Options of a connection, checked once for the sync, the asyncio and the admin clients.

Owns the names of these options and what they become. Does not open channels (transport.py,
aio_transport.py). Keyword arguments come in, an Endpoint goes out.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import grpc

from headrace.connections.channel import (
    ASKS_FOR_LOAD,
    LOAD_BALANCING,
    ChannelOptions,
    LoadBalancing,
    RetryPolicy,
    channel_options,
)
from headrace.errors import invalid
from headrace.security import Tls, bearer, is_local

DEFAULT_SERVER = "127.0.0.1:50051"
DEFAULT_TIMEOUT = 60.0
MAX_CHANNELS = 64
# gRPC counts nanoseconds of the epoch in 64 bits: a deadline of the year 2262 has passed at once.
_LONGEST_TIMEOUT = 1e9

Metadata = tuple[tuple[str, str], ...]


class PlaintextKey(ValueError):
    """An API key would go over a network in the clear."""


class ConnectionOptions(TypedDict, total=False):
    """Keyword arguments of every client.

    Attributes:
        api_key: Sent with every call as `authorization: Bearer KEY`. Refused without TLS, unless
            the server is on this machine.
        tls: True: encrypted, and the server proves its name to the authorities that the system
            trusts. A Tls: with its files and names. Default: not encrypted.
        allow_plaintext_key: Sends api_key to another machine without TLS all the same; whoever is
            on the way can read it. Default False.
        credentials: Channel credentials of one's own making, in place of `tls`.
        metadata: More entries to send with every call.
        channels: Connections to open, used in turn. A server of several service processes gives
            each connection to one of them. 1 to 64. Default 1.
        load_balancing: How each connection uses a target of several addresses: "pick_first" (one of
            them), "round_robin" (all in turn) or "weighted_round_robin" (by how much each server
            says it can do; a key then needs the permission read). Default "pick_first".
        timeout: Seconds that calls which do not generate may take, where the call says nothing
            else. None: no limit. Default 60.
        retry: What to send again after a broken connection. RetryPolicy(max_attempts=1) sends
            nothing twice.
    """

    api_key: str | None
    tls: bool | Tls | None
    allow_plaintext_key: bool
    credentials: grpc.ChannelCredentials | None
    metadata: Sequence[tuple[str, str]]
    channels: int
    load_balancing: LoadBalancing
    timeout: float | None
    retry: RetryPolicy | None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and how to speak to it. `credentials` is None for plaintext."""

    server: str
    credentials: grpc.ChannelCredentials | None
    options: ChannelOptions
    metadata: Metadata
    channels: int
    timeout: float | None
    retry: RetryPolicy

    def __repr__(self) -> str:
        # The metadata may hold a key.
        return f"Endpoint({self.server!r})"


def endpoint(
    server: str,
    *,
    api_key: str | None = None,
    tls: bool | Tls | None = None,
    allow_plaintext_key: bool = False,
    credentials: grpc.ChannelCredentials | None = None,
    metadata: Sequence[tuple[str, str]] = (),
    channels: int = 1,
    load_balancing: LoadBalancing = "pick_first",
    timeout: float | None = DEFAULT_TIMEOUT,
    retry: RetryPolicy | None = None,
) -> Endpoint:
    """The endpoint of a client's keyword arguments; see ConnectionOptions.

    Raises:
        ValueError: Options that contradict each other, or a key that would go over a network in the
            clear.
        OSError: A TLS file cannot be read.
    """
    if not 1 <= channels <= MAX_CHANNELS:
        raise ValueError(f"channels must be 1 to {MAX_CHANNELS}, not {channels}")
    if load_balancing not in LOAD_BALANCING:
        raise ValueError(f"load_balancing must be one of {', '.join(LOAD_BALANCING)}, not {load_balancing!r}")
    if tls and credentials is not None:
        raise ValueError("give tls or credentials, not both")
    retry = retry or RetryPolicy()
    options = channel_options(server, retry, load_balancing)
    if tls:
        tls = Tls() if tls is True else tls
        credentials = tls.credentials()
        if tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", tls.server_name))
    entries = tuple(metadata)
    if load_balancing == "weighted_round_robin":
        entries = (*entries, ASKS_FOR_LOAD)
    if api_key is not None:
        _check_key(server, entries, encrypted=credentials is not None, allow_plaintext=allow_plaintext_key)
        entries = (*entries, bearer(api_key))
    return Endpoint(server, credentials, options, entries, channels, timeout, retry)


def _check_key(server: str, metadata: Metadata, *, encrypted: bool, allow_plaintext: bool) -> None:
    if any(name.lower() == "authorization" for name, _ in metadata):
        raise ValueError("give api_key or an authorization entry in metadata, not both")
    if not (encrypted or allow_plaintext or is_local(server)):
        raise PlaintextKey(
            f"api_key would go to {server} in the clear: give tls=True (or a Tls), or allow_plaintext_key=True if the "
            "network is trusted"
        )


def call_timeout(timeout: float | None) -> float | None:
    """Returns the timeout of a call as gRPC takes it; None, no limit, for one that it can't count.

    Raises:
        InvalidRequest: It is no number of seconds.
    """
    if timeout is None:
        return None
    if not isinstance(timeout, numbers.Real) or math.isnan(timeout):
        raise invalid("timeout", f"must be a number of seconds (given: {timeout!r:.80})")
    return timeout if timeout <= _LONGEST_TIMEOUT else None
