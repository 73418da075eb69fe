"""The models that this service fronts, each with its set of engines and its text.

A model of several engines is there once for each.

Owns which there are, the finding of a model by the name a caller gives and of the model that a
request id belongs to (ids carry their model's tag), and the connections to their engines. Models
are named by the supervisor (`control_client`) and come and go; a service that runs alone has one,
whose name is the engine's, known from its welcome on. Nothing here starts or ends an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import structlog

from headrace_model_folder import InvalidModelFolder
from headrace_protos.control.v1 import control_pb2
from headrace_service import errors
from headrace_service.auth.caller import Caller
from headrace_service.config import ServiceConfig
from headrace_service.engines import request_ids
from headrace_service.engines.engine_set import EngineSet
from headrace_service.engines.served_model import ServedModel
from headrace_service.text.text_loader import TextLoader
from headrace_service.tracing.tracer import Tracer

_log = structlog.get_logger("headrace.service")


class ServedModels:
    """All models of this service.

    Attributes:
        draining: whether no model takes new generations.
        repository: the supervisor's newest word on all models, loaded or not; None for a service
            alone, and before the first word.
    """

    def __init__(self, config: ServiceConfig, loader: TextLoader, tracer: Tracer | None) -> None:
        self.draining = False
        self.repository: control_pb2.ServerState | None = None
        self._config = config
        self._loader = loader
        self._tracer = tracer
        # Engines of all models, and by the models' names.
        self._models: list[ServedModel] = []
        self._engines: dict[str, EngineSet[ServedModel]] = {}
        self._connections: dict[ServedModel, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        # Whether any model ever was.
        self._was_known = False
        # Whether the models of the start were ever all loaded, and tried by this process. One that
        # runs alone waits for nobody.
        self._has_started = not config.control
        if config.engine:
            alone: EngineSet[ServedModel] = EngineSet()
            alone.add(ServedModel(config, config.engine, loader, tracer, alone))
            self._models += alone

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models))

    # -- what there is

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none.

        Raises:
            ServiceError: UNAVAILABLE; it is not loaded, or the models are not known yet.
        """
        name = self._default_name
        for model in self._models:
            if name is None or model.name == name:
                return model.engines.best
        if name is None:
            raise errors.unavailable("the models are not known yet")
        self._check_not_loading(name)
        raise errors.unavailable("the default model is not loaded")

    @property
    def names(self) -> list[str]:
        """Returns the names of the models that are served or being loaded, as far as known."""
        served = [model.name for model in self._models if model.name is not None]
        listed = self.repository.models if self.repository is not None else ()
        return list(dict.fromkeys([*served, *(model.name for model in listed if _is_loading(model))]))

    @property
    def serving(self) -> bool:
        """Whether the server has started, and a generation that names no model would be computed.

        Where the default model is not loaded, any other model that is served counts.
        """
        if self.draining or not self._started():
            return False
        default = [model for model in self._models if self._default_name in (None, model.name)]
        loaded = [model for model in default if not model.is_loading]
        return any(model.serving for model in loaded or self._models)

    def find(self, name: str, caller: Caller) -> ServedModel:
        """Returns the model of a name ("": the default) to a caller who may use it.

        Of several engines it is any that serves.

        Raises:
            ServiceError: PERMISSION_DENIED, whether there is such a model or not; NOT_FOUND;
                UNAVAILABLE while its engine has not been reached.
        """
        if name:
            caller.check_model(name)
        model = self.named(name)
        caller.check_model(model.text.facts.name)
        return model

    def named(self, name: str) -> ServedModel:
        """Returns the model of a name, "" is the default's, whoever asks.

        Raises:
            ServiceError: NOT_FOUND; UNAVAILABLE while its engine has not been reached.
        """
        if not name:
            return self.default.reached()
        for model in self._models:
            if model.name == name:
                return model.engines.best.reached()
        self._check_all_named()
        self._check_not_loading(name)
        raise errors.not_found(
            f"Request for unknown model: {errors.echo(name)} is not found; ListModels names the models of this server"
        )

    def known(self) -> list[ServedModel]:
        """Returns the models whose engines have said what they serve, an entry for each engine.

        Raises:
            ServiceError: UNAVAILABLE; there are models, or may be, but none of them is known yet.
        """
        known = [model for model in self._models if model.is_known]
        if not known and (self.names or self._models or self.repository is None):
            raise errors.unavailable("the engine cannot be reached yet")
        return known

    def of_request(self, request_id: str) -> ServedModel:
        """Returns the model, and of its engines the one, that a request id belongs to.

        Raises:
            ServiceError: NOT_FOUND; UNAVAILABLE while engines have not been reached.
        """
        tag = request_ids.tag_of(request_id)
        for model in self._models:
            if model.name is not None and model.tag == tag:
                return model.reached()
        self._check_all_named()
        raise errors.not_found(f"request {errors.echo(request_id)} is not known, or its log has expired")

    @property
    def _default_name(self) -> str | None:
        return self.repository.default_model if self.repository is not None else None

    def _check_all_named(self) -> None:
        """A name that nobody has is unknown only when all names are known.

        Raises ServiceError: UNAVAILABLE.
        """
        if not self._models and self.repository is None:
            raise errors.unavailable("the models are not known yet")
        for model in self._models:
            if model.name is None:
                model.reached()

    def _check_not_loading(self, name: str) -> None:
        """Raises ServiceError: UNAVAILABLE; the model waits to be loaded, or its engine starts."""
        listed = self.repository.models if self.repository is not None else ()
        if any(model.name == name and _is_loading(model) for model in listed):
            raise errors.unavailable(f"model {errors.echo(name)} is being loaded")

    def _started(self) -> bool:
        """Whether the models of the start are loaded, and this process has tried all that are.

        Once that is so, it stays so.

        A service that takes the place of one that died waits for what the others know already; an
        engine that can't be reached holds nobody up.
        """
        if not self._has_started and self.repository is not None and not self.repository.starting:
            ready = [model for model in self._models if model.state == control_pb2.BACKEND_STATE_READY]
            self._has_started = all(model.was_tried for model in ready)
            missing = sorted({str(model.name) for model in ready if not model.is_known})
            if self._has_started and missing:
                _log.error("service.started_without", models=missing)
        return self._has_started

    # -- how they come and go

    def update(self, state: control_pb2.ServerState) -> None:
        """Takes the supervisor's newest state: connects to new engines and leaves lost ones."""
        self.repository = state
        before, self._engines, self._models = self._engines, {}, []
        for listed in state.models:
            engines = before.get(listed.name)
            if engines is None:
                engines = EngineSet()
            self._engines[listed.name] = engines
            self._follow_engines(engines, listed)
            for engine in engines:
                engine.update(listed.state)
            self._models += engines
        self.set_draining(state.draining)
        self._wake.set()

    def set_draining(self, draining: bool) -> None:
        """Whether new generations are refused on all models; what runs goes on."""
        self.draining = draining
        for model in self._models:
            model.set_draining(draining)

    async def run(self) -> None:
        """Keeps one connection for each model, until cancelled.

        Raises:
            InvalidModelFolder: the folder of the only model, or of the default model at the start,
                can't be served by this process.
        """
        try:
            while True:
                self._wake.clear()
                self._follow_models()
                wake = asyncio.ensure_future(self._wake.wait())
                try:
                    await asyncio.wait({wake, *self._connections.values()}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    wake.cancel()
                for model in [model for model, task in self._connections.items() if task.done()]:
                    self._connection_ended(model)
        finally:
            for task in self._connections.values():
                task.cancel()
            await asyncio.gather(*self._connections.values(), return_exceptions=True)

    def _connection_ended(self, model: ServedModel) -> None:
        """Notes that a model's folder can't be served.

        It ends a process that has nothing else to do; otherwise the model alone is broken.
        """
        try:
            self._connections.pop(model).result()
        except InvalidModelFolder as error:
            if self.repository is None or (model.name == self._default_name and not self._was_known):
                raise
            model.broken = f"model {model.name} can't be served by this process; its log says why"
            _log.error("model.broken", model=model.name, reason=str(error))

    def _follow_engines(self, engines: EngineSet[ServedModel], listed: control_pb2.ModelBackend) -> None:
        """Has a set consist of the engines that the supervisor names.

        An engine whose number has another address now is another engine.
        """
        addresses = engine_addresses(listed)
        for engine in list(engines):
            if addresses.get(engine.number) != engine.address:
                engines.remove(engine)
        present = {engine.number for engine in engines}
        for number, address in addresses.items():
            if number not in present:
                config, loader = self._config, self._loader
                engines.add(ServedModel(config, address, loader, self._tracer, engines, listed.name, number))

    def _follow_models(self) -> None:
        self._was_known = self._was_known or any(model.is_known for model in self._models)
        for model in self._models:
            if model not in self._connections and not model.broken:
                self._connections[model] = asyncio.create_task(model.connection.run(), name="engine-connection")
        for model in [model for model in self._connections if model not in self._models]:
            self._connections.pop(model).cancel()


def engine_addresses(model: control_pb2.ModelBackend) -> dict[int, str]:
    """Returns the addresses of a model's engines by number; none while it is not loaded."""
    addresses = (model.engine_address, *model.replica_addresses)
    return {number: address for number, address in enumerate(addresses) if address}


def _is_loading(model: control_pb2.ModelBackend) -> bool:
    return model.state == control_pb2.BACKEND_STATE_LOADING
