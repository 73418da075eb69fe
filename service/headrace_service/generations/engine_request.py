"""Makes the engine's AddRequest from a checked spec and its prompt, in one call.

Owns what completes a request once its prompt is known (request id, the seed that the service draws
where the caller gave none, times and limits, what telemetry wants noted) and the digest that
idempotency keys are compared by. The digest covers what the caller asked for, resolved (prompt ids,
sampling, stops, limits), and not what differs between two sendings of one request: request id,
drawn seed (an absent seed counts as "absent"), time already spent, trace context, the call's own
deadline.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import time
from array import array

import msgspec
import structlog

from headrace_protos.engine.v1 import engine_pb2
from headrace_request import rules
from headrace_request.reasoning import Reasoning
from headrace_request.request import Request
from headrace_request.rule_kinds import Bounds
from headrace_request.structured_output import StructuredOutput
from headrace_service import errors
from headrace_service.calls.call import Call
from headrace_service.engines import request_ids
from headrace_service.engines.request_ids import RequestIds
from headrace_service.engines.served_model import ServedModel
from headrace_service.output_forms.output_plan import OutputPlan
from headrace_service.resolved_spec import ResolvedSpec
from headrace_service.streams.render_state import RenderState
from headrace_service.text.text_model import TextModel
from headrace_service.text.tokenization import TokenIds
from headrace_service.tracing.generation_trace import GenerationTrace
from headrace_service.tracing.tracer import Tracer


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and what follows from it for the outputs.

    Attributes:
        token_ids: the prompt.
        field: what errors about it name.
        is_chat: whether it is a conversation.
        plan: what outputs are made of; None: they are text alone.
        reasoning: the markers of the model's reasoning; None: it does not reason.
        form: what holds outputs to calls of the conversation's tools; None: nothing must.
        around_answer: the grammar of whole outputs in which an answer has a form, reasoning and its
            budget included (`StructuredOutput.around`); "": a form begins behind `reasoning`.
        ending_ids: tokens that end outputs of the conversation's format, as end-of-text does.
    """

    token_ids: TokenIds
    field: str
    is_chat: bool = False
    plan: OutputPlan | None = None
    reasoning: Reasoning | None = None
    form: StructuredOutput | None = None
    around_answer: str = ""
    ending_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRequest:
    """A generation that the engine is about to be asked for.

    Attributes:
        add: The engine's message, complete but for the handle of its stream.
        render: How tokens become text.
        trace: What telemetry keeps of the generation; None without telemetry.
        deadline_is_status: Whether the call's deadline comes before the request's own time limit.
    """

    add: engine_pb2.AddRequest
    render: RenderState
    trace: GenerationTrace | None
    deadline_is_status: bool


