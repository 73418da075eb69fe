"""The place where ranks of several hosts find each other: a TCP store on the engine's host.

Owns the address's form, as the server that starts workers writes it into their arguments and
workers read it. Ranks of one host need none: they inherit an anonymous file.
"""

from __future__ import annotations

from typing import NamedTuple, Self


class MeetingPoint(NamedTuple):
    """The store's address, and the network over which a host's ranks reach the others."""

    # IP address.
    address: str
    port: int
    # Of this host, as in eth0: its address is what the ranks of other hosts connect to.
    interface: str

    def __str__(self) -> str:
        """Returns the form of a command line argument, which `parse` reads."""
        return f"{self.address},{self.port},{self.interface}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads what `str` wrote. Raises ValueError on anything else."""
        address, port, interface = text.split(",")
        return cls(address, int(port), interface)
