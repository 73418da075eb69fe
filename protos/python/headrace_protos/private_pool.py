"""The descriptor pool of protocols that are others' (KServe's, ORCA's), apart from protobuf's own.

Triton's, KServe's and xDS' packages bring files and symbols of the same names, and one pool takes a
symbol once: whoever is imported second would fail. The generated modules of `inference` and `orca`
register their files here instead, so that all of them can live in one process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory
from google.protobuf.internal import enum_type_wrapper

POOL = descriptor_pool.DescriptorPool()
POOL.AddSerializedFile(duration_pb2.DESCRIPTOR.serialized_pb)


def load(serialized: bytes) -> dict[str, Any]:
    """Registers a file, whose imports must be registered already.

    Args:
        serialized: a FileDescriptorProto.

    Returns:
        What protoc's own modules hold: DESCRIPTOR, a class per message, a wrapper per enum, and the
        enums' values.
    """
    name = descriptor_pb2.FileDescriptorProto.FromString(serialized).name
    POOL.AddSerializedFile(serialized)
    file = POOL.FindFileByName(name)
    names: dict[str, Any] = {"DESCRIPTOR": file}
    for message_name, descriptor in file.message_types_by_name.items():
        names[message_name] = message_factory.GetMessageClass(descriptor)
    for enum_name, enum in file.enum_types_by_name.items():
        names[enum_name] = enum_type_wrapper.EnumTypeWrapper(enum)
        names.update({value.name: value.number for value in enum.values})
    return names
