"""The models that this service fronts, each with its set of engines and its text.

A model of several engines is there once for each.

Owns which there are, the finding of a model by the name a caller gives and of the model that a
request id belongs to (ids carry their model's tag), and the connections to their engines. Models
are named by the supervisor (`control_client`) and come and go; a service that runs alone has one,
whose engines are named by its configuration, found by name (`engine_names`) or by a file
(`engine_file`), and whose name is theirs, known from a welcome on (`engine_group`). Nothing here
starts or ends an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import structlog

from headrace_model_folder import InvalidModelFolder
from headrace_protos.control.v1 import control_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.auth.caller import Caller
from headrace_service.config import ServiceConfig
from headrace_service.engines import request_ids, takeover_order
from headrace_service.engines.engine_file import EngineFile
from headrace_service.engines.engine_group import EngineGroup
from headrace_service.engines.engine_names import EngineNames
from headrace_service.engines.engine_set import EngineSet
from headrace_service.engines.served_model import ServedModel
from headrace_service.text.text_loader import TextLoader
from headrace_service.tracing.tracer import Tracer

_log = structlog.get_logger("headrace.service")
# More engines than a supervisor ever had for one model, and few enough to tell models apart by.
_MOST_REPLICAS = 1024

OnUnguarded = Callable[[ServedModel, engine_pb2.Unguarded], None]


def _guard_nothing(engine: ServedModel, unguarded: engine_pb2.Unguarded) -> None:
    """What a process does that guards nothing."""


class ServedModels:
    """All models of this service.

    Attributes:
        draining: whether no model takes new generations.
        repository: the supervisor's newest word on all models, loaded or not; None for a service
            alone, and before the first word.
        look_ups: of the names that the engines of a service alone are found by.
        file: that names the engines of a service alone; None: there is none.
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
        # The engines of a service that runs alone.
        self._group: EngineGroup[ServedModel] = EngineGroup()
        self._on_unguarded: OnUnguarded = _guard_nothing
        self.look_ups = EngineNames(config.engines_dns, config.engines_dns_s, self.follow)
        self.file = EngineFile(config.engines_file, self.follow) if config.engines_file else None
        # Addresses that are left out because request ids would not tell them from others.
        self._unnumbered: set[str] = set()
        for address in config.engine:
            self._join(address)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models))

    def hear_of_unguarded(self, on_unguarded: OnUnguarded) -> None:
        """From now on calls with each engine's requests that have no guardian."""
        self._on_unguarded = on_unguarded

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
            failures = [*self.look_ups.failures.values(), self.file.failure if self.file else ""]
            raise errors.unavailable("; ".join(filter(None, failures)) or "the models are not known yet")
        self._check_not_loading(name)
        raise errors.unavailable("the default model is not loaded")

    @property
    def names(self) -> list[str]:
        """Returns the names of the models that are served or being loaded, as far as known."""
        served = [model.name for model in self._used if model.name is not None]
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

        Of several engines it is any that serves. An alias means the default model.

        Raises:
            ServiceError: PERMISSION_DENIED, whether there is such a model or not; NOT_FOUND;
                UNAVAILABLE while its engine has not been reached.
        """
        if name in self._config.default_model_aliases:
            name = ""
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
        for model in self._used:
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
        known = [model for model in self._used if model.is_known]
        if not known and (self.names or self._models or self.repository is None):
            raise errors.unavailable("the engine cannot be reached yet")
        return known

    def holders(self, request_id: str) -> list[ServedModel]:
        """Returns the engines that may have a request, the likeliest first.

        That is the one of the id's tag and, since it may be lost or have been, those that would
        have gone on with its requests. Engines that are out of reach are not among them.

        Raises:
            ServiceError: NOT_FOUND, no model of this service has such ids; UNAVAILABLE while
                engines have not been reached, or none of them is.
        """
        own, engines = self._own_engine(request_id)
        others = [engine for engine in engines if engine is not own and engine.is_reachable]
        holders = takeover_order.in_order(others, request_ids.place_of(request_id))
        if own is not None and (own.is_reachable or not holders):
            own.reached().engine.check_reachable()
            holders.insert(0, own)
        if not holders:
            raise errors.unavailable("the engine of this request cannot be reached")
        return holders

    def not_held(self, request_id: str) -> errors.ServiceError:
        """Returns what a caller hears of a request that none of its `holders` has.

        UNAVAILABLE while the engine of its tag is out of reach, which may have it, or is about to
        have its requests go on elsewhere; else NOT_FOUND.
        """
        own, _ = self._own_engine(request_id)
        if own is not None and not own.is_reachable:
            return errors.unavailable("the engine of this request cannot be reached, and no other one has it yet")
        return errors.not_found(f"request {errors.echo(request_id)} is not known, or its log has expired")

    def _own_engine(self, request_id: str) -> tuple[ServedModel | None, Iterable[ServedModel]]:
        """Returns the engine of an id's tag, None if it is gone, and the engines of its model.

        Raises ServiceError: NOT_FOUND, or UNAVAILABLE while names of models are not known.
        """
        if self._config.engine and len(self._models) == 1:
            # The only engine may have other names at other services.
            return self._models[0], self._models
        tag = request_ids.tag_of(request_id)
        for model in self._models:
            if model.name is not None and model.tag == tag:
                return model, model.engines
        self._check_all_named()
        for model in self._models:
            if self._may_have_had(model, tag):
                return None, model.engines
        raise errors.not_found(f"request {errors.echo(request_id)} is not known, or its log has expired")

    def _may_have_had(self, model: ServedModel, tag: str) -> bool:
        """Whether a tag may be that of an engine of this model which has left."""
        if model.name is None:
            return False
        number = request_ids.number_in(tag, model.name)
        # Those that the supervisor counts are few; addresses have any number.
        return number is not None and (not self._config.control or number < _MOST_REPLICAS)

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

    @property
    def _used(self) -> list[ServedModel]:
        """Engines that new requests may go to, reached or not."""
        return [model for model in self._models if not model.left_out]

    def left_out(self) -> list[str]:
        """Returns the engines of the configuration that are not used, a line each, with why."""
        return [f"{model.address}: {model.left_out}" for model in self._models if model.left_out]

    def by_address(self) -> dict[str, bool]:
        """Returns whether each engine of the configuration serves; none with a supervisor."""
        return {model.address: model.serving for model in self._models} if not self._config.control else {}

    # -- how they come and go

    def follow(self, addresses: Collection[str], server_names: Mapping[str, str]) -> None:
        """Has the engines of a service alone be those of the configuration and these.

        One that is not among them any more gets no new requests, and is left when its streams are
        over.

        Args:
            addresses: HOST:PORT each.
            server_names: the name that an engine's certificate is for, by its address.
        """
        wanted = {*self._config.engine, *addresses}
        for model in [model for model in self._models if model.address not in wanted]:
            self._group.leave(model)
            if not model.engine.streams:
                self._models.remove(model)
        present = {model.address for model in self._group}
        for address in sorted(wanted - present - self._unnumbered):
            self._join(address, server_names.get(address, ""))
        self._wake.set()

    def _join(self, address: str, server_name: str = "") -> None:
        """Takes an engine of a service alone in, unless requests could not be told apart by it."""
        number = request_ids.number_of(address)
        for other in self._models:
            if other.address == address:
                self._group.join(other)
                return
            if other.number == number:
                self._unnumbered.add(address)
                _log.error("engine.left_out", engine=address, why=f"has the number of {other.address} in request ids")
                return
        config, group = self._config, self._group
        model = ServedModel(
            config, address, self._loader, self._tracer, group.engines, number=number, group=group, tls_name=server_name
        )
        self._introduce(model)
        model.set_draining(self.draining)
        group.join(model)
        self._models.append(model)

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
                engine = ServedModel(config, address, loader, self._tracer, engines, listed.name, number)
                self._introduce(engine)
                engines.add(engine)

    def _introduce(self, engine: ServedModel) -> None:
        """Has what an engine says of requests without a guardian reach `hear_of_unguarded`'s."""
        engine.engine.on_unguarded = lambda unguarded: self._on_unguarded(engine, unguarded)

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
