"""What the handlers of one service process share.

Owns the model that is served (known from the engine's welcome on), the count of open generations, and whether new ones are taken. Holds the
engine client, the tokenizer threads and the template helper; no handler makes its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Iterator

from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.chat_template import ChatTemplateRenderer
from headrace_service.config import ServiceConfig
from headrace_service.engine_client import EngineClient
from headrace_service.generation_stream import GenerationStream
from headrace_service.request_ids import RequestIds
from headrace_service.text_model import TextModel

_RETRY_WHEN_FULL_S = 1.0


class ServiceCore:
    """The state of one service process."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.engine = EngineClient()
        self.request_ids = RequestIds()
        self.templates = ChatTemplateRenderer(config.template_timeout_s, config.template_memory_bytes)
        # Streams whose writer may wait for a reader, those of ended requests included.
        self.delivering: set[GenerationStream] = set()
        self._threads = concurrent.futures.ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
        self._model: TextModel | None = None
        self._num_open = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def model(self) -> TextModel:
        """The model served.

        Raises:
            ServiceError: UNAVAILABLE; the engine has not said yet what it serves.
        """
        if self._model is None:
            raise errors.unavailable("the engine cannot be reached yet")
        return self._model

    @property
    def serving(self) -> bool:
        """Whether a generation that arrives now would be computed."""
        return self._model is not None and self.engine.serving and not self._draining

    async def prepare_model(self, engine: engine_pb2.EngineModel) -> None:
        """Loads tokenizer and template of the engine's model, unless they are loaded.

        Raises:
            InvalidModelFolder: the folder cannot be served.
        """
        known = self._model.described_anew(engine) if self._model is not None else None
        if known is not None:
            self._model = known
            return
        config = self.config
        model = await asyncio.get_running_loop().run_in_executor(
            self._threads, TextModel.load, engine, config.model_folder, config.max_text_bytes, self._threads
        )
        if model.chat_template is not None:
            await self.templates.warm_up()
        self._model = model

    @contextlib.contextmanager
    def open_generation(self) -> Iterator[None]:
        """Counts one generation or subscription as open.

        Raises:
            ServiceError: UNAVAILABLE while shutting down; RESOURCE_EXHAUSTED when too many are open.
        """
        if self._draining:
            raise errors.unavailable("the server is shutting down")
        if self._num_open >= self.config.max_open_generations:
            raise errors.exhausted(
                f"{self._num_open} generations are open, the most this server allows", _RETRY_WHEN_FULL_S
            )
        self._num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Takes no more generations, and lets the open ones go on for the grace time; what is left ends UNAVAILABLE."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        failure = errors.unavailable("the server is shutting down")
        for stream in [*self.delivering, *self.engine.open_streams()]:
            stream.interrupt(failure)

    async def close(self) -> None:
        """Ends helper process and threads."""
        await self.templates.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
