"""A failed call in one line: what happened, and what to do about it.

Owns the advice, in the words of the command line: options instead of fields and arguments. What
happened was worded by the server, or by grpc_words.py. Exceptions come in with what the command
line asked for, a sentence goes out.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.cli.output import TERMINAL_CONTROL, error_as_dict, warn
from headrace.errors import DeadlineExceeded, HeadraceError, Unauthenticated, Violation
from headrace.grpc_words import DEADLINE_PASSED, ConnectionProblem

# How a description goes on from the name of a field.
_PREDICATES = ("must ", "has ", "is ")
_PORT = re.compile(r":\d+$")
# Key of the CallFacts in a click context's `meta`.
FACTS_KEY = "headrace.call"


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What the command line asked for.

    Attributes:
        command: Name of the command; "" where none had begun.
        server: Address of the server as it was given.
        encrypted: Whether the call goes over TLS.
        timeout: Seconds that the caller gave the call; None: no option said so.
        names: Field of a request -> how this command line writes it.
        as_json: Whether errors are JSON lines.
    """

    command: str = ""
    server: str = ""
    encrypted: bool = False
    timeout: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    as_json: bool = False


def show_failure(error: HeadraceError, facts: CallFacts) -> None:
    """Prints a failed call on stderr, as one line."""
    if facts.as_json:
        warn(json.dumps({"error": error_as_dict(error)}))
    else:
        warn(f"error: {error.code.name}: {sentence(error, facts)}")


def sentence(error: HeadraceError, facts: CallFacts) -> str:
    """What happened, what to do about it, and which request it was."""
    advice = f"try again in {error.retry_after:g} s" if error.retry_after is not None else _advice(error, facts)
    request = f" (request {error.request_id})" if error.request_id else ""
    text = "; ".join(filter(None, (_what(error, facts), advice))) + request
    return TERMINAL_CONTROL.sub("\ufffd", " ".join(text.splitlines()))


def broken_rule(violation: Violation, facts: CallFacts) -> str:
    """A rule that a request broke, by the name that this command line has for the field."""
    path = violation.field.partition("[")[0]
    name = facts.names.get(path, violation.field)
    description = violation.description
    return f"{name}{' ' if description.startswith(_PREDICATES) else ': '}{description}"


def leave_stdout() -> None:
    """Gives up stdout, whose reader is gone, so that nothing fails while the interpreter ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def os_sentence(error: OSError) -> str:
    """What the system refused, and of which file."""
    what = error.strerror or str(error)
    return f"{error.filename}: {what}" if error.filename is not None else what


def _what(error: HeadraceError, facts: CallFacts) -> str:
    if isinstance(error, DeadlineExceeded) and facts.timeout is not None:
        return f"--timeout {facts.timeout:g} passed before the answer was complete"
    if error.message == DEADLINE_PASSED:
        return "the server did not answer in time"
    if error.violations:
        return "; ".join(broken_rule(violation, facts) for violation in error.violations)
    return error.message.replace("ListModels names", "headrace models lists")


def _advice(error: HeadraceError, facts: CallFacts) -> str:
    if isinstance(error, DeadlineExceeded):
        return _DEADLINE_ADVICE.get(facts.command, "") if facts.timeout is not None else ""
    if isinstance(error, Unauthenticated):
        return "give a key with HEADRACE_API_KEY, or --client-certificate and --client-key"
    return _PROBLEM_ADVICE[error.problem](facts) if error.problem is not None else ""


_DEADLINE_ADVICE = {
    "generate": "give more, or end it with what there is by --time-limit",
    "subscribe": "the generation goes on: subscribe again, --from-token continues",
}


def _no_server(facts: CallFacts) -> str:
    if not facts.server.startswith("unix") and not _PORT.search(facts.server):
        return "give its port, as in --server HOST:50051"
    return "start one with headrace serve, or name another with --server"


def _closed(facts: CallFacts) -> str:
    if facts.encrypted:
        return "one that wants a client certificate does that: --client-certificate and --client-key"
    return "one that speaks TLS does that: --tls, or --ca with its authority's file"


def _lost(facts: CallFacts) -> str:
    return "headrace submit and subscribe outlast this" if facts.command == "generate" else ""


_PROBLEM_ADVICE: dict[ConnectionProblem, Callable[[CallFacts], str]] = {
    ConnectionProblem.NO_SERVER: _no_server,
    ConnectionProblem.UNKNOWN_HOST: lambda _: "look at --server",
    ConnectionProblem.BAD_ADDRESS: lambda _: "--server takes HOST:PORT or unix:/PATH",
    ConnectionProblem.UNREACHABLE: lambda _: "look at --server, and at what lies between",
    ConnectionProblem.NO_GRPC: lambda _: "look at the port of --server",
    ConnectionProblem.CLOSED: _closed,
    ConnectionProblem.NO_TLS: lambda _: "leave out --tls, --ca and their variables",
    ConnectionProblem.UNTRUSTED_CERTIFICATE: lambda _: "name the authority's file with --ca",
    ConnectionProblem.CERTIFICATE_OF_ANOTHER_NAME: lambda _: (
        "if the server is the right one, --server-name takes that name"
    ),
    ConnectionProblem.LOST: _lost,
}
