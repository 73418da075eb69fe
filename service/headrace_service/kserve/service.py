"""The table of RPCs of inference.GRPCInferenceService, and the making of what answers them.

Owns registration, the names that models go by, and where service processes share what clients set
through one of them: beside the supervisor's control socket, in the server's private folder.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import grpc
from google.protobuf import message

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service import logs
from headrace_service.calls.call import Call
from headrace_service.calls.rpc_boundary import bidirectional, unary_encoded
from headrace_service.config import ServiceConfig
from headrace_service.kserve.handlers import settings_handlers
from headrace_service.kserve.handlers.infer_handlers import Inference
from headrace_service.kserve.handlers.infer_stream import StreamHandlers
from headrace_service.kserve.handlers.repository_handlers import RepositoryHandlers
from headrace_service.kserve.handlers.server_handlers import ServerHandlers
from headrace_service.kserve.handlers.settings_handlers import SettingsHandlers
from headrace_service.kserve.handlers.shared_memory_handlers import SharedMemoryHandlers
from headrace_service.kserve.language_models.asked import Convention
from headrace_service.kserve.language_models.language_model import LanguageModel
from headrace_service.kserve.language_models.tensorrt_llm_tensors import TensorRtLlmTensors
from headrace_service.kserve.language_models.vllm_tensors import VllmTensors
from headrace_service.kserve.messages.shared_document import SharedDocument
from headrace_service.kserve.messages.shared_memory import SharedMemoryRegions
from headrace_service.kserve.models import Model, ModelDirectory, models_of
from headrace_service.kserve.statistics import Statistics
from headrace_service.service_core import ServiceCore

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
Request = TypeVar("Request", bound=message.Message)


def register(server: grpc.aio.Server, core: ServiceCore) -> None:
    """Adds the service to a server."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, method_handlers(core)),))


def method_handlers(core: ServiceCore) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Returns the handler of each method by its name."""
    config = core.config
    folder = _shared_folder(config)
    models = _directory(core)
    statistics = Statistics(folder, config.service_name)
    regions = SharedMemoryRegions(config.kserve_shared_memory, _document(folder, "shared-memory", {}))
    log_document = _document(folder, "log-settings", settings_handlers.initial_log_settings(config.log_level))
    logs.switch_by(lambda: settings_handlers.switches(log_document.read()))
    inference = Inference(models, regions, statistics, config.max_message_bytes)
    stream = StreamHandlers(core, inference)
    handlers = _unary_handlers(core, models, statistics, regions, log_document)
    return {
        **{name: _unary(getattr(pb, f"{name}Request"), handler) for name, handler in handlers.items()},
        "ModelInfer": unary_encoded(pb.ModelInferRequest, inference.infer),
        "ModelStreamInfer": bidirectional(pb.ModelInferRequest, stream.stream_infer),
    }


def _unary_handlers(
    core: ServiceCore,
    models: ModelDirectory,
    statistics: Statistics,
    regions: SharedMemoryRegions,
    log_document: SharedDocument,
) -> dict[str, Callable[[Any, Call], Awaitable[message.Message]]]:
    server = ServerHandlers(core, models, regions, statistics)
    repository = RepositoryHandlers(core, models)
    memory = SharedMemoryHandlers(regions)
    settings = SettingsHandlers(models, log_document, core.tracer)
    return {
        "ServerLive": server.server_live,
        "ServerReady": server.server_ready,
        "ModelReady": server.model_ready,
        "ServerMetadata": server.server_metadata,
        "ModelMetadata": server.model_metadata,
        "ModelConfig": server.model_config,
        "ModelStatistics": server.model_statistics,
        "RepositoryIndex": repository.index,
        "RepositoryModelLoad": repository.load,
        "RepositoryModelUnload": repository.unload,
        "SystemSharedMemoryStatus": memory.status,
        "SystemSharedMemoryRegister": memory.register,
        "SystemSharedMemoryUnregister": memory.unregister,
        "CudaSharedMemoryStatus": memory.cuda_status,
        "CudaSharedMemoryRegister": memory.cuda_register,
        "CudaSharedMemoryUnregister": memory.cuda_unregister,
        "TraceSetting": settings.trace_setting,
        "LogSettings": settings.log_settings,
    }


def _unary(
    request_type: type[Request], handler: Callable[[Request, Call], Awaitable[message.Message]]
) -> grpc.RpcMethodHandler[Any, Any]:
    async def encoded(request: Request, call: Call) -> bytes:
        return (await handler(request, call)).SerializeToString()

    return unary_encoded(request_type, encoded)


def _directory(core: ServiceCore) -> ModelDirectory:
    vllm = VllmTensors()

    @functools.lru_cache(256)
    def loaded(name: str) -> Model:
        return LanguageModel(name, vllm, core, lambda caller: core.models.find(name, caller))

    def all_loaded() -> Iterable[Model]:
        return [loaded(name) for name in core.models.names]

    aliases = [
        *_aliases(core.config.kserve_vllm_names, vllm, core),
        *_aliases(core.config.kserve_tensorrt_llm_names, TensorRtLlmTensors(), core),
    ]
    sources = [all_loaded, lambda: aliases]
    if core.config.conformance_models:
        conformance = models_of(core.config.conformance_models)
        sources.append(lambda: conformance)
    return ModelDirectory(sources)


def _aliases(names: Iterable[str], convention: Convention, core: ServiceCore) -> list[Model]:
    return [LanguageModel(name, convention, core, lambda caller: core.models.find("", caller)) for name in names]


def _shared_folder(config: ServiceConfig) -> pathlib.Path | None:
    return pathlib.Path(config.control.removeprefix("unix:")).parent if config.control else None


def _document(folder: pathlib.Path | None, name: str, initial: dict[str, Any]) -> SharedDocument:
    return SharedDocument(folder / f"kserve-{name}.json" if folder is not None else None, initial)
