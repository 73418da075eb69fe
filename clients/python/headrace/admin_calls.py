"""Every call of AdminService as a value, and its typed answers.

Owns the pairing of requests with answers, as calls.py does for the inference service. Does not open
channels (admin.py runs these). Python values come in, Unary values go out.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from enum import StrEnum

from headrace import answers
from headrace.calls import assign_given
from headrace.errors import invalid
from headrace.protobuf_fields import assign
from headrace.rpc import Streaming, Unary
from headrace.spec import TraceDetailName, duration, trace_detail_of
from headrace.v1 import admin_pb2 as pb


class ModelState(StrEnum):
    """The state of a model of the repository."""

    UNSPECIFIED = "unspecified"
    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"

    @classmethod
    def from_proto(cls, value: int) -> ModelState:
        """The state of a wire value; a value newer than this client is UNSPECIFIED."""
        return _STATES.get(value, cls.UNSPECIFIED)


_STATES: dict[int, ModelState] = {
    pb.MODEL_STATE_UNLOADED: ModelState.UNLOADED,
    pb.MODEL_STATE_LOADING: ModelState.LOADING,
    pb.MODEL_STATE_READY: ModelState.READY,
    pb.MODEL_STATE_UNLOADING: ModelState.UNLOADING,
    pb.MODEL_STATE_FAILED: ModelState.FAILED,
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that serves; `existing` tells that it did so before the call."""

    model: answers.Model
    existing: bool


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """A model of the repository folder.

    Attributes:
        name: Name of its folder.
        state: Its state, from unloaded to ready.
        reason: Why it failed; "" otherwise.
        memory_bytes: Memory of the device that it may take; 0: not limited, or not loaded.
    """

    name: str
    state: ModelState
    reason: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Draining:
    """What still runs and waits, over all models, when a server was asked to drain or to resume."""

    running_sequences: int
    waiting_requests: int


def load_model(model: str, memory_bytes: int | None) -> Unary[Loaded]:
    """Starts a backend for a model of the repository."""
    request = pb.LoadModelRequest()
    assign(request, "model", model, "model")
    assign_given(request, "memory_bytes", memory_bytes)
    return Unary("LoadModel", request, _loaded, takes_long=True)


def unload_model(model: str, grace: float | datetime.timedelta | None) -> Unary[None]:
    """Takes a model away, after the grace time at the latest."""
    request = pb.UnloadModelRequest()
    assign(request, "model", model, "model")
    if grace is not None:
        request.grace.CopyFrom(duration(grace, "grace"))
    return Unary("UnloadModel", request, lambda _: None, takes_long=True)


def list_repository() -> Unary[tuple[RepositoryModel, ...]]:
    """The models of the repository folder and those served."""
    return Unary("ListRepository", pb.ListRepositoryRequest(), lambda r: tuple(map(_repository_model, r.models)))


def drain(*, resume: bool) -> Unary[Draining]:
    """Takes no new generations, or takes them again."""
    return Unary("Drain", pb.DrainRequest(resume=resume), lambda r: Draining(r.running_sequences, r.waiting_requests))


def memory_plan(model: str | None) -> Unary[answers.MemoryPlan | None]:
    """How a model's memory is divided; None while it loads."""
    request = pb.GetMemoryPlanRequest()
    assign_given(request, "model", model)
    return Unary(
        "GetMemoryPlan", request, lambda r: answers.memory_plan_from_proto(r.plan) if r.HasField("plan") else None
    )


def set_trace_detail(detail: TraceDetailName) -> Unary[None]:
    """How much of each token is traced from now on."""
    request = pb.SetTraceDetailRequest(detail=trace_detail_of(detail, "detail"))
    return Unary("SetTraceDetail", request, lambda _: None)


def get_trace(request_id: str | None, trace_id: str | None) -> Streaming:
    """A recent trace, in parts."""
    if (request_id is None) == (trace_id is None):
        raise invalid("key", "exactly one of request_id and trace_id must be given")
    request = pb.GetTraceRequest()
    assign_given(request, "request_id", request_id)
    assign_given(request, "trace_id", trace_id)
    return Streaming("GetTrace", request)


def _loaded(response: pb.LoadModelResponse) -> Loaded:
    return Loaded(answers.model_from_proto(response.model), response.existing)


def _repository_model(model: pb.RepositoryModel) -> RepositoryModel:
    return RepositoryModel(model.name, ModelState.from_proto(model.state), model.reason, model.memory_bytes)
