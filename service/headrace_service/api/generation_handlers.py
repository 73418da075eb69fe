"""Generate, Complete, Chat, Submit and Subscribe.

Owns the steps of each RPC: check, start, deliver. Every stream is given up in the end, so that a
caller who leaves in any way frees what its request holds.
"""

from __future__ import annotations

from headrace.v1 import generation_pb2, inference_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors, validation
from headrace_service.api import event_wire
from headrace_service.api.completion import collect
from headrace_service.calls.call import Call
from headrace_service.generations.conversation import conversation_of
from headrace_service.generations.generations import Generations
from headrace_service.service_core import ServiceCore


class GenerationHandlers:
    """RPCs that make or read a generation."""

    def __init__(self, core: ServiceCore) -> None:
        self._core = core

    @property
    def _generations(self) -> Generations:
        return self._core.generations

    async def generate(self, request: inference_pb2.GenerateRequest, call: Call) -> None:
        """Streams the answer to a prompt."""
        with self._core.open_generation():
            model = self._core.models.find(request.spec.model, call.caller)
            spec = validation.resolve(request.spec, model.text.facts)
            prompt = await self._generations.prompt_of(request.spec, model)
            async with self._generations.running(spec, prompt, model, call, event_wire) as stream:
                await self._core.deliver(stream, call.context.write)

    async def chat(self, request: inference_pb2.ChatRequest, call: Call) -> None:
        """Streams the answer to a conversation."""
        with self._core.open_generation():
            model = self._core.models.find(request.spec.model, call.caller)
            spec = validation.resolve(request.spec, model.text.facts, in_chat=True)
            conversation = conversation_of(request, model.text.form)
            prompt = await self._generations.prompt_of_conversation(conversation, model)
            async with self._generations.running(spec, prompt, model, call, event_wire) as stream:
                await self._core.deliver(stream, call.context.write)

    async def complete(self, request: inference_pb2.CompleteRequest, call: Call) -> inference_pb2.CompleteResponse:
        """Answers a prompt in one message."""
        with self._core.open_generation():
            model = self._core.models.find(request.spec.model, call.caller)
            spec = validation.resolve(request.spec, model.text.facts)
            prompt = await self._generations.prompt_of(request.spec, model)
            validation.check_prompt_logprobs(spec, len(prompt), self._core.config.max_message_bytes)
            async with self._generations.running(spec, prompt, model, call, event_wire) as stream:
                await stream.wait_ended()
                response = collect(stream, model.text.engine.revision, spec)
            _check_whole(response, stream.deadline_is_status, self._core.config.max_message_bytes)
            return response

    async def submit(self, request: inference_pb2.SubmitRequest, call: Call) -> inference_pb2.SubmitResponse:
        """Starts a generation that outlives its readers."""
        with self._core.open_generation():
            model = self._core.models.find(request.spec.model, call.caller)
            validation.check_idempotency_key(request.idempotency_key)
            spec = validation.resolve(request.spec, model.text.facts, in_chat=bool(request.messages))
            prompt = await self._generations.prompt_of_either(request, model)
            added = await self._generations.start_detached(spec, prompt, model, call, request.idempotency_key)
            return inference_pb2.SubmitResponse(
                request_id=added.request_id,
                model_revision=model.text.engine.revision,
                prompt_tokens=added.prompt_tokens,
                existing=added.existing,
            )

    async def subscribe(self, request: inference_pb2.SubscribeRequest, call: Call) -> None:
        """Streams a submitted generation from any token on."""
        core = self._core
        with core.open_generation():
            output_index = request.output_index if request.HasField("output_index") else None
            validation.check_subscription(request.request_id, output_index)
            attach = engine_pb2.AttachRequest(
                request_id=request.request_id, from_token=request.from_token, output_index=output_index
            )
            subscription = await self._generations.subscribe(attach, call, event_wire)
            try:
                await core.deliver(subscription.stream, call.context.write)
            finally:
                subscription.leave()


def _check_whole(response: inference_pb2.CompleteResponse, ends_with_call: bool, max_bytes: int) -> None:
    reasons = {output.finished.reason for output in response.outputs}
    if ends_with_call and generation_pb2.FINISH_REASON_DEADLINE in reasons:
        raise errors.deadline_exceeded()
    if response.ByteSize() > max_bytes:
        raise errors.too_large("the answer", response.ByteSize(), max_bytes, "use Generate")
