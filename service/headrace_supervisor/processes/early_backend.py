"""The first backend of `headrace serve`, begun with the command's first lines.

A backend's imports and its workers' take longer than all that `serve` imports and checks before it
knows what they are to do, and they need none of it. So they begin beside it (`EarlyProcess`); a
command line that is refused ends them unused. Owns when that is worth it, and the one process that
was begun. Imports nothing heavy: the `headrace` script and `__main__` call it first of all.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Mapping, Sequence

from headrace_supervisor.foreign_names import ALIASES
from headrace_supervisor.processes.early_process import EarlyProcess

_COMMAND = "serve"
_HELP = frozenset({"-h", "--help"})
_MODULE = "headrace_backend"
# Each rank has a worker; how many there are is the product of these settings.
_RANKS = ("tp", "pp")
_MOST_RANKS = 64

_begun: list[EarlyProcess] = []


def begin(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Begins a backend with its workers where a command line is that of a server.

    Args:
        arguments: the command line without the program.
        environment: variables, which may hold settings.
    """
    if list(arguments[:1]) != [_COMMAND] or _HELP.intersection(arguments) or _begun:
        return
    if importlib.util.find_spec("torch") is None:
        # A machine for services alone, which the command refuses.
        return
    with contextlib.suppress(OSError):
        _begun.append(EarlyProcess(_MODULE, ("--early-workers", str(num_ranks(arguments, environment)))))


def begun() -> EarlyProcess | None:
    """Returns what `begin` has begun; None: nothing."""
    return _begun[0] if _begun else None


def num_ranks(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Returns how many ranks a command line or the environment asks for, at a glance.

    A wrong number is no mistake: workers that are missing are started later, and those too many are
    ended.
    """
    ranks = 1
    for name in _RANKS:
        text = _typed(arguments, (f"--{name}", *ALIASES[name])) or environment.get(f"HEADRACE_{name.upper()}", "")
        ranks *= int(text) if text.isdecimal() and 0 < int(text) <= _MOST_RANKS else 1
    return min(ranks, _MOST_RANKS)


def _typed(arguments: Sequence[str], options: Sequence[str]) -> str:
    """What was typed last behind one of these options, as the next argument or after "="."""
    typed = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name in options:
            typed = value if equals else following
    return typed
