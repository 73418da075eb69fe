"""The models, health, and what this server has not."""

from __future__ import annotations

import time
from typing import Any

import grpc
import msgspec
from starlette.types import Receive, Scope, Send

from headrace_service import errors
from headrace_service.calls.call import Call
from headrace_service.engines.served_model import ServedModel
from headrace_service.openai.http.exchange import Exchange
from headrace_service.service_core import ServiceCore
from headrace_service.text.text_model import TextModel

_encode = msgspec.json.Encoder().encode


def find(core: ServiceCore, name: str, call: Call) -> ServedModel:
    """Returns the model of a name ("": the default).

    Raises:
        ServiceError: NOT_FOUND, in the words of this API; what else `ServedModels.find` raises.
    """
    try:
        return core.models.find(name, call.caller)
    except errors.ServiceError as error:
        if error.code is not grpc.StatusCode.NOT_FOUND:
            raise
    raise errors.not_found(f"model: {errors.echo(name)} is not served here; GET /v1/models lists what is")


class ModelHandlers:
    """Handlers of the paths that describe models.

    Args:
        core: what the handlers share.
    """

    def __init__(self, core: ServiceCore) -> None:
        self._core = core
        # When a model was made is not known; the number only has to stay.
        self._created = int(time.time())

    async def list_models(self, body: bytes, exchange: Exchange, call: Call) -> None:
        """Lists the loaded models that the caller may use, by name."""
        texts = {model.text.facts.name: model.text for model in self._core.models.known()}
        named = sorted(name for name in texts if call.caller.may_use_model(name))
        listed = [self._described(texts[name]) for name in named]
        await exchange.answer(200, _encode({"object": "list", "data": listed}))

    async def retrieve_model(self, body: bytes, exchange: Exchange, call: Call) -> None:
        """Describes one model; a path that ends before its name lists all."""
        if not exchange.path_parameters["model"]:
            await self.list_models(body, exchange, call)
            return
        model = find(self._core, exchange.path_parameters["model"], call).text
        await exchange.answer(200, _encode(self._described(model)))

    async def embed(self, body: bytes, exchange: Exchange, call: Call) -> None:
        """Answers that there are no embeddings.

        Not 501: clients send a request that ends with a number above 499 again, for nothing.
        """
        raise errors.not_found("this server serves no embeddings: its models generate text")

    def _described(self, model: TextModel) -> dict[str, Any]:
        return {
            "id": model.facts.name,
            "object": "model",
            "created": self._created,
            "owned_by": "headrace",
            "max_model_len": model.engine.max_context_tokens,
        }


class Health:
    """An ASGI application that says whether this process lives, or serves.

    Args:
        core: knows whether generations are computed.
        only_live: whether it is enough that the process answers.
    """

    def __init__(self, core: ServiceCore, *, only_live: bool) -> None:
        self._core = core
        self._only_live = only_live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 200, or 503 while a generation that arrives now would not be computed."""
        is_well = self._only_live or self._core.serving
        body = _encode({"status": "ok" if is_well else "not serving"})
        await Exchange(scope, receive, send).answer(200 if is_well else 503, body)
