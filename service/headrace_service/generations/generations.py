"""From what a caller wants to a stream that brings it, whatever the wire.

The wires are headrace.v1, its sessions, and KServe.

Owns the steps that every way of generating shares: a text or conversation becomes a prompt, spec
and prompt become the engine's request, the request becomes a `GenerationStream` that is given up
however its reader leaves. Which events are sent, and as what, is the wire's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import numpy as np

from headrace.v1 import generation_pb2, inference_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors, validation
from headrace_service.calls import failures
from headrace_service.calls.call import Call
from headrace_service.config import ServiceConfig
from headrace_service.engines import key_places
from headrace_service.engines.routing.router import RoutingKey
from headrace_service.engines.served_model import ServedModel
from headrace_service.engines.served_models import ServedModels
from headrace_service.generations import engine_request, harmony_messages, keyed_requests, output_rules, tools
from headrace_service.generations.conversation import Conversation, asked_tools, conversation_of
from headrace_service.generations.engine_request import Prompt, RequestBuilder
from headrace_service.generations.guardian import Guardian
from headrace_service.generations.running_generation import RunningGeneration
from headrace_service.generations.subscription import Subscription
from headrace_service.resolved_spec import ResolvedSpec
from headrace_service.streams.generation_stream import GenerationStream
from headrace_service.streams.ledger import DeliveryClock
from headrace_service.streams.wires import EventWire
from headrace_service.text.chat_template import ChatTemplateRenderer
from headrace_service.tracing.tracer import Tracer


class Generations:
    """Starts and joins generations for one service process."""

    def __init__(
        self, config: ServiceConfig, templates: ChatTemplateRenderer, tracer: Tracer | None, models: ServedModels
    ) -> None:
        self._templates = templates
        self._models = models
        self._guardian = Guardian(config.guarded_bytes, config.max_engine_message_bytes)
        models.hear_of_unguarded(self._guardian.offered)
        self._requests = RequestBuilder(config.default_time_limit_s, tracer)

    # -- prompts

    async def prompt_of(self, spec: generation_pb2.GenerationSpec, model: ServedModel) -> Prompt:
        """Returns the prompt of a checked spec, encoded."""
        if spec.WhichOneof("prompt") == "text":
            return Prompt(await model.text.tokenizer.encode(spec.text, add_special_tokens=True), "spec.text")
        return Prompt(np.array(spec.token_ids.ids, dtype=np.uint32), "spec.token_ids.ids")

    async def prompt_of_either(
        self, request: inference_pb2.SubmitRequest | inference_pb2.SessionSubmit, model: ServedModel
    ) -> Prompt:
        """Returns the prompt of a request that has messages, or one in its spec.

        Raises:
            ServiceError: INVALID_ARGUMENT; FAILED_PRECONDITION.
        """
        if request.messages:
            return await self.prompt_of_conversation(conversation_of(request, model.text.form), model)
        if request.tools or asked_tools(request).choice.WhichOneof("choice") or request.HasField("parallel_tool_calls"):
            raise errors.invalid_field("tools", "must not be set without messages")
        return await self.prompt_of(request.spec, model)

    async def prompt_of_conversation(self, conversation: Conversation, model: ServedModel) -> Prompt:
        """Returns a conversation as the model's own template lays it out, encoded.

        Raises:
            ServiceError: FAILED_PRECONDITION, there is no template; INVALID_ARGUMENT, the template
                refuses it or its text is too long.
        """
        text_model = model.text
        if text_model.chat_template is None:
            raise errors.failed_precondition("the model's folder has no chat template; use Generate")
        messages = conversation.messages
        text = await self._templates.render(
            text_model.chat_template,
            harmony_messages.for_template(messages) if text_model.form.has_channels else messages,
            text_model.template_tokens,
            text_model.facts.max_text_bytes,
            conversation.continues_last,
            [tools.for_template(tool) for tool in conversation.offered.shown] if conversation.offered else None,
            conversation.reasoning_effort,
        )
        validation.check_text(text, text_model.facts.max_text_bytes, "messages")
        # The template writes special tokens out itself.
        token_ids = await text_model.tokenizer.encode(text, add_special_tokens=False)
        return output_rules.prompt_of(token_ids, text, conversation, text_model)

    # -- streams

    def placed(
        self, spec: ResolvedSpec, prompt: Prompt, model: ServedModel, call: Call, idempotency_key: str = ""
    ) -> ServedModel:
        """Returns which engine of the model a new request goes to.

        The given one where the model has lost all engines meanwhile: it says so.
        """
        if not len(model.engines):
            return model
        return model.engines.choose(RoutingKey(prompt.token_ids, spec.request.cache_salt, call.tenant, idempotency_key))

    async def start(
        self, spec: ResolvedSpec, prompt: Prompt, model: ServedModel, call: Call, wire: EventWire
    ) -> RunningGeneration:
        """Has the engine begin a generation that ends with its call.

        The model is the one that `placed` names; whoever gets the generation abandons it in the
        end.

        Raises:
            ServiceError: what the engine refused it with; DEADLINE_EXCEEDED; UNAVAILABLE.
        """
        model.check_open()
        request = self._requests.build_request(spec, prompt, model, call, ends_with_call=True)
        add, trace = request.add, request.trace
        clock = DeliveryClock(call.arrival_ns, subscribed=False)
        handle = model.engine.new_handle()
        stream = GenerationStream(handle, add.request_id, model.text.pieces, request.render, clock, wire, trace=trace)
        stream.deadline_is_status = request.deadline_is_status
        generation = RunningGeneration(stream, model, add, call)
        try:
            with output_rules.refusals_named(prompt):
                await generation.begin()
            if trace is not None:
                trace.accepted = True
        except BaseException:
            generation.abandon()
            raise
        stream.announce(model.text.engine.revision, len(prompt))
        return generation

    @contextlib.asynccontextmanager
    async def running(
        self, spec: ResolvedSpec, prompt: Prompt, model: ServedModel, call: Call, wire: EventWire
    ) -> AsyncIterator[GenerationStream]:
        """`start` on the engine for the prompt.

        The stream is given up at the end of the block, however that comes.
        """
        model = self.placed(spec, prompt, model, call)
        generation = await self.start(spec, prompt, model, call, wire)
        with given_up(generation, call):
            yield generation.stream

    async def start_detached(
        self, spec: ResolvedSpec, prompt: Prompt, model: ServedModel, call: Call, idempotency_key: str
    ) -> engine_pb2.Added:
        """Has the engine begin a generation that outlives its readers, and guards it.

        Raises:
            ServiceError: what the engine refused it with; DEADLINE_EXCEEDED; UNAVAILABLE.
        """
        model = self.placed(spec, prompt, model, call, idempotency_key)
        model.check_open()

        def build(engine: ServedModel) -> engine_pb2.AddRequest:
            return self._requests.build_request(
                spec, prompt, engine, call, ends_with_call=False, idempotency_key=idempotency_key
            ).add

        call.check_deadline()
        with output_rules.refusals_named(prompt):
            if not idempotency_key:
                return await self._begin_detached(build(model), model, call)
            key = keyed_requests.Key(call.tenant, idempotency_key)
            attempts = keyed_requests.Attempts(call)
            while True:
                try:
                    return await self._begin_keyed(build, key, model, call)
                except errors.ServiceError as error:
                    await attempts.pause_after(error, model)
                model = self.placed(spec, prompt, model, call, idempotency_key)
                model.check_open()

    async def _begin_keyed(
        self,
        build: Callable[[ServedModel], engine_pb2.AddRequest],
        key: keyed_requests.Key,
        home: ServedModel,
        call: Call,
    ) -> engine_pb2.Added:
        """Returns the request of a key, which begins now where no engine knows the key.

        Raises:
            ServiceError: what an engine refused it with; UNAVAILABLE also where the key may have a
                request that can't be asked for.
        """
        place = key_places.find(home.engines, home, key.place)
        add = build(place.engine)
        query = engine_pb2.KeyQuery(tenant=add.tenant, idempotency_key=add.idempotency_key, spec_digest=add.spec_digest)
        if (guarded := await self._guardian.find_key(query)) is not None:
            return guarded
        answers = await keyed_requests.ask(query, place.asked)
        if answers.found is not None:
            return answers.found
        unasked, add.stands_in = [*place.unasked, *answers.silent], place.engine is not home
        if not add.stands_in:
            unasked = unasked if keyed_requests.may_have_left(home) else []
            keyed_requests.check_settled(unasked)
        add.unasked_engines.extend(engine.number for engine in unasked)
        return await self._begin_detached(add, place.engine, call)

    async def _begin_detached(self, add: engine_pb2.AddRequest, model: ServedModel, call: Call) -> engine_pb2.Added:
        model.engine.check_reachable()
        copy = self._guardian.take(add, model, call.arrival_ns)
        try:
            added = await model.engine.add(add, copy)
        except errors.ServiceError as error:
            # Under a key, the engine may have known another request than this one.
            is_lost = error.code is grpc.StatusCode.UNAVAILABLE and not add.idempotency_key
            if copy is None or not is_lost or not await self._guardian.rescue(copy):
                self._guardian.forget(copy)
                raise
            return engine_pb2.Added(request_id=add.request_id, prompt_tokens=copy.num_prompt_tokens)
        except asyncio.CancelledError:
            # Nobody will ever know this request's id, unless the same key asks for it again.
            if not add.idempotency_key:
                model.engine.abort(add.request_id, call.tenant, engine_pb2.ABORT_CAUSE_CANCELLED)
            self._guardian.forget(copy)
            raise
        if added.existing:
            # Who took it then guards it.
            self._guardian.forget(copy)
        elif copy is not None:
            self._guardian.accepted(copy)
        return added

    async def subscribe(self, attach: engine_pb2.AttachRequest, call: Call, wire: EventWire) -> Subscription:
        """Joins a generation that exists, wherever it is.

        Whoever gets the subscription leaves it in the end.

        Args:
            attach: request id, output and first token.
            call: on whose behalf.
            wire: what events become.

        Raises:
            ServiceError: NOT_FOUND; OUT_OF_RANGE; UNAVAILABLE.
        """
        attach.tenant = call.tenant
        engine_request.name_request(call, attach.request_id)
        engine_request.set_limits(attach, call)
        text = self._models.holders(attach.request_id)[0].text
        clock = DeliveryClock(call.arrival_ns, subscribed=True)
        stream = GenerationStream(0, attach.request_id, text.pieces, None, clock, wire, attach.from_token)
        subscription = Subscription(stream, attach, self._models, self._guardian)
        try:
            call.check_deadline()
            attached = await subscription.begin()
        except BaseException:
            subscription.leave()
            raise
        if call.trace is not None and stream.span is not None:
            call.trace.link(stream.span)
        stream.announce(text.engine.revision, attached.prompt_tokens)
        return subscription

    async def cancel(self, request_id: str, call: Call) -> bool:
        """Ends a generation of the caller's, wherever it is; returns whether it had not ended.

        Raises:
            ServiceError: NOT_FOUND; UNAVAILABLE.
        """
        await self._guardian.settled(request_id)
        first, *others = self._models.holders(request_id)
        answers = [await first.engine.cancel(request_id, call.tenant)]
        if not answers[0].found or first.engine.num_losses:
            # Where a connection broke, two engines may compute it.
            answers += await asyncio.gather(*(other.engine.cancel(request_id, call.tenant) for other in others))
        if not any(aborted.found for aborted in answers):
            raise self._models.not_held(request_id)
        return any(aborted.was_active for aborted in answers)

    def close(self) -> None:
        """Guards nothing any more, because the process ends."""
        self._guardian.close()


@contextlib.contextmanager
def given_up(generation: RunningGeneration, call: Call) -> Iterator[None]:
    """Abandons a generation at the end of the block, and notes what its call ended with."""
    try:
        yield
    except Exception as error:
        failure = failures.failure_of(call.context, error)
        generation.stream.note_failure(failure)
        raise failure from None
    finally:
        generation.abandon()
