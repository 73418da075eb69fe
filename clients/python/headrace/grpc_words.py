"""What gRPC's core says of a connection, as sentences that a person can act on.

The core reports in the words of its own layers ("failed to connect to all addresses; last error:
UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused", "Stream removed
(Deadline Exceeded)"). Owns the reading of these texts, as grpcio 1.80 to 1.85 write them; a text
that is none of them, as every text of a server, stays as it is. A status comes in, a sentence and
the kind of problem go out.
"""

from __future__ import annotations

import enum
import re
import urllib.parse
from typing import NamedTuple

import grpc


class ConnectionProblem(enum.StrEnum):
    """Why a call did not reach a server, or lost it."""

    # Nothing listens at the address.
    NO_SERVER = "no_server"
    # The address is a name that no name server knows, or no address at all.
    UNKNOWN_HOST = "unknown_host"
    BAD_ADDRESS = "bad_address"
    # There is a network problem on the way.
    UNREACHABLE = "unreachable"
    # What listens there speaks something else.
    NO_GRPC = "no_grpc"
    # It ended the connection before a call: a server that wants TLS, or a client certificate, does.
    CLOSED = "closed"
    # This client began with TLS and the server did not.
    NO_TLS = "no_tls"
    UNTRUSTED_CERTIFICATE = "untrusted_certificate"
    CERTIFICATE_OF_ANOTHER_NAME = "certificate_of_another_name"
    # The connection broke while the call ran.
    LOST = "lost"


class Said(NamedTuple):
    """A status in words. `problem` is None for all but broken and missing connections."""

    message: str
    problem: ConnectionProblem | None = None


_NOT_CONNECTED = re.compile(
    r"failed to connect to all addresses; last error: \w+: (?P<address>(?:ipv[46]|unix|unix-abstract):.+?): "
    r"(?P<reason>.*)",
    re.DOTALL,
)
_NOT_RESOLVED = re.compile(
    r"errors resolving (?P<address>.+?): \[field:hostname lookup error:(?P<reason>.*)\]", re.DOTALL
)
_LOST = re.compile(
    r"Stream removed(?: \((?P<why>.*)\))?|(?P<core>Socket closed|recvmsg:.*|sendmsg:.*|End of TCP stream|Broken pipe"
    r"|keepalive watchdog timeout|ping timeout|Connection reset by peer)",
    re.DOTALL,
)
_DEADLINE = re.compile(r"(?:Stream removed \()?Deadline Exceeded\)?")
DEADLINE_PASSED = "the call's deadline passed before its answer was complete"

# What the reason of a failed connection holds -> the problem, and a sentence with the address.
_REASONS: tuple[tuple[str, ConnectionProblem, str], ...] = (
    ("Connection refused", ConnectionProblem.NO_SERVER, "no server listens on {address}"),
    ("No such file or directory", ConnectionProblem.NO_SERVER, "no server listens on {address}"),
    ("certificate has expired", ConnectionProblem.UNTRUSTED_CERTIFICATE, "the certificate of {address} has expired"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        ConnectionProblem.UNTRUSTED_CERTIFICATE,
        "no trusted authority vouches for the certificate of {address}",
    ),
    (
        "Hostname Verification Check failed",
        ConnectionProblem.CERTIFICATE_OF_ANOTHER_NAME,
        "the certificate of {address} is for another name",
    ),
    ("WRONG_VERSION_NUMBER", ConnectionProblem.NO_TLS, "the server on {address} does not speak TLS"),
    ("Failed parsing HTTP/2", ConnectionProblem.NO_GRPC, "what listens on {address} does not speak gRPC"),
    ("before receiving SETTINGS", ConnectionProblem.NO_GRPC, "what listens on {address} does not answer as gRPC does"),
    ("Socket closed", ConnectionProblem.CLOSED, "the server on {address} closed the connection before any call"),
    ("reset by peer", ConnectionProblem.CLOSED, "the server on {address} closed the connection before any call"),
    ("End of TCP stream", ConnectionProblem.CLOSED, "the server on {address} closed the connection before any call"),
)


def read(code: grpc.StatusCode, text: str) -> Said:
    """Returns what a status says, in words.

    Args:
        code: Status of a call.
        text: Its details, of the server or of gRPC's core in this process.
    """
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and _DEADLINE.fullmatch(text):
        return Said(DEADLINE_PASSED)
    if code is not grpc.StatusCode.UNAVAILABLE:
        return Said(text)
    for pattern, said in ((_NOT_CONNECTED, _not_connected), (_NOT_RESOLVED, _not_resolved), (_LOST, _lost)):
        match = pattern.fullmatch(text)
        if match is not None:
            return said(match)
    return Said(text)


def _not_connected(match: re.Match[str]) -> Said:
    address, reason = _plain_address(match["address"]), match["reason"]
    for part, problem, sentence in _REASONS:
        if part in reason:
            return Said(sentence.format(address=address), problem)
    return Said(f"{address} cannot be reached: {reason}", ConnectionProblem.UNREACHABLE)


def _not_resolved(match: re.Match[str]) -> Said:
    if "Domain name not found" in match["reason"]:
        return Said(f"no name server knows the host of {match['address']}", ConnectionProblem.UNKNOWN_HOST)
    if "address lookup failed" in match["reason"] and "Misformatted" not in match["reason"]:
        return Said(f"the host of {match['address']} could not be looked up", ConnectionProblem.UNKNOWN_HOST)
    return Said(f"{match['address']} is no address of a server", ConnectionProblem.BAD_ADDRESS)


def _lost(match: re.Match[str]) -> Said:
    why = match["why"] or match["core"]
    return Said(f"the connection to the server broke{f' ({why})' if why else ''}", ConnectionProblem.LOST)


def _plain_address(address: str) -> str:
    """An address without gRPC's schemes of IP addresses and without its escapes."""
    return urllib.parse.unquote(re.sub(r"^ipv[46]:", "", address))
