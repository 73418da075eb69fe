"""One engine of a model that this service fronts: its client, its connection, and the model's text.

Owns what may be asked of it now, and why not: not reached yet, being loaded, unloaded or drained,
not to be served by this process. Which engines there are is `served_models`'s.
"""

from __future__ import annotations

from headrace_model_folder import InvalidModelFolder
from headrace_protos.control.v1 import control_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.config import ServiceConfig
from headrace_service.engines import request_ids
from headrace_service.engines.engine_client import EngineClient
from headrace_service.engines.engine_connection import EngineConnection
from headrace_service.engines.engine_group import EngineGroup, Identity, LeftOut
from headrace_service.engines.engine_set import EngineSet
from headrace_service.engines.routing.engine_load import EngineLoad
from headrace_service.text.text_loader import TextLoader
from headrace_service.text.text_model import TextModel
from headrace_service.tracing.tracer import Tracer

# Why no new generation is taken, by what the supervisor says of the model.
_CLOSED = {
    control_pb2.BACKEND_STATE_LOADING: "the model is being loaded",
    control_pb2.BACKEND_STATE_UNLOADING: "the model is being unloaded",
}


class ServedModel:
    """One engine of a model: its client, and the model's text once it is known what it serves.

    Attributes:
        number: its number among the model's engines.
        engines: the engines of the model.
        address: where its backend listens.
        engine: questions and subscriptions.
        connection: the life of the engine's connection; `ServedModels` runs it.
        state: what the supervisor says of the model; BACKEND_STATE_UNSPECIFIED without a
            supervisor.
        closed: why no new generation is taken; "" while they are.
        broken: why this process can't serve it at all; "" unless so.
        left_out: why the engine is not used beside the others; "" unless so.
    """

    def __init__(
        self,
        config: ServiceConfig,
        address: str,
        loader: TextLoader,
        tracer: Tracer | None,
        engines: EngineSet[ServedModel],
        name: str | None = None,
        number: int = 0,
        group: EngineGroup[ServedModel] | None = None,
        tls_name: str = "",
    ) -> None:
        self.number = number
        self.engines = engines
        self.address = address
        self.engine = EngineClient(config.max_engine_message_bytes, tracer, engines.quotas, engines.holds, number)
        self.connection = EngineConnection(
            config, address, tls_name, self.engine, self._prepare, self._failed, lambda: self.is_leaving
        )
        self.state: control_pb2.BackendState = control_pb2.BACKEND_STATE_UNSPECIFIED
        self.closed = ""
        self.broken = ""
        self.left_out = ""
        self._group = group
        self._loader = loader
        self._name = name
        self._text: TextModel | None = None
        # Attempts to connect that had begun when the supervisor first said READY.
        self._attempts_before_ready: int | None = None

    @property
    def name(self) -> str | None:
        """The name callers use.

        None until this engine, or another one of the model, was reached where nobody else gave it.
        """
        if self._name is not None:
            return self._name
        texts = (engine._text for engine in (self, *self.engines))
        return next((text.facts.name for text in texts if text is not None), None)

    @property
    def text(self) -> TextModel:
        """Tokenizer, template, limits. Raises ServiceError: see `reached`."""
        self.reached()
        assert self._text is not None
        return self._text

    def reached(self) -> ServedModel:
        """Returns this model, once its engine has said what it serves.

        Raises:
            ServiceError: UNAVAILABLE, it has not yet; FAILED_PRECONDITION, this process can't serve
                it.
        """
        if self.broken:
            raise errors.failed_precondition(self.broken)
        if self._text is None:
            why = f"the engine {self.left_out}" if self.left_out else "the engine cannot be reached yet"
            raise errors.unavailable(_CLOSED.get(self.state, why))
        return self

    @property
    def is_known(self) -> bool:
        """Whether its engine has said what it serves."""
        return self._text is not None and not self.broken

    @property
    def is_leaving(self) -> bool:
        """Whether it is being unloaded."""
        return self.state == control_pb2.BACKEND_STATE_UNLOADING

    @property
    def is_loading(self) -> bool:
        """Whether it is being loaded: not all of its engines have served yet."""
        return self.state == control_pb2.BACKEND_STATE_LOADING

    @property
    def was_tried(self) -> bool:
        """Whether this process has learned what its engine serves, or that it can't at present.

        It can't where an attempt failed that began after the engine was ready.
        """
        if self.is_known or self.broken:
            return True
        before = self._attempts_before_ready
        return before is not None and self.connection.num_attempts >= before + 2

    def update(self, state: control_pb2.BackendState) -> None:
        """Takes the supervisor's newest word on the model."""
        self.state = state
        if state == control_pb2.BACKEND_STATE_READY and self._attempts_before_ready is None:
            self._attempts_before_ready = self.connection.num_attempts

    @property
    def tag(self) -> str:
        """What the ids of this engine's requests end with.

        Raises ServiceError: UNAVAILABLE while its name is not known.
        """
        return request_ids.model_tag(self.name if self.name is not None else self.text.facts.name, self.number)

    @property
    def is_reachable(self) -> bool:
        """Whether its engine is known and hears of requests."""
        return self.is_known and self.engine.is_reachable

    @property
    def num_open(self) -> int:
        """Generations that this process follows on this engine."""
        return len(self.engine.streams)

    @property
    def load(self) -> EngineLoad:
        """How busy its engine is, as far as this process knows."""
        return self.engine.known_load

    @property
    def serving(self) -> bool:
        """Whether its engine is known and makes progress, and new generations are taken."""
        return self.is_known and self.engine.serving and not self.closed and not self.left_out

    @property
    def takes_over(self) -> bool:
        """Whether it may go on with what a lost engine of the model computed.

        A server that is drained lets generations end.
        """
        return self.is_known and self.engine.serving and not self.left_out and not self.is_leaving

    def check_open(self) -> None:
        """Raises UNAVAILABLE while no new generations are taken."""
        if self.closed:
            raise errors.unavailable(self.closed)

    def set_draining(self, draining: bool) -> None:
        """Whether new generations are refused because the server is drained; what runs goes on."""
        drained = "the server is drained and takes no new generations" if draining else ""
        self.closed = drained or _CLOSED.get(self.state, "")

    async def _prepare(self, engine: engine_pb2.EngineModel) -> None:
        """Loads tokenizer and template of the engine's model, unless an engine of it has them.

        Raises:
            InvalidModelFolder: there is no other engine, and its folder can't be served.
            LeftOut: the engine is not to be used beside the others.
        """
        if self._group is not None:
            await self._group.admit(self, Identity(engine.name, engine.revision))
        try:
            await self._describe(engine)
        except InvalidModelFolder as error:
            if self._group is None or len(self._group) == 1:
                raise
            raise LeftOut(f"has a model whose tokenizer can't be read here: {error}") from None
        if self._group is not None:
            self._group.take_in(self)

    def _failed(self, why: str) -> None:
        if self._group is not None:
            self._group.failed(self, why)

    async def _describe(self, engine: engine_pb2.EngineModel) -> None:
        texts = [model._text for model in (self, *self.engines) if model._text is not None]
        known = next((anew for text in texts if (anew := text.described_anew(engine)) is not None), None)
        self._text = known if known is not None else await self._loader.load(engine)
