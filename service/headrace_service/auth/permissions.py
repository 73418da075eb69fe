"""Which permission each method needs.

Owns the table from full method names to groups. A key holds groups, full method names
("headrace.v1.InferenceService/Tokenize"), or both. A method that is served but stands in no group
needs `admin`: what somebody forgot to list is closed, not open. A test holds the table against the
descriptors of everything that is served.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

HEALTH_PREFIX = "grpc.health.v1.Health/"
ORCA_SERVICE = "xds.service.orca.v3.OpenRcaService"
# Operations of OpenAI's HTTP API, by their names in its specification.
OPENAI_PREFIX = "openai.v1/"


class Permission(enum.StrEnum):
    """A group of methods that a key may be allowed to call."""

    GENERATE = "generate"
    READ = "read"
    ADMIN = "admin"
    SHARED_MEMORY = "shared_memory"


_OURS = "headrace.v1.InferenceService"
_ADMIN = "headrace.v1.AdminService"
_KSERVE = "inference.GRPCInferenceService"
_OPENAI = OPENAI_PREFIX.rstrip("/")
_SERVICES: dict[Permission, dict[str, str]] = {
    # Starts, reads and ends one's own generations.
    Permission.GENERATE: {
        _OURS: "Generate Complete Chat Submit Subscribe Session Cancel",
        _KSERVE: "ModelInfer ModelStreamInfer",
        _OPENAI: "CreateChatCompletion CreateCompletion CreateEmbedding",
    },
    # Costs the engine nothing, and shows nobody else's requests.
    Permission.READ: {
        _OURS: "ListRequests Tokenize Detokenize GetModel ListModels GetLoad",
        _KSERVE: (
            "ServerLive ServerReady ModelReady ServerMetadata ModelMetadata ModelConfig ModelStatistics RepositoryIndex"
        ),
        _OPENAI: "ListModels RetrieveModel Health",
        ORCA_SERVICE: "StreamCoreMetrics",
        "grpc.reflection.v1alpha.ServerReflection": "ServerReflectionInfo",
        "grpc.reflection.v1.ServerReflection": "ServerReflectionInfo",
    },
    # Changes the server for everybody.
    Permission.ADMIN: {
        _ADMIN: "LoadModel UnloadModel ListRepository Drain SetTraceDetail GetTrace GetMemoryPlan",
        _KSERVE: "RepositoryModelLoad RepositoryModelUnload TraceSetting LogSettings",
    },
    # Names memory of the server's machine.
    Permission.SHARED_MEMORY: {
        _KSERVE: "SystemSharedMemoryStatus SystemSharedMemoryRegister SystemSharedMemoryUnregister "
        "CudaSharedMemoryStatus CudaSharedMemoryRegister CudaSharedMemoryUnregister"
    },
}
_GROUPS = {
    f"{service}/{method}": permission
    for permission, services in _SERVICES.items()
    for service, methods in services.items()
    for method in methods.split()
}


def needed(method: str) -> Permission:
    """Returns the group of a method, given as "package.Service/Method"."""
    return _GROUPS.get(method, Permission.ADMIN)


def listed() -> Collection[str]:
    """Returns the names of all methods that stand in a group."""
    return _GROUPS.keys()


def allows(held: Collection[str], method: str) -> bool:
    """Returns whether permissions, groups and full method names, reach a method."""
    return needed(method) in held or method in held


def unknown(held: Collection[str]) -> list[str]:
    """Returns what in a key's permissions is neither a group nor a method of this server."""
    return [name for name in held if name not in _GROUPS and name not in set(Permission)]
