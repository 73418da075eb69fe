"""Several descriptor pools as one, for reflection, and what protobuf's own pool does not tell.

Methods by name, and JSON names of fields.

The descriptors of KServe's and ORCA's wires live in a pool of their own
(`headrace_protos.private_pool`), all others in protobuf's default one. Reflection asks a single
pool; this one asks each in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool


class DescriptorPools:
    """Finds what the first of several pools has.

    Has the methods that grpc_reflection calls, by protobuf's names.
    """

    def __init__(self, *pools: descriptor_pool.DescriptorPool) -> None:
        self._pools = pools

    def FindFileByName(self, file_name: str) -> Any:
        """Returns the file descriptor of a name. Raises KeyError if no pool has it."""
        return DescribedFile(self._first(lambda pool: pool.FindFileByName(file_name)))

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        """Returns the file of a message, service, method ... Raises KeyError."""
        return DescribedFile(self._first(lambda pool: _file_of(pool, symbol)))

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


class DescribedFile:
    """A file as grpc_reflection reads it, with JSON names for clients such as ghz."""

    def __init__(self, file: Any) -> None:
        self._file = file

    @property
    def name(self) -> str:
        """Path of the proto file."""
        return str(self._file.name)

    @property
    def dependencies(self) -> list[DescribedFile]:
        """File descriptors of the files that this one imports."""
        return [DescribedFile(file) for file in self._file.dependencies]

    def CopyToProto(self, proto: descriptor_pb2.FileDescriptorProto) -> None:
        """Copies the file's description to a FileDescriptorProto."""
        self._file.CopyToProto(proto)
        for message in proto.message_type:
            _fill_json_names(message, self._file.message_types_by_name[message.name])


def _fill_json_names(message: descriptor_pb2.DescriptorProto, descriptor: Any) -> None:
    for field in message.field:
        field.json_name = descriptor.fields_by_name[field.name].json_name
    for nested in message.nested_type:
        _fill_json_names(nested, descriptor.nested_types_by_name[nested.name])


def _file_of(pool: Any, symbol: str) -> Any:
    """Returns a symbol's file.

    Raises KeyError. Protobuf's own pool finds no methods, by which ghz asks.
    """
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:
        service, _, method = symbol.rpartition(".")
        found = pool.FindServiceByName(service)
        found.methods_by_name[method]  # raises KeyError
        return found.file
