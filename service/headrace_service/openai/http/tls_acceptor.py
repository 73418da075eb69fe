"""Accepts connections that begin with TLS, and counts them from the first moment on.

Owns the handshakes that are under way. A server of asyncio's makes a protocol only after the
handshake, so that peers who never end theirs would be counted nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

# After the process has run out of descriptors.
_PAUSE_S = 0.1


class TlsAcceptor:
    """The connections of one listening socket, until their handshakes have ended.

    Args:
        listener: the socket, which listens and is this object's from now on.
        context: returns the certificate for the next connection.
        timeout_s: how long a handshake may take.
        new_protocol: makes the protocol of a connection.
        has_room: whether one more connection may be open, beside so many handshakes.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: Callable[[], ssl.SSLContext],
        timeout_s: float,
        new_protocol: Callable[[], asyncio.Protocol],
        has_room: Callable[[int], bool],
    ) -> None:
        self._listener = listener
        self._context = context
        self._timeout_s = timeout_s
        self._new_protocol = new_protocol
        self._has_room = has_room
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    @property
    def num_handshakes(self) -> int:
        """How many handshakes are under way."""
        return len(self._handshakes)

    def close(self) -> None:
        """Ends the listening and all handshakes."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Returns when nothing of it runs any more."""
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_PAUSE_S)
                continue
            if not self._has_room(len(self._handshakes)):
                accepted.close()
                continue
            task = loop.create_task(self._shake_hands(accepted))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        # A peer that breaks it off, or takes too long, gets no answer.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._new_protocol, accepted, ssl=self._context(), ssl_handshake_timeout=self._timeout_s
            )
