"""How the text side of a model, its tokenizer and template, comes into a service process.

Owns the thread in which a folder is read, and what is settled once it is: the template helper runs,
and the garbage collector passes over what was read. Which models there are is `served_models`'s.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc

import structlog

from headrace_protos.engine.v1 import engine_pb2
from headrace_service.config import ServiceConfig
from headrace_service.text.chat_template import ChatTemplateRenderer
from headrace_service.text.text_model import TextModel

_log = structlog.get_logger("headrace.service")


class TextLoader:
    """Reads model folders in threads, and keeps the template helper ready."""

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
            self._threads,
            TextModel.load,
            engine,
            config.model_folder,
            config.max_text_bytes,
            self._threads,
            config.tool_format,
        )
        for line in text.not_followed:
            _log.warning("model.recommendation_not_followed", model=engine.name, generation_config=line)
        if text.chat_template is not None:
            await self._templates.warm_up()
        _leave_out_of_collections()
        return text


def _leave_out_of_collections() -> None:
    """Has the garbage collector pass over what lives as long as its model.

    Looking through it held up all streams for 30 ms every few seconds.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