class RequestBuilder:
    """Makes the engine's requests of one service process."""

    def __init__(self, default_time_limit_s: float, tracer: Tracer | None) -> None:
        """Starts with a fresh sequence of request ids.

        Args:
            default_time_limit_s: Time limit of requests that neither have one nor end with a
                deadline.
            tracer: Decides which generations are recorded; None without telemetry.
        """
        self._default_time_limit_ns = int(default_time_limit_s * 1e9)
        self._tracer = tracer
        self._request_ids = RequestIds()

    def build_request(
        self,
        spec: ResolvedSpec,
        prompt: Prompt,
        model: ServedModel,
        call: Call,
        ends_with_call: bool,
        idempotency_key: str = "",
    ) -> EngineRequest:
        """Returns the request of a checked spec, to be sent at once: its times count from now.

        Args:
            spec: What the caller asks for.
            prompt: Its tokens.
            model: The engine that is going to be asked, and its model.
            call: The call that brought it.
            ends_with_call: Whether the call's deadline ends the request; else it is detached.
            idempotency_key: Names the request to who sends it again; "": nothing does.

        Raises:
            ServiceError: INVALID_ARGUMENT, prompt and output do not fit the context;
                DEADLINE_EXCEEDED, the caller waits no more.
        """
        text = model.text
        asked = _completed(spec, prompt, text)
        place = request_ids.key_place(call.tenant, idempotency_key) if idempotency_key else ""
        request_id = self._request_ids.new(model.tag, place)
        name_request(call, request_id)
        strings = tuple([string.decode() for string in asked.stop.strings])
        render = RenderState(
            spec.skip_special_tokens,
            asked.num_logprobs >= 0,
            strings,
            spec.token_ids_only,
            plan=prompt.plan,
            has_form_of_tools=prompt.form is not None,
        )
        encoded, state = asked.encode(), render.encode()
        digest = _digest(encoded, state, spec, text)
        if spec.draws_seed:
            sampling = msgspec.structs.replace(asked.sampling, seed=secrets.randbits(64))
            encoded = msgspec.structs.replace(asked, sampling=sampling).encode()
        add = engine_pb2.AddRequest(request=encoded, spec_digest=digest, request_id=request_id, tenant=call.tenant)
        add.detached, add.idempotency_key = not ends_with_call, idempotency_key
        set_limits(add, call)
        trace = self._traced(spec, prompt, text, call)
        if trace is not None and trace.span is not None:
            # Whoever joins the generation later links to its span, which is not part of the digest:
            # it differs between two sendings.
            render = msgspec.structs.replace(render, span=trace.span)
            state = render.encode()
        if trace is not None and (trace.span is not None or not ends_with_call):
            trace.ask(add)
        add.service_state = state
        deadline_ns = call.deadline_ns if ends_with_call else None
        deadline_is_status = set_times(add, call.arrival_ns, self._time_limit_ns(spec, deadline_ns), deadline_ns)
        return EngineRequest(add, render, trace, deadline_is_status)

    def _traced(self, spec: ResolvedSpec, prompt: Prompt, model: TextModel, call: Call) -> GenerationTrace | None:
        """Returns what telemetry keeps of a new generation, for the fact at its end."""
        if self._tracer is None:
            return None
        return self._tracer.generation(
            model=model.facts.name,
            model_revision=model.engine.revision,
            operation="chat" if prompt.is_chat else "text_completion",
            parameters=spec.given,
            num_outputs=spec.request.n,
            prompt_tokens=len(prompt),
            asked_detail=spec.trace_detail,
            call=call.trace,
            own=call.own_context,
        )

    def _time_limit_ns(self, spec: ResolvedSpec, deadline_ns: int | None) -> int | None:
        if spec.time_limit_ns is not None or deadline_ns is not None:
            return spec.time_limit_ns
        return self._default_time_limit_ns


def name_request(call: Call, request_id: str) -> None:
    """Has the lines that are logged from here on, and the call's own span, name the request."""
    structlog.contextvars.bind_contextvars(request_id=request_id)
    if call.trace is not None:
        call.trace.about(request_id)


def set_limits(request: engine_pb2.AddRequest | engine_pb2.AttachRequest, call: Call) -> None:
    """Fills in what the caller may take; the engine keeps the books, for all services.

    Nobody limits callers without a key.

    Raises:
        ServiceError: UNAUTHENTICATED; the caller's key is not valid any more.
    """
    limits = call.caller.limits
    if call.tenant:
        request.limits.CopyFrom(
            engine_pb2.TenantLimits(
                requests_per_minute=limits.requests_per_minute,
                concurrent_streams=limits.concurrent_streams,
                tokens_per_minute=limits.tokens_per_minute,
                kv_cache_share=limits.kv_cache_share,
            )
        )


