"""What the handlers of one service process share.

Owns the count of open generations, whether new ones are taken, and the streams that are being
delivered. Holds the models, the tokenizer threads and the template helper; no handler makes its
own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Iterator

from headrace_service import errors
from headrace_service.config import ServiceConfig
from headrace_service.engines.control_client import ControlClient
from headrace_service.engines.model_admin import ModelAdmin
from headrace_service.engines.served_models import ServedModels
from headrace_service.generations.generations import Generations
from headrace_service.streams import delivery
from headrace_service.streams.generation_stream import GenerationStream
from headrace_service.streams.reader_watch import Reader
from headrace_service.text.chat_template import ChatTemplateRenderer
from headrace_service.text.text_loader import TextLoader
from headrace_service.tracing.tracer import Tracer

_RETRY_WHEN_FULL_S = 1.0


class ServiceCore:
    """The state of one service process."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.templates = ChatTemplateRenderer(config.template_timeout_s, config.template_memory_bytes)
        # Readers that a writer may wait for, those of ended requests included.
        self.delivering: set[Reader] = set()
        # None: telemetry is off.
        self.tracer = Tracer(config.telemetry_socket, config.service_name) if config.telemetry_socket else None
        self._threads = concurrent.futures.ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
        self.models = ServedModels(config, TextLoader(config, self._threads, self.templates), self.tracer)
        # None where this service runs alone.
        self.control = (
            ControlClient(config.control, config.service_name, self.models.update) if config.control else None
        )
        self.admin = ModelAdmin(self.models, self.control)
        self.generations = Generations(config, self.templates, self.tracer, self.models)
        self._num_open = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        """Whether new generations are refused, on all models."""
        return self._draining or self.models.draining

    @property
    def num_open(self) -> int:
        """Generations and subscriptions open now."""
        return self._num_open

    @property
    def serving(self) -> bool:
        """Whether a generation that arrives now would be computed: see `ServedModels.serving`."""
        return self.models.serving and not self._draining

    async def deliver(self, stream: GenerationStream, write: delivery.Write) -> None:
        """Writes a stream's messages to its reader until the request has ended.

        It is watched for being too slow.

        Raises:
            ServiceError: the subscription failed, or its reader is too slow.
        """
        self.delivering.add(stream)
        try:
            await delivery.deliver(stream, write)
        finally:
            self.delivering.discard(stream)

    def load(self) -> tuple[int, int]:
        """Returns how many generations are open, and the bytes that wait for readers."""
        return self._num_open, sum(reader.pending_bytes for reader in self.delivering)

    @contextlib.contextmanager
    def open_generation(self) -> Iterator[None]:
        """Counts one generation or subscription as open.

        Raises:
            ServiceError: UNAVAILABLE while shutting down; RESOURCE_EXHAUSTED when too many are
                open.
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
        """Takes no more generations, and lets the open ones go on for the grace time.

        What is left ends UNAVAILABLE.
        """
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        self.generations.close()
        failure = errors.unavailable("the server is shutting down")
        for reader in [*self.delivering, *(stream for model in self.models for stream in model.engine.open_streams())]:
            reader.interrupt(failure)

    async def close(self) -> None:
        """Ends helper process, threads and the feed, which is sent what it holds."""
        if self.tracer is not None:
            await self.tracer.stop()
        await self.templates.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
