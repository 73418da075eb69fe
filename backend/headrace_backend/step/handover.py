"""A worker's arguments and descriptors, on their way to a process that was started before them.

Owns the form: one message over a socket, with a descriptor of the arguments as JSON and the
descriptors that those name. They have other numbers in the process that receives them. Imports
nothing heavy, because both ends send or wait while the rest is still being imported.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# The kernel takes 253 in one message (SCM_MAX_FD); a worker has some ten.
_MOST_DESCRIPTORS = 64


class HandedOver(NamedTuple):
    """What a process has been sent."""

    arguments: list[str]
    # Number of a descriptor in the sender's process -> its number in this one.
    descriptors: Mapping[int, int]


def hand_over(channel: socket.socket, arguments: Sequence[str], descriptors: Sequence[int]) -> None:
    """Sends a process its arguments, and copies of the descriptors that they name.

    Raises:
        OSError: Nobody is there any more.
    """
    memory = os.memfd_create("headrace-arguments", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(json.dumps({"arguments": list(arguments), "descriptors": list(descriptors)}).encode())
        socket.send_fds(channel, [b"\0"], [memory, *descriptors])
    finally:
        os.close(memory)


def handed_over(channel: socket.socket) -> HandedOver | None:
    """Waits for the message; None: the other end is gone, and nothing will come."""
    message, received, _, _ = socket.recv_fds(channel, 1, _MOST_DESCRIPTORS)
    if not message:
        return None
    memory, *own = received
    with open(memory, "rb") as file:
        # The two processes share its position, which is behind what was written.
        file.seek(0)
        sent = json.loads(file.read())
    return HandedOver(sent["arguments"], dict(zip(sent["descriptors"], own, strict=True)))