def set_times(
    request: engine_pb2.AddRequest, arrival_ns: int, time_limit_ns: int | None, deadline_ns: int | None
) -> bool:
    """Fills in how long the request has been here and may still take.

    Args:
        request: The message, to be sent at once.
        arrival_ns: CLOCK_MONOTONIC when the request reached this process.
        time_limit_ns: Longest time from acceptance to the last token; None: there is no such limit.
        deadline_ns: CLOCK_MONOTONIC of the deadline that ends the request; None: it has none.

    Returns:
        Whether the deadline comes first.

    Raises:
        ServiceError: DEADLINE_EXCEEDED; the deadline has passed.
    """
    now_ns = time.monotonic_ns()
    request.service_ns = now_ns - arrival_ns
    limits = [time_limit_ns] if time_limit_ns is not None else []
    left_ns = deadline_ns - now_ns if deadline_ns is not None else None
    if left_ns is not None:
        if left_ns <= 0:
            raise errors.deadline_exceeded()
        limits.append(left_ns)
    request.remaining_ns = min(limits, default=0)
    return left_ns is not None and request.remaining_ns == left_ns


def _digest(encoded: bytes, state: bytes, spec: ResolvedSpec, model: TextModel) -> bytes:
    """Returns the digest of a request in which a seed that the service draws is not drawn yet."""
    digest = hashlib.sha256(model.engine.revision.encode())
    digest.update(f"|draws_seed={spec.draws_seed}|time_limit={spec.time_limit_ns}|{len(encoded)}|".encode())
    digest.update(encoded)
    digest.update(state)
    return digest.digest()


def _completed(spec: ResolvedSpec, prompt: Prompt, model: TextModel) -> Request:
    """Returns the request with what is known once its prompt is; a drawn seed is missing."""
    max_tokens = resolve_max_tokens(spec, len(prompt), model.facts.bounds, prompt.field)
    asked, sampling = spec.request, spec.request.sampling
    if spec.bad_words:
        sequences = [sequence for word in spec.bad_words for sequence in model.tokenizer.encode_word(word)]
        words = tuple([array("I", sequence).tobytes() for sequence in sequences])
        sampling = msgspec.structs.replace(sampling, bad_words=words)
    token_ids = set() if spec.ignore_eos else {*model.engine.end_of_text_token_ids, *prompt.ending_ids}
    token_ids.update(array("I", asked.stop.token_ids))
    ending = array("I", sorted(token_ids)).tobytes()
    stop = msgspec.structs.replace(asked.stop, max_tokens=max_tokens, token_ids=ending)
    form, reasoning = _form_and_reasoning(spec, prompt)
    return msgspec.structs.replace(
        asked,
        prompt_token_ids=prompt.token_ids.astype("<u4", copy=False).tobytes(),
        sampling=sampling,
        stop=stop,
        structured_output=form,
        reasoning=reasoning,
    )


def _form_and_reasoning(spec: ResolvedSpec, prompt: Prompt) -> tuple[StructuredOutput | None, Reasoning | None]:
    """Returns what outputs are held to, and the reasoning before that, with its budget."""
    form, reasoning = prompt.form or spec.request.structured_output, prompt.reasoning
    if form is not None and prompt.around_answer:
        # A grammar of whole outputs has their reasoning in it.
        return form if form is prompt.form else msgspec.structs.replace(form, around=prompt.around_answer), None
    if reasoning is not None:
        reasoning = msgspec.structs.replace(reasoning, max_tokens=spec.max_reasoning_tokens)
    return form, reasoning


def resolve_max_tokens(spec: ResolvedSpec, num_prompt_tokens: int, bounds: Bounds, prompt_field: str) -> int:
    """Returns how many tokens an output may have, given its prompt.

    Raises:
        ServiceError: INVALID_ARGUMENT; prompt and output do not fit the context.
    """
    max_tokens = bounds.max_context_tokens - num_prompt_tokens if spec.max_tokens is None else spec.max_tokens
    broken = rules.check_lengths(num_prompt_tokens, max_tokens, spec.request.stop.min_tokens, bounds, prompt_field)
    if broken:
        raise errors.invalid(broken)
    return max_tokens
