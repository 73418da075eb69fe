"""Generate, Complete, Chat, Submit and Subscribe.

Owns the steps of each RPC: check, call the engine, deliver. Every handler that opened a subscription gives it up in `finally`, so that a
caller who leaves in any way frees what its request holds.
"""

from __future__ import annotations

import asyncio

from headrace.v1 import generation_pb2, inference_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import engine_request, errors, event_wire, validation
from headrace_service.completion import collect
from headrace_service.delivery import deliver
from headrace_service.generation_stream import GenerationStream
from headrace_service.ledger import DeliveryClock
from headrace_service.render_state import RenderState
from headrace_service.resolved_spec import ResolvedSpec
from headrace_service.rpc_boundary import Call
from headrace_service.service_core import ServiceCore
from headrace_service.text_model import TextModel
from headrace_service.tokenization import TokenIds


class GenerationHandlers:
    """RPCs that make or read a generation."""

    def __init__(self, core: ServiceCore) -> None:
        self._core = core

    async def generate(self, request: inference_pb2.GenerateRequest, call: Call) -> None:
        """Streams the answer to a prompt."""
        with self._core.open_generation():
            spec = validation.resolve(request.spec, self._core.model.facts)
            await self._stream(spec, await self._prompt_of(request.spec), _prompt_field(request.spec), call)

    async def chat(self, request: inference_pb2.ChatRequest, call: Call) -> None:
        """Streams the answer to a conversation."""
        with self._core.open_generation():
            spec = validation.resolve(request.spec, self._core.model.facts, in_chat=True)
            await self._stream(spec, await self._prompt_of_messages(request), "messages", call)

    async def complete(self, request: inference_pb2.CompleteRequest, call: Call) -> inference_pb2.CompleteResponse:
        """Answers a prompt in one message."""
        with self._core.open_generation():
            spec = validation.resolve(request.spec, self._core.model.facts)
            prompt = await self._prompt_of(request.spec)
            add, stream = self._new_stream(spec, prompt, _prompt_field(request.spec), call)
            try:
                ends_with_call = await self._add(add, stream, spec, call)
                await stream.wait_ended()
                response = collect(stream, self._core.model.engine.revision, spec)
            finally:
                self._core.engine.abandon(stream, call)
            _check_whole(response, ends_with_call, self._core.config.max_message_bytes)
            return response

    async def submit(self, request: inference_pb2.SubmitRequest, call: Call) -> inference_pb2.SubmitResponse:
        """Starts a generation that outlives its readers."""
        with self._core.open_generation():
            model = self._core.model
            _check_key(request.idempotency_key)
            spec = validation.resolve(request.spec, model.facts)
            prompt = await self._prompt_of(request.spec)
            add, _ = self._build(spec, prompt, _prompt_field(request.spec), model, call)
            add.detached = True
            add.idempotency_key = request.idempotency_key
            call.check_deadline()
            engine_request.set_times(add, call, self._time_limit_ns(spec, None), bounded_by_call=False)
            added = await self._add_detached(add, call)
            return inference_pb2.SubmitResponse(
                request_id=added.request_id,
                model_revision=model.engine.revision,
                prompt_tokens=added.prompt_tokens,
                existing=added.existing,
            )

    async def subscribe(self, request: inference_pb2.SubscribeRequest, call: Call) -> None:
        """Streams a submitted generation from any token on."""
        core = self._core
        with core.open_generation():
            _check_subscription(request)
            attach = engine_pb2.AttachRequest(
                request_id=request.request_id, tenant=call.tenant, from_token=request.from_token
            )
            if request.HasField("output_index"):
                attach.output_index = request.output_index
            clock = DeliveryClock(call.arrival_ns, subscribed=True)
            stream = GenerationStream(
                core.engine.new_handle(),
                request.request_id,
                core.model.pieces,
                None,
                clock,
                from_token=request.from_token,
            )
            try:
                call.check_deadline()
                attached = await core.engine.attach(attach, stream)
                await self._deliver(stream, attached.prompt_tokens, call)
            finally:
                core.engine.leave(stream)

    # -- steps that several RPCs share

    async def _prompt_of(self, spec: generation_pb2.GenerationSpec) -> TokenIds:
        if spec.WhichOneof("prompt") == "text":
            return await self._core.model.tokenizer.encode(spec.text, add_special_tokens=True)
        return engine_request.token_column(spec.token_ids.ids)

    async def _prompt_of_messages(self, request: inference_pb2.ChatRequest) -> TokenIds:
        model = self._core.model
        if model.chat_template is None:
            raise errors.failed_precondition("the model's folder has no chat template; use Generate")
        text = await self._core.templates.render(
            model.chat_template,
            validation.conversation(request),
            model.template_tokens,
            model.facts.max_text_bytes,
            request.continue_last_message,
        )
        validation.check_text(text, model.facts.max_text_bytes, "messages")
        # The template writes special tokens out itself.
        return await model.tokenizer.encode(text, add_special_tokens=False)

    async def _stream(self, spec: ResolvedSpec, prompt: TokenIds, prompt_field: str, call: Call) -> None:
        add, stream = self._new_stream(spec, prompt, prompt_field, call)
        try:
            ends_with_call = await self._add(add, stream, spec, call)
            stream.deadline_is_status = ends_with_call
            await self._deliver(stream, len(prompt), call)
        finally:
            self._core.engine.abandon(stream, call)

    async def _deliver(self, stream: GenerationStream, num_prompt_tokens: int, call: Call) -> None:
        revision = self._core.model.engine.revision
        stream.announce(event_wire.accepted(stream.request_id, revision, num_prompt_tokens))
        self._core.delivering.add(stream)
        try:
            await deliver(stream, call.context)
        finally:
            self._core.delivering.discard(stream)

    def _new_stream(
        self, spec: ResolvedSpec, prompt: TokenIds, prompt_field: str, call: Call
    ) -> tuple[engine_pb2.AddRequest, GenerationStream]:
        model = self._core.model
        add, render = self._build(spec, prompt, prompt_field, model, call)
        clock = DeliveryClock(call.arrival_ns, subscribed=False)
        return add, GenerationStream(self._core.engine.new_handle(), add.request_id, model.pieces, render, clock)

    def _build(
        self, spec: ResolvedSpec, prompt: TokenIds, prompt_field: str, model: TextModel, call: Call
    ) -> tuple[engine_pb2.AddRequest, RenderState]:
        max_tokens = validation.resolve_max_tokens(spec, len(prompt), model.facts, prompt_field)
        return engine_request.build(spec, prompt, max_tokens, model, self._core.request_ids.new(), call)

    async def _add(self, add: engine_pb2.AddRequest, stream: GenerationStream, spec: ResolvedSpec, call: Call) -> bool:
        """Asks the engine for an attached request; returns whether the call's own deadline is what bounds it."""
        limit_ns = self._time_limit_ns(spec, call.deadline_ns)
        ends_with_call = engine_request.set_times(add, call, limit_ns, bounded_by_call=True)
        await self._core.engine.add(add, stream)
        return ends_with_call

    async def _add_detached(self, add: engine_pb2.AddRequest, call: Call) -> engine_pb2.Added:
        try:
            return await self._core.engine.add(add, None)
        except asyncio.CancelledError:
            # Nobody will ever know this request's id, unless the same key asks for it again.
            if not add.idempotency_key:
                self._core.engine.abort(add.request_id, call.tenant, engine_pb2.ABORT_CAUSE_CANCELLED)
            raise

    def _time_limit_ns(self, spec: ResolvedSpec, deadline_ns: int | None) -> int | None:
        if spec.time_limit_ns is not None or deadline_ns is not None:
            return spec.time_limit_ns
        return int(self._core.config.default_time_limit_s * 1e9)


def _prompt_field(spec: generation_pb2.GenerationSpec) -> str:
    return "spec.text" if spec.WhichOneof("prompt") == "text" else "spec.token_ids.ids"


def _check_key(key: str) -> None:
    limit = validation.MAX_IDEMPOTENCY_KEY_BYTES
    if len(key.encode()) > limit:
        raise errors.invalid_field("idempotency_key", f"must have at most {limit} bytes")


def _check_subscription(request: inference_pb2.SubscribeRequest) -> None:
    validation.check_request_id(request.request_id)
    if request.HasField("output_index") and request.output_index >= validation.MAX_OUTPUTS:
        raise errors.invalid_field("output_index", f"must be below {validation.MAX_OUTPUTS}")


def _check_whole(response: inference_pb2.CompleteResponse, ends_with_call: bool, max_bytes: int) -> None:
    reasons = {output.finished.reason for output in response.outputs}
    if ends_with_call and generation_pb2.FINISH_REASON_DEADLINE in reasons:
        raise errors.deadline_exceeded()
    if response.ByteSize() > max_bytes:
        raise errors.exhausted(
            f"the answer has {response.ByteSize()} bytes, a message at most {max_bytes}; use Generate"
        )
