"""A TCP proxy that can cut all its connections at once.

Tests see what a broken network looks like to gRPC.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator


class TcpProxy:
    """Forwards bytes between a listening port and `target`."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        # Connections that ended, by their client or by a cut.
        self.ended = 0
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def clients(self) -> int:
        """Connections that were made since the last cut."""
        return len(self._connections) // 2

    def cut(self) -> int:
        """Resets all connections; new ones are taken as before.

        Returns how many clients were cut off.
        """
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
            connection.close()
        return len(connections) // 2

    def close(self) -> None:
        """Ends the proxy."""
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._connections += [client, server]
                threading.Thread(target=self._pump_from_client, args=(client, server), daemon=True).start()
                threading.Thread(target=_trickle, args=(server, client), daemon=True).start()

    def _pump_from_client(self, client: socket.socket, server: socket.socket) -> None:
        _pump(client, server)
        self.ended += 1


def _trickle(source: socket.socket, sink: socket.socket) -> None:
    """Forwards 25 KB a second.

    Faster, a whole short answer may lie in a client's buffers before a busy machine lets it read
    and the test cut.
    """
    with contextlib.suppress(OSError):
        while data := source.recv(256):
            sink.sendall(data)
            time.sleep(0.01)
        sink.shutdown(socket.SHUT_WR)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        # One side has closed; the other learns it.
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def tcp_proxy(target: str) -> Iterator[TcpProxy]:
    """A proxy for the length of a block."""
    proxy = TcpProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()


@contextlib.contextmanager
def cut_on_connect(proxy: TcpProxy) -> Iterator[str]:
    """Lets programs in other languages cut the proxy's connections.

    Every connection to its address does so, and is answered with a line that says how many clients
    that were.
    """

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                asked, _ = listener.accept()
                with asked:
                    asked.sendall(f"{proxy.cut()}\n".encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
