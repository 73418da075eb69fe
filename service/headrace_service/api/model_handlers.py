"""Tokenize, Detokenize, GetModel, ListModels and GetLoad: what there is besides generating."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from headrace.v1 import inference_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors, validation
from headrace_service.calls.call import Call
from headrace_service.engines.served_model import ServedModel
from headrace_service.service_core import ServiceCore
from headrace_service.text.detokenizer import StandingText
from headrace_service.text.text_model import TextModel
from headrace_service.text.tokenization import SLICE_TOKENS

# Looked up between two turns of the event loop: some milliseconds' worth.
_SLICE_IDS = 1 << 12
# Of a load, what engines have together.
_SUMMED = (
    "running_sequences",
    "waiting_requests",
    "waiting_tokens",
    "kv_blocks",
    "max_waiting_requests",
    "max_running_sequences",
    "output_tokens_per_second",
    "prefix_query_tokens",
    "prefix_hit_tokens",
)


class ModelHandlers:
    """Handlers of the RPCs that tokenize texts, describe models and report load."""

    def __init__(self, core: ServiceCore) -> None:
        self._core = core

    async def tokenize(self, request: inference_pb2.TokenizeRequest, call: Call) -> inference_pb2.TokenizeResponse:
        """Encodes a text, whether it fits the context or not."""
        model = self._core.models.find(request.model, call.caller).text
        validation.check_text(request.text, self._core.config.max_text_bytes, "text")
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        token_ids = await model.tokenizer.encode(request.text, add_special_tokens)
        response = inference_pb2.TokenizeResponse()
        for begin in range(0, len(token_ids), SLICE_TOKENS):
            response.token_ids.extend(token_ids[begin : begin + SLICE_TOKENS].tolist())
            await asyncio.sleep(0)
        return response

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, call: Call
    ) -> inference_pb2.DetokenizeResponse:
        """Decodes token ids of any number that fits a message."""
        model = self._core.models.find(request.model, call.caller).text
        skip_special = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        standing, texts, num_bytes = StandingText(model.pieces, skip_special), [""], 0
        for begin in range(0, len(request.token_ids), _SLICE_IDS):
            token_ids = request.token_ids[begin : begin + _SLICE_IDS]
            validation.check_token_ids(token_ids, model.facts.bounds.vocabulary_size, "token_ids", begin)
            texts.append(standing.feed(list(token_ids)))
            num_bytes += len(texts[-1].encode())
            self._check_answer_size(num_bytes)
            await asyncio.sleep(0)
        response = inference_pb2.DetokenizeResponse(text="".join([*texts, standing.finish()]))
        self._check_answer_size(response.ByteSize())
        return response

    def _check_answer_size(self, num_bytes: int) -> None:
        limit = self._core.config.max_message_bytes
        if num_bytes > limit:
            raise errors.exhausted(f"token_ids: their text exceeds {limit} bytes, the most of an answer")

    async def get_model(self, request: inference_pb2.GetModelRequest, call: Call) -> inference_pb2.GetModelResponse:
        """Describes one model."""
        model = self._core.models.find(request.model, call.caller).text
        return inference_pb2.GetModelResponse(model=self._described(model, call))

    async def list_models(
        self, request: inference_pb2.ListModelsRequest, call: Call
    ) -> inference_pb2.ListModelsResponse:
        """Describes all models that are loaded and that the caller may use, by name."""
        texts = {model.text.facts.name: model.text for model in self._core.models.known()}
        named = sorted(name for name in texts if call.caller.may_use_model(name))
        return inference_pb2.ListModelsResponse(models=[self._described(texts[name], call) for name in named])

    def _described(self, model: TextModel, call: Call) -> inference_pb2.Model:
        """Describes a model; where its engines are is for operators."""
        described = model.describe()
        if call.caller.may_administer():
            described.engines_left_out.extend(self._core.models.left_out())
        return described

    async def get_load(self, request: inference_pb2.GetLoadRequest, call: Call) -> inference_pb2.GetLoadResponse:
        """Says how busy the model's engine is, or its engines are together."""
        core = self._core
        model = core.models.find(request.model, call.caller)
        load = _together(await _loads(model.engines))
        return inference_pb2.GetLoadResponse(
            running_sequences=load.running_sequences,
            waiting_requests=load.waiting_requests,
            waiting_tokens=load.waiting_tokens,
            kv_cache_usage=load.kv_cache_usage,
            kv_blocks=load.kv_blocks,
            max_waiting_requests=load.max_waiting_requests,
            output_tokens_per_second=load.output_tokens_per_second,
            expected_wait_ns=load.expected_wait_ns,
            serving=model.serving and not core.draining,
            model=model.name,
            max_running_sequences=load.max_running_sequences,
            prefix_cache_hit_rate=load.prefix_hit_tokens / max(load.prefix_query_tokens, 1),
            draining=core.draining or model.is_leaving,
            open_calls=core.num_open,
            max_open_calls=core.config.max_open_generations,
        )


async def _loads(engines: Iterable[ServedModel]) -> list[engine_pb2.Load]:
    """What those say that can be asked. Raises ServiceError: UNAVAILABLE; nobody can."""
    answers = await asyncio.gather(*(engine.engine.load() for engine in engines), return_exceptions=True)
    loads = [answer for answer in answers if isinstance(answer, engine_pb2.Load)]
    for answer in answers:
        if isinstance(answer, BaseException) and (not loads or not isinstance(answer, errors.ServiceError)):
            raise answer
    return loads


def _together(loads: Sequence[engine_pb2.Load]) -> engine_pb2.Load:
    """The load of a model's engines: sums, the share of all their blocks, and the longest wait."""
    total = engine_pb2.Load()
    for field in _SUMMED:
        setattr(total, field, sum(getattr(load, field) for load in loads))
    used_blocks = sum(load.kv_cache_usage * load.kv_blocks for load in loads)
    total.kv_cache_usage = used_blocks / max(total.kv_blocks, 1)
    total.expected_wait_ns = max(load.expected_wait_ns for load in loads)
    return total
