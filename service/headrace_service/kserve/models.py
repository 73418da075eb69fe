"""What the handlers ask of a model, whatever is behind it, and which models there are.

Owns the names: every model that the server has loaded under its own name and, under names that
clients of other servers expect, the default one with their tensors; conformance models besides. A
loaded model's own name comes before all others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from headrace_service import errors
from headrace_service.auth.caller import Caller
from headrace_service.calls.call import Call
from headrace_service.kserve.accounting import Account
from headrace_service.kserve.messages import refusals
from headrace_service.kserve.messages.generation_wire import GenerationWire
from headrace_service.kserve.messages.infer_request import InferRequest
from headrace_service.kserve.messages.signature import Signature
from headrace_service.streams.generation_stream import GenerationStream


class Responder(Protocol):
    """The place where a request on a stream leaves its responses."""

    async def send(self, response: bytes) -> None:
        """Sends one serialized ModelInferResponse."""

    async def follow(self, stream: GenerationStream, wire: GenerationWire) -> None:
        """Sends the responses of a running generation; returns when its last one was sent.

        Raises:
            ServiceError: what ended it before its time.
        """


class Model(Protocol):
    """A model under one name."""

    @property
    def name(self) -> str:
        """Name by which requests ask for the model."""

    @property
    def signature(self) -> Signature:
        """Tensors that the model takes and gives."""

    @property
    def ready(self) -> bool:
        """Whether a request that arrives now would be computed."""

    @property
    def properties(self) -> Mapping[str, str]:
        """Properties that ModelMetadata reports besides the tensors."""

    def check_allowed(self, caller: Caller) -> None:
        """Raises ServiceError if the caller may not use the model.

        The code is PERMISSION_DENIED, or UNAVAILABLE while the rights are not known.
        """

    async def answer(self, request: InferRequest, call: Call, account: Account) -> bytes:
        """Returns the one response to a request, as a ModelInferResponse.

        Raises:
            ServiceError: the request cannot be answered, or not by one response.
        """

    async def respond(self, request: InferRequest, call: Call, account: Account, responder: Responder) -> None:
        """Gives the responses to a request on a stream.

        Raises:
            ServiceError: the request cannot be answered.
        """


class InvalidModelModule(errors.CannotStart):
    """A module that was to bring models brings none."""


def models_of(module: str) -> list[Model]:
    """Returns the models that a Python module's `models()` makes, for this process alone.

    Raises:
        InvalidModelModule: it cannot be imported, or has no such function.
    """
    try:
        make: Callable[[], Iterable[Model]] = importlib.import_module(module).models
    except (ImportError, AttributeError, TypeError) as error:
        raise InvalidModelModule(f"conformance_models: {module}: {error}") from error
    return list(make())


class ModelDirectory:
    """The models that requests may ask for, by name.

    Args:
        sources: each returns models that exist now, the most important first; called at every
            look-up.
    """

    def __init__(self, sources: Iterable[Callable[[], Iterable[Model]]]) -> None:
        self._sources = list(sources)

    def all(self) -> list[Model]:
        """Returns all models, one per name."""
        found: dict[str, Model] = {}
        for source in self._sources:
            for model in source():
                found.setdefault(model.name, model)
        return list(found.values())

    def find(self, name: str, version: str, caller: Caller, field: str = "model_name") -> Model:
        """Returns the model of a name.

        Raises:
            ServiceError: INVALID_ARGUMENT, no name, or what is no version; NOT_FOUND; what
                `check_allowed` raises.
        """
        refusals.check_name(name, field)
        for source in self._sources:
            for model in source():
                if model.name == name:
                    refusals.check_version(name, version)
                    model.check_allowed(caller)
                    return model
        # A key learns the same of all names that are not its own.
        caller.check_model(name)
        raise refusals.unknown_model(name)

    def usable(self, caller: Caller) -> list[Model]:
        """Returns the models that a caller may use."""
        return [model for model in self.all() if _allowed(model, caller)]


def _allowed(model: Model, caller: Caller) -> bool:
    try:
        model.check_allowed(caller)
    except errors.ServiceError:
        return False
    return True
