"""A loaded model behind one of the tensor conventions.

Owns the way of a request from its tensors to a generation, and back to one response or many. The
generation itself is the same as headrace.v1's: same validation, same engine, same streams.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping

from headrace_service import errors, validation
from headrace_service.auth.caller import EVERYBODY, Caller
from headrace_service.calls.call import Call
from headrace_service.engines.served_model import ServedModel
from headrace_service.generations.engine_request import Prompt
from headrace_service.generations.generations import given_up
from headrace_service.kserve.accounting import Account
from headrace_service.kserve.language_models.asked import Asked, Convention
from headrace_service.kserve.messages import refusals
from headrace_service.kserve.messages.generation_wire import GenerationWire
from headrace_service.kserve.messages.infer_request import InferRequest
from headrace_service.kserve.messages.signature import Signature
from headrace_service.kserve.models import Responder
from headrace_service.resolved_spec import ResolvedSpec
from headrace_service.service_core import ServiceCore
from headrace_service.streams.generation_stream import GenerationStream


class LanguageModel:
    """One model under one name.

    Args:
        name: as callers ask for it.
        convention: its tensors.
        core: what the handlers share.
        find: returns the model as it is now, to a caller who may use it.
    """

    def __init__(
        self, name: str, convention: Convention, core: ServiceCore, find: Callable[[Caller], ServedModel]
    ) -> None:
        self._name = name
        self._convention = convention
        self._core = core
        self._find = find

    @property
    def name(self) -> str:
        """Name by which requests ask for the model."""
        return self._name

    @property
    def signature(self) -> Signature:
        """Tensors that the model takes and gives."""
        return self._convention.signature

    @property
    def ready(self) -> bool:
        """Whether the model answers requests now."""
        try:
            return self._find(EVERYBODY).serving and not self._core.draining
        except errors.ServiceError:
            return False

    @property
    def properties(self) -> Mapping[str, str]:
        """Properties that ModelMetadata reports."""
        engine = self._find(EVERYBODY).text.engine
        return {
            "model": engine.name,
            "revision": engine.revision,
            "architecture": engine.architecture,
            "max_context_tokens": str(engine.max_context_tokens),
        }

    def check_allowed(self, caller: Caller) -> None:
        """Raises PERMISSION_DENIED if the caller may not use the model.

        Rights are to the model itself, whatever name it is asked for by.
        """
        self._find(caller)

    async def answer(self, request: InferRequest, call: Call, account: Account) -> bytes:
        """Returns the one response to a request, serialized."""
        asked = self._convention.read(request)
        if asked.stream:
            raise refusals.unsupported(
                "ModelInfer RPC doesn't support models with decoupled transaction policy, unless stream is false"
            )
        return await self._answer(asked, request, call, account)

    async def respond(self, request: InferRequest, call: Call, account: Account, responder: Responder) -> None:
        """Sends the responses to a request on a stream."""
        asked = self._convention.read(request)
        if asked.stream:
            await self._stream(asked, request, call, account, responder)
        else:
            response = await self._answer(asked, request, call, account)
            await responder.send(response)

    # -- inside

    async def _answer(self, asked: Asked, request: InferRequest, call: Call, account: Account) -> bytes:
        with self._core.open_generation():
            async with self._running(asked, request, call, account) as (stream, wire):
                await stream.wait_ended()
                made_ns = time.monotonic_ns()
                stream.take()
                response = wire.answer() if stream.failure is None else b""
                if stream.recording is not None:
                    stream.recording.wrote_all(made_ns, time.monotonic_ns())
            check_ended(stream, wire)
            account.engine = stream.done
        return response

    async def _stream(
        self, asked: Asked, request: InferRequest, call: Call, account: Account, responder: Responder
    ) -> None:
        if request.placements:
            raise refusals.invalid("outputs: those of a stream cannot be placed in shared memory", "outputs")
        with self._core.open_generation():
            async with self._running(asked, request, call, account) as (stream, wire):
                await responder.follow(stream, wire)
            account.engine = stream.done

    @contextlib.asynccontextmanager
    async def _running(
        self, asked: Asked, request: InferRequest, call: Call, account: Account
    ) -> AsyncIterator[tuple[GenerationStream, GenerationWire]]:
        model = self._find(call.caller)
        parameters = request.parameters
        call = call.of_request(call.arrival_ns, parameters.traceparent, parameters.tracestate)
        try:
            spec, prompt = await self._resolve(asked, model)
            wire = self._wire(asked, spec, request, model)
            account.inputs_read()
            model = self._core.generations.placed(spec, prompt, model, call)
            generation = await self._core.generations.start(spec, prompt, model, call, wire)
        except errors.ServiceError as error:
            raise errors.renamed(error, asked.names) from None
        with given_up(generation, call):
            yield generation.stream, wire

    async def _resolve(self, asked: Asked, model: ServedModel) -> tuple[ResolvedSpec, Prompt]:
        spec = validation.resolve(asked.spec, model.text.facts)
        limit, num_outputs = self._core.config.max_message_bytes, spec.request.n
        if asked.prompt_first and num_outputs * len(asked.spec.text) > limit:
            # Not computed, nor put together, for nothing.
            num_bytes = num_outputs * len(asked.spec.text.encode())
            raise errors.too_large(f"the prompt before each of {num_outputs} outputs", num_bytes, limit, "exclude it")
        return spec, await self._core.generations.prompt_of(asked.spec, model)

    def _wire(self, asked: Asked, spec: ResolvedSpec, request: InferRequest, model: ServedModel) -> GenerationWire:
        pieces = model.text.pieces
        render = self._convention.render(asked, lambda token: pieces.text([token], skip_special=False))
        text_alone = (
            spec.request.n == 1 and asked.stream and asked.outputs == {"text_output"} and spec.request.num_logprobs < 0
        )
        text_shape = self._convention.text_shape if text_alone else None
        max_bytes = self._core.config.max_message_bytes if asked.stream else None
        return GenerationWire(request, spec.request.n, render, asked.names, text_shape, max_bytes)


def check_ended(stream: GenerationStream, wire: GenerationWire) -> None:
    """Raises what ended a generation before its time, if anything did."""
    if stream.failure is not None:
        raise stream.failure
    if wire.error is not None:
        raise wire.error
