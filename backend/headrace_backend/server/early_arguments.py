"""What a backend is to do, where it was begun before that was known.

Owns the way from the command line with which it was begun (`--early DESCRIPTOR`) to the one that it
is sent (`step.handover`): the descriptors that this names have other numbers here. Imports nothing
heavy.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from headrace_backend.step.handover import handed_over
from headrace_facts import pulse

_FLAG = "--early"


def known_arguments(begun_with: Sequence[str]) -> list[str] | None:
    """Returns a backend's command line, for which it waits where it was begun early.

    None says that whoever began it has no use for it, or is gone.

    Args:
        begun_with: the command line of this process, without the program.
    """
    if _FLAG not in begun_with:
        return list(begun_with)
    descriptor = int(begun_with[begun_with.index(_FLAG) + 1])
    with socket.socket(fileno=descriptor) as channel:
        sent = handed_over(channel)
    return None if sent is None else _renumbered(sent.arguments, sent.descriptors)


def _renumbered(arguments: Sequence[str], own: Mapping[int, int]) -> list[str]:
    """The arguments with this process's number for the only descriptor that they name."""
    before = ["", *arguments[:-1]]
    return [
        str(own[int(argument)]) if flag == pulse.FLAG else argument
        for flag, argument in zip(before, arguments, strict=True)
    ]
