"""The RPCs of headrace.v1.AdminService: what an operator does to a running server.

Owns checking and answering, and the table of RPCs. Who may call is decided before a handler runs
(`auth`), which leaves the audit line too. What is done, and by whom, is `model_admin`'s.
"""

from __future__ import annotations

import re
from typing import Any, cast

import grpc

from headrace.v1 import admin_pb2 as pb
from headrace.v1 import generation_pb2
from headrace_facts.facts import Detail
from headrace_protos.control.v1 import control_pb2
from headrace_service import errors, validation
from headrace_service.calls.call import Call
from headrace_service.calls.rpc_boundary import streaming, unary
from headrace_service.service_core import ServiceCore
from headrace_service.tracing.tracer import Tracer
from headrace_service.violations import Violations

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
_MAX_GRACE_NS = 3600 * 10**9
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
# Well under a client's default limit of 4 MiB; the parts in order are the message, wherever they
# are cut.
_MAX_PART_BYTES = 1 << 20
_DETAILS = {
    generation_pb2.TRACE_DETAIL_OFF: Detail.OFF,
    generation_pb2.TRACE_DETAIL_ARRAY: Detail.ARRAY,
    generation_pb2.TRACE_DETAIL_SPAN: Detail.SPAN,
}


class AdminHandlers:
    """Handlers of the RPCs that operators call."""

    def __init__(self, core: ServiceCore) -> None:
        self._core = core

    async def load_model(self, request: pb.LoadModelRequest, call: Call) -> pb.LoadModelResponse:
        """Loads a model of the repository and answers when it serves."""
        _check_named(request.model, call)
        model, existing = await self._core.admin.load(request.model, request.memory_bytes)
        return pb.LoadModelResponse(model=model.text.describe(), existing=existing)

    async def unload_model(self, request: pb.UnloadModelRequest, call: Call) -> pb.UnloadModelResponse:
        """Takes a model away, its open generations first."""
        _check_named(request.model, call)
        await self._core.admin.unload(request.model, self._grace_ns(request))
        return pb.UnloadModelResponse()

    async def list_repository(self, request: pb.ListRepositoryRequest, call: Call) -> pb.ListRepositoryResponse:
        """Lists loadable and loaded models, as far as the caller may know of them."""
        known = [model for model in self._core.admin.repository() if call.caller.may_use_model(model.name)]
        return pb.ListRepositoryResponse(models=[_repository_model(model) for model in known])

    async def drain(self, request: pb.DrainRequest, call: Call) -> pb.DrainResponse:
        """Refuses new generations, or takes them again."""
        running, waiting = await self._core.admin.drain(not request.resume)
        return pb.DrainResponse(running_sequences=running, waiting_requests=waiting)

    async def set_trace_detail(self, request: pb.SetTraceDetailRequest, call: Call) -> pb.SetTraceDetailResponse:
        """Says how much of each token is traced, on all services."""
        if request.detail not in _DETAILS:
            raise errors.invalid_field("detail", "must be TRACE_DETAIL_OFF, TRACE_DETAIL_ARRAY or TRACE_DETAIL_SPAN")
        await self._tracer().set_detail(_DETAILS[request.detail])
        return pb.SetTraceDetailResponse()

    async def get_trace(self, request: pb.GetTraceRequest, call: Call) -> None:
        """Streams a recent trace."""
        kind = request.WhichOneof("key")
        if kind is None:
            raise errors.invalid_field("key", "one of request_id and trace_id must be set")
        if kind == "request_id":
            validation.check_request_id(request.request_id)
        elif not _TRACE_ID.fullmatch(request.trace_id):
            raise errors.invalid_field("trace_id", "must be 32 lower-case hex digits")
        key = getattr(request, kind)
        found = False
        async for part in self._tracer().queries.find(key):
            for begin in range(0, len(part), _MAX_PART_BYTES):
                found = True
                response = pb.GetTraceResponse(traces_data=part[begin : begin + _MAX_PART_BYTES])
                await call.context.write(response.SerializeToString())
        if not found:
            raise errors.not_found(f"trace of {errors.echo(key)} is not known: not traced, or forgotten")

    def _tracer(self) -> Tracer:
        if self._core.tracer is None:
            raise errors.failed_precondition("telemetry is off")
        return self._core.tracer

    async def get_memory_plan(self, request: pb.GetMemoryPlanRequest, call: Call) -> pb.GetMemoryPlanResponse:
        """Says how a model's memory is divided."""
        described = self._core.models.find(request.model, call.caller).text.describe()
        return pb.GetMemoryPlanResponse(plan=described.memory_plan if described.HasField("memory_plan") else None)

    def _grace_ns(self, request: pb.UnloadModelRequest) -> int:
        if not request.HasField("grace"):
            return int(self._core.config.shutdown_grace_s * 1e9)
        grace_ns = request.grace.seconds * 10**9 + request.grace.nanos
        found = Violations()
        found.require(0 <= grace_ns <= _MAX_GRACE_NS, "grace", "must be at least 0 s and at most 3600 s")
        found.raise_if_any()
        return grace_ns


def _check_named(model: str, call: Call) -> None:
    if not model:
        raise errors.invalid_field("model", "must be set")
    call.caller.check_model(model)


def _repository_model(model: control_pb2.ModelBackend) -> pb.RepositoryModel:
    return pb.RepositoryModel(
        name=model.name,
        # The same numbers, for services and for people.
        state=cast(pb.ModelState, model.state),
        reason=model.reason,
        memory_bytes=model.memory_bytes,
    )


def method_handlers(core: ServiceCore) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Returns the handler of each method by its name."""
    admin = AdminHandlers(core)
    return {
        "LoadModel": unary(pb.LoadModelRequest, pb.LoadModelResponse, admin.load_model),
        "UnloadModel": unary(pb.UnloadModelRequest, pb.UnloadModelResponse, admin.unload_model),
        "ListRepository": unary(pb.ListRepositoryRequest, pb.ListRepositoryResponse, admin.list_repository),
        "Drain": unary(pb.DrainRequest, pb.DrainResponse, admin.drain),
        "SetTraceDetail": unary(pb.SetTraceDetailRequest, pb.SetTraceDetailResponse, admin.set_trace_detail),
        "GetTrace": streaming(pb.GetTraceRequest, admin.get_trace),
        "GetMemoryPlan": unary(pb.GetMemoryPlanRequest, pb.GetMemoryPlanResponse, admin.get_memory_plan),
    }


def register(server: grpc.aio.Server, core: ServiceCore) -> None:
    """Adds AdminService to a gRPC server."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, method_handlers(core)),))
