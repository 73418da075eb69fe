"""Several descriptor pools as one, for reflection.

The KServe wire's descriptors live in a pool of their own (`headrace_protos.inference.private_pool`), all others in protobuf's default one. Reflection asks
a single pool; this one asks each in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf import descriptor_pool


class DescriptorPools:
    """Finds what the first of several pools has. Has the methods that grpc_reflection calls, by protobuf's names."""

    def __init__(self, *pools: descriptor_pool.DescriptorPool) -> None:
        self._pools = pools

    def FindFileByName(self, file_name: str) -> Any:
        """Returns a file. Raises KeyError."""
        return self._first(lambda pool: pool.FindFileByName(file_name))

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        """Returns the file of a message, service, method ... Raises KeyError."""
        return self._first(lambda pool: _file_of(pool, symbol))

    def FindMessageTypeByName(self, full_name: str) -> Any:
        """Returns a message. Raises KeyError."""
        return self._first(lambda pool: pool.FindMessageTypeByName(full_name))

    def FindExtensionByNumber(self, message_descriptor: Any, number: int) -> Any:
        """Returns an extension. Raises KeyError."""
        return self._first(lambda pool: pool.FindExtensionByNumber(message_descriptor, number))

    def FindAllExtensions(self, message_descriptor: Any) -> list[Any]:
        """Returns a message's extensions, which only the pool of the message has."""
        return list(message_descriptor.file.pool.FindAllExtensions(message_descriptor))

    def _first(self, find: Callable[[Any], Any]) -> Any:
        for pool in self._pools:
            try:
                return find(pool)
            except KeyError:
                continue
        raise KeyError


def _file_of(pool: Any, symbol: str) -> Any:
    """Returns a symbol's file. Raises KeyError. Protobuf's own pool finds no methods, by which ghz asks."""
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:
        service, _, method = symbol.rpartition(".")
        found = pool.FindServiceByName(service)
        found.methods_by_name[method]  # raises KeyError
        return found.file
