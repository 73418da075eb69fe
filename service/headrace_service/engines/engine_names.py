"""Names whose addresses are engines: looked up again and again while the service runs.

Owns the look-ups and what is known of each name. A name that resolves to nothing, at the start or
later, keeps the addresses that it had: who is gone is seen by the connections, and a name server
that fails must not take engines away.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Mapping

import structlog

from headrace_health.address import host_and_port, joined

_log = structlog.get_logger("headrace.service")
# Is given addresses, and the host that each was found by.
Follow = Callable[[Collection[str], Mapping[str, str]], None]


class EngineNames:
    """The addresses of names.

    Args:
        names: NAME:PORT each.
        every_s: seconds between two look-ups.
        follow: called with all addresses whenever they have been looked up.

    Attributes:
        failures: why a name resolves to nothing at present, by name.
    """

    def __init__(self, names: Collection[str], every_s: float, follow: Follow) -> None:
        self._every_s = every_s
        self._follow = follow
        self._found: dict[str, tuple[str, ...]] = {name: () for name in names}
        self.failures: dict[str, str] = {}

    async def run(self) -> None:
        """Looks the names up until cancelled."""
        while True:
            await asyncio.gather(*(self._look_up(name) for name in self._found))
            hosts = {address: host_and_port(name)[0] for name, found in self._found.items() for address in found}
            self._follow(hosts.keys(), hosts)
            await asyncio.sleep(self._every_s)

    async def _look_up(self, name: str) -> None:
        host, port = host_and_port(name)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            why = f"{name} resolves to nothing: {getattr(error, 'strerror', None) or error}"
            if self.failures.get(name) != why:
                _log.warning("engines.no_address", name=name, why=why, kept=len(self._found[name]))
            self.failures[name] = why
            return
        if self.failures.pop(name, None) is not None:
            _log.info("engines.found", name=name, addresses=len(found))
        self._found[name] = tuple(sorted({joined(str(entry[4][0]), port) for entry in found}))
