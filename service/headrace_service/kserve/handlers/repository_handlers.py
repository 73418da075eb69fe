"""RepositoryIndex, RepositoryModelLoad and RepositoryModelUnload.

Owns their form only; what is loaded and unloaded, and by whom, is `model_admin`'s. Conformance
models and the names that clients of other servers expect are listed, are loaded already, and cannot
be unloaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from headrace_protos.control.v1 import control_pb2
from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service import errors
from headrace_service.calls.call import Call
from headrace_service.errors import ServiceError
from headrace_service.kserve.messages import refusals
from headrace_service.kserve.models import ModelDirectory
from headrace_service.service_core import ServiceCore

_MODEL_NAME = re.compile(r"[^/\x00-\x1f]{1,255}")
_READY, _UNAVAILABLE = "READY", "UNAVAILABLE"
_STATES = {
    control_pb2.BACKEND_STATE_READY: _READY,
    control_pb2.BACKEND_STATE_LOADING: "LOADING",
    control_pb2.BACKEND_STATE_UNLOADING: "UNLOADING",
}
_OFF = "explicit model load / unload is off: this service runs without a supervisor"
_UNLOAD_DEPENDENTS = "unload_dependents"


class RepositoryHandlers:
    """Handlers of the RPCs that list, load and unload models."""

    def __init__(self, core: ServiceCore, models: ModelDirectory) -> None:
        self._core = core
        self._models = models

    async def index(self, request: pb.RepositoryIndexRequest, call: Call) -> pb.RepositoryIndexResponse:
        """Lists the models that are or could be served."""
        _check_repository(request.repository_name)
        listed = {
            model.name: (_READY if model.ready else _UNAVAILABLE, "") for model in self._models.usable(call.caller)
        }
        for name, reported in self._in_repository().items():
            if call.caller.may_use_model(name):
                listed[name] = reported
        response = pb.RepositoryIndexResponse()
        for name, (state, reason) in sorted(listed.items()):
            if state == _READY or not request.ready:
                response.models.add(name=name, version=refusals.VERSION, state=state, reason=reason)
        return response

    async def load(self, request: pb.RepositoryModelLoadRequest, call: Call) -> pb.RepositoryModelLoadResponse:
        """Loads a model of the repository and answers when it serves."""
        name = _named(request)
        call.caller.check_model(name)
        if request.parameters:
            raise refusals.unsupported(
                f"failed to load {errors.echo(name)}: parameters ({', '.join(sorted(request.parameters)[:4])[:100]}) "
                "cannot override a model's own folder"
            )
        self._check_controlled()
        try:
            if not self._is_built_in(name):
                await self._core.admin.load(name)
        except ServiceError as error:
            raise _meant(error, f"failed to load {errors.echo(name)}, ") from None
        return pb.RepositoryModelLoadResponse(model_name=name, is_loaded=True)

    async def unload(self, request: pb.RepositoryModelUnloadRequest, call: Call) -> pb.RepositoryModelUnloadResponse:
        """Ends a model, its open generations within the server's grace time first."""
        name = _named(request)
        call.caller.check_model(name)
        _check_unload_parameters(request.parameters)
        self._check_controlled()
        if self._is_built_in(name):
            raise refusals.unsupported(f"failed to unload {errors.echo(name)}: it is built in, or another model's name")
        try:
            await self._core.admin.unload(name, int(self._core.config.shutdown_grace_s * 1e9))
        except ServiceError as error:
            raise _meant(error, f"failed to unload {errors.echo(name)}, ") from None
        return pb.RepositoryModelUnloadResponse(model_name=name, is_unloaded=True)

    def _in_repository(self) -> dict[str, tuple[str, str]]:
        state = self._core.models.repository
        models = state.models if state is not None else ()
        return {model.name: (_STATES.get(model.state, _UNAVAILABLE), model.reason) for model in models}

    def _check_controlled(self) -> None:
        if self._core.control is None:
            raise refusals.unsupported(_OFF)

    def _is_built_in(self, name: str) -> bool:
        """Whether a name is served without being a model's of its own."""
        return name not in self._in_repository() and any(model.name == name for model in self._models.all())


def _named(request: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest) -> str:
    """Returns the model that a repository request means.

    Triton's clients name a repository besides, KServe's name the model in that field.
    """
    name = request.model_name or request.repository_name
    if request.model_name:
        _check_repository(request.repository_name)
    refusals.check_name(name, "model_name")
    if not _MODEL_NAME.fullmatch(name) or name.strip(" .") == "" or name != name.strip():
        raise refusals.invalid(
            f"failed to load {errors.echo(name)}: model_name: must be the name of a folder; path traversal is not "
            "allowed",
            "model_name",
        )
    return name


def _check_repository(name: str) -> None:
    if name:
        raise refusals.invalid(
            f"repository_name: must be empty, there is one repository; got {errors.echo(name)}", "repository_name"
        )


def _check_unload_parameters(parameters: Mapping[str, pb.ModelRepositoryParameter]) -> None:
    for key, value in parameters.items():
        # No model here is made of others.
        if key != _UNLOAD_DEPENDENTS or value.WhichOneof("parameter_choice") != "bool_param":
            raise refusals.invalid(f"parameters: {errors.echo(key)} is not known, or no bool", "parameters")


def _meant(error: ServiceError, what: str) -> ServiceError:
    """Returns the supervisor's refusal in the words that clients look for."""
    reported = ServiceError(error.code, what + error.message)
    reported.details = error.details
    return reported
