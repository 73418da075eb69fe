"""What the server and its models are: liveness, readiness, metadata, configuration, statistics."""

from __future__ import annotations

import importlib.metadata

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service import errors
from headrace_service.calls.call import Call
from headrace_service.kserve.handlers import model_config
from headrace_service.kserve.messages import refusals
from headrace_service.kserve.messages.shared_memory import SharedMemoryRegions
from headrace_service.kserve.models import ModelDirectory
from headrace_service.kserve.statistics import Statistics
from headrace_service.service_core import ServiceCore

# Clients look for it.
_NAME = "triton"
_EXTENSIONS = (
    "binary_tensor_data", "logging", "model_configuration", "parameters", "schedule_policy", "statistics",
)  # fmt: skip


class ServerHandlers:
    """Handlers of the RPCs that only read the server's state."""

    def __init__(
        self, core: ServiceCore, models: ModelDirectory, regions: SharedMemoryRegions, statistics: Statistics
    ) -> None:
        self._core = core
        self._models = models
        self._regions = regions
        self._statistics = statistics

    async def server_live(self, request: pb.ServerLiveRequest, call: Call) -> pb.ServerLiveResponse:
        """Says that this process answers."""
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, request: pb.ServerReadyRequest, call: Call) -> pb.ServerReadyResponse:
        """Says whether generations are computed."""
        return pb.ServerReadyResponse(ready=self._core.serving)

    async def model_ready(self, request: pb.ModelReadyRequest, call: Call) -> pb.ModelReadyResponse:
        """Says whether one model computes.

        One that does not exist is not ready, which is no error.
        """
        try:
            ready = self._models.find(request.name, request.version, call.caller, "name").ready
        except errors.ServiceError as error:
            if error.code not in (refusals.NOT_FOUND, refusals.UNAVAILABLE):
                raise
            ready = False
        return pb.ModelReadyResponse(ready=ready)

    async def server_metadata(self, request: pb.ServerMetadataRequest, call: Call) -> pb.ServerMetadataResponse:
        """Names the server and what works."""
        works = {
            "model_repository": self._core.control is not None,
            "sequence": any(model.signature.keeps_sequences for model in self._models.all()),
            "system_shared_memory": self._regions.enabled,
        }
        extensions = [*_EXTENSIONS, *(name for name, does in works.items() if does)]
        version = importlib.metadata.version("headrace-server")
        return pb.ServerMetadataResponse(name=_NAME, version=f"headrace {version}", extensions=extensions)

    async def model_metadata(self, request: pb.ModelMetadataRequest, call: Call) -> pb.ModelMetadataResponse:
        """Describes a model's tensors."""
        model = self._models.find(request.name, request.version, call.caller, "name")
        return model_config.metadata_of(model.name, model.signature, model.properties)

    async def model_config(self, request: pb.ModelConfigRequest, call: Call) -> pb.ModelConfigResponse:
        """Gives a model's configuration."""
        model = self._models.find(request.name, request.version, call.caller, "name")
        return pb.ModelConfigResponse(config=model_config.config_of(model.name, model.signature, model.properties))

    async def model_statistics(self, request: pb.ModelStatisticsRequest, call: Call) -> pb.ModelStatisticsResponse:
        """Gives the statistics of one model or all, of all processes."""
        if request.name:
            models = [self._models.find(request.name, request.version, call.caller, "name")]
        else:
            models = self._models.usable(call.caller)
        reports = [self._statistics.report(model.name, decoupled=model.signature.decoupled) for model in models]
        return pb.ModelStatisticsResponse(model_stats=reports)
