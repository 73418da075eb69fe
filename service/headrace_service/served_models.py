"""The models that this service fronts, each with its engine and its text.

Owns the finding of a model by the name a caller gives, and of the model that a request id belongs to: ids carry their model's tag. A model's name is
the engine's, known from its welcome on. Nothing here starts or ends an engine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterator

from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors, request_ids
from headrace_service.chat_template import ChatTemplateRenderer
from headrace_service.config import ServiceConfig
from headrace_service.engine_client import EngineClient
from headrace_service.engine_connection import EngineConnection
from headrace_service.text_model import TextModel


class TextLoader:
    """Reads what a service needs of model folders, in threads, and keeps the template helper ready."""

    def __init__(
        self, config: ServiceConfig, threads: concurrent.futures.Executor, templates: ChatTemplateRenderer
    ) -> None:
        self._config = config
        self._threads = threads
        self._templates = templates

    async def load(self, engine: engine_pb2.EngineModel) -> TextModel:
        """Returns the text side of the engine's model.

        Raises:
            InvalidModelFolder: the folder cannot be served.
        """
        config = self._config
        text = await asyncio.get_running_loop().run_in_executor(
            self._threads, TextModel.load, engine, config.model_folder, config.max_text_bytes, self._threads
        )
        if text.chat_template is not None:
            await self._templates.warm_up()
        return text


class ServedModel:
    """One model: the client of its engine, and its text once the engine has said what it serves.

    Attributes:
        engine: questions and subscriptions.
        connection: the life of the engine's connection; whoever owns the process runs it.
    """

    def __init__(self, config: ServiceConfig, address: str, loader: TextLoader) -> None:
        self.engine = EngineClient()
        self.connection = EngineConnection(config, address, self.engine, self._prepare)
        self._loader = loader
        self._text: TextModel | None = None

    @property
    def name(self) -> str | None:
        """The name callers use; None until the engine was reached."""
        return self._text.facts.name if self._text is not None else None

    @property
    def text(self) -> TextModel:
        """Tokenizer, template, limits.

        Raises:
            ServiceError: UNAVAILABLE; the engine has not said yet what it serves.
        """
        if self._text is None:
            raise errors.unavailable("the engine cannot be reached yet")
        return self._text

    @property
    def tag(self) -> str:
        """What the ids of this model's requests end with."""
        return request_ids.model_tag(self.text.facts.name)

    @property
    def serving(self) -> bool:
        """Whether its engine is known and makes progress."""
        return self._text is not None and self.engine.serving

    async def _prepare(self, engine: engine_pb2.EngineModel) -> None:
        """Loads tokenizer and template of the engine's model, unless they are loaded. Raises InvalidModelFolder."""
        known = self._text.described_anew(engine) if self._text is not None else None
        self._text = known if known is not None else await self._loader.load(engine)


class ServedModels:
    """All models of this service; the first is what requests without a name mean."""

    def __init__(self, models: list[ServedModel]) -> None:
        self._models = models

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none."""
        return self._models[0]

    def find(self, name: str) -> ServedModel:
        """Returns the model of a name; "" is the default's.

        Raises:
            ServiceError: NOT_FOUND; UNAVAILABLE while its engine has not been reached.
        """
        if not name:
            return self._reached(self.default)
        for model in self._models:
            if model.name == name:
                return model
        for model in self._models:
            self._reached(model)
        raise errors.not_found(
            f"Request for unknown model: {errors.echo(name)} is not found; ListModels names the models of this server"
        )

    def of_request(self, request_id: str) -> ServedModel:
        """Returns the model that a request id belongs to.

        Raises:
            ServiceError: NOT_FOUND; UNAVAILABLE while engines have not been reached.
        """
        tag = request_ids.tag_of(request_id)
        for model in self._models:
            if self._reached(model).tag == tag:
                return model
        raise errors.not_found(f"request {errors.echo(request_id)} is not known, or its log has expired")

    @staticmethod
    def _reached(model: ServedModel) -> ServedModel:
        assert model.text  # raises UNAVAILABLE before the first welcome
        return model
