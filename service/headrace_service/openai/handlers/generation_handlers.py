"""Chat completions and completions: from a body to an answer, whole or streamed.

Owns the steps: read, resolve, start, deliver. A request of several prompts is as many generations,
whose outputs are one answer. The generation itself is the same as headrace.v1's: same validation,
same engine, same streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import TypeVar

import numpy as np

from headrace.v1 import generation_pb2
from headrace_service import errors, validation
from headrace_service.calls.call import Call
from headrace_service.engines.served_model import ServedModel
from headrace_service.generations.engine_request import Prompt
from headrace_service.openai.events import answers, chunks
from headrace_service.openai.events.answers import Answer
from headrace_service.openai.events.chunks import ChatChunks, Chunks, CompletionChunks
from headrace_service.openai.events.echo import Echo
from headrace_service.openai.events.head import Head
from headrace_service.openai.events.openai_wire import AnswerParts
from headrace_service.openai.events.token_report import TokenReport
from headrace_service.openai.events.usage import Usage
from headrace_service.openai.handlers import model_handlers
from headrace_service.openai.http.exchange import Exchange
from headrace_service.openai.requests import completion_request, reading
from headrace_service.openai.requests.chat_request import ChatRequest
from headrace_service.openai.requests.completion_request import CompletionRequest
from headrace_service.openai.requests.shared_fields import SharedFields
from headrace_service.resolved_spec import ResolvedSpec
from headrace_service.service_core import ServiceCore
from headrace_service.streams.generation_stream import GenerationStream

Fields = TypeVar("Fields", bound=SharedFields)
_REQUEST_ID = b"x-request-id"
_IGNORED = b"x-headrace-ignored"


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """What a request asks for, ready to be started.

    Attributes:
        fields: as the caller sent them.
        names: what fields of GenerationSpec are called in them.
        model: the model.
        spec: of all prompts.
        prompts: at least one.
        echoes: per prompt, what its outputs begin with.
        head: what the answer begins with.
    """

    fields: SharedFields
    names: Mapping[str, str]
    model: ServedModel
    spec: ResolvedSpec
    prompts: Sequence[Prompt]
    echoes: Sequence[Echo | None]
    head: Head


class GenerationHandlers:
    """Handlers of the paths that generate.

    Args:
        core: what the handlers share.
    """

    def __init__(self, core: ServiceCore) -> None:
        self._core = core

    async def chat(self, body: bytes, exchange: Exchange, call: Call) -> None:
        """Answers a conversation."""
        asked = _read(body, ChatRequest, exchange)
        model = model_handlers.find(self._core, asked.model or "", call)
        spec = _resolved(asked.spec(), model, asked.names)
        prompt = await self._core.generations.prompt_of_conversation(asked.conversation(model.text.form), model)
        head = Head.of("chat", model.text.facts.name, model.text.engine.revision)
        await self._answer(_Asked(asked, asked.names, model, spec, [prompt], [None], head), exchange, call)

    async def complete(self, body: bytes, exchange: Exchange, call: Call) -> None:
        """Answers prompts."""
        asked = _read(body, CompletionRequest, exchange)
        model = model_handlers.find(self._core, asked.model or "", call)
        spec = _resolved(asked.spec(), model, asked.names)
        given = asked.prompts()
        adds_special = asked.add_special_tokens is not False
        prompts = [await _encoded(prompt, model, adds_special) for prompt in given]
        echoes = [_echo(asked, one, prompt, model) for one, prompt in zip(given, prompts, strict=True)]
        head = Head.of("completion", model.text.facts.name, model.text.engine.revision)
        await self._answer(_Asked(asked, asked.names, model, spec, prompts, echoes, head), exchange, call)

    # -- inside

    async def _answer(self, asked: _Asked, exchange: Exchange, call: Call) -> None:
        if asked.fields.wants_stream:
            await self._stream(asked, exchange, call)
        else:
            await self._whole(asked, exchange, call)

    async def _stream(self, asked: _Asked, exchange: Exchange, call: Call) -> None:
        wires = [_chunks(asked, index, parts) for index, parts in enumerate(_parts(asked, Usage()))]
        async with contextlib.AsyncExitStack() as stack:
            streams = await self._started(asked, wires, call, stack)
            exchange.extra_headers.append((_REQUEST_ID, wires[0].request_id.encode()))
            await exchange.begin_stream()
            await _all([self._core.deliver(stream, exchange.write) for stream in streams])
            _raise_failure(wires, asked.names)
            last = wires[0].usage_chunk() if asked.fields.wants_usage else b""
            await exchange.end_stream(last + chunks.END)

    async def _whole(self, asked: _Asked, exchange: Exchange, call: Call) -> None:
        usage, with_logprobs = Usage(), asked.spec.request.num_logprobs >= 0
        wires = [Answer(parts, with_logprobs=with_logprobs) for parts in _parts(asked, usage)]
        async with contextlib.AsyncExitStack() as stack:
            streams = await self._started(asked, wires, call, stack)
            for stream in streams:
                await stream.wait_ended()
                _collect(stream)
            _raise_failure(wires, asked.names)
            body = answers.answer_of(asked.head, wires, usage)
            limit = self._core.config.max_message_bytes
            if len(body) > limit:
                raise errors.too_large("the answer", len(body), limit, "use stream")
        exchange.extra_headers.append((_REQUEST_ID, wires[0].request_id.encode()))
        await exchange.answer(200, body)

    async def _started(
        self, asked: _Asked, wires: Sequence[Answer | Chunks], call: Call, stack: contextlib.AsyncExitStack
    ) -> list[GenerationStream]:
        """Returns the streams of all prompts, which are given up with the stack."""
        running, streams = self._core.generations.running, []
        for prompt, wire in zip(asked.prompts, wires, strict=True):
            stack.enter_context(self._core.open_generation())
            try:
                streams.append(await stack.enter_async_context(running(asked.spec, prompt, asked.model, call, wire)))
            except errors.ServiceError as error:
                raise errors.renamed(error, asked.names) from None
            wire.request_id = streams[0].request_id
        return streams


def _read(body: bytes, kind: type[Fields], exchange: Exchange) -> Fields:
    asked, ignored = reading.read(body, kind)
    if ignored:
        exchange.extra_headers.append((_IGNORED, ", ".join(ignored).encode()))
    return asked


def _resolved(spec: generation_pb2.GenerationSpec, model: ServedModel, names: Mapping[str, str]) -> ResolvedSpec:
    """Returns the checked spec, which has no prompt. Raises ServiceError in the caller's words."""
    try:
        return validation.resolve(spec, model.text.facts, in_chat=True)
    except errors.ServiceError as error:
        raise errors.renamed(error, names) from None


async def _encoded(prompt: completion_request.Prompt, model: ServedModel, adds_special: bool) -> Prompt:
    facts = model.text.facts
    if isinstance(prompt, str):
        validation.check_text(prompt, facts.max_text_bytes, "prompt")
        return Prompt(await model.text.tokenizer.encode(prompt, adds_special), "prompt")
    validation.check_token_ids(prompt, facts.bounds.vocabulary_size, "prompt")
    return Prompt(np.array(prompt, dtype=np.uint32), "prompt")


def _echo(
    asked: CompletionRequest, given: completion_request.Prompt, prompt: Prompt, model: ServedModel
) -> Echo | None:
    if not asked.echo:
        return None
    token_ids = prompt.token_ids.tolist()
    text = given if isinstance(given, str) else model.text.pieces.text(token_ids, skip_special=False)
    return Echo(text, token_ids, asked.logprobs is not None, asked.only_scores)


def _parts(asked: _Asked, usage: Usage) -> list[AnswerParts]:
    """Returns what the answer to each prompt is made of; `usage` counts all of them."""
    report, num_outputs = TokenReport(asked.model.text.pieces), asked.spec.request.n
    return [AnswerParts(asked.head, num_outputs, usage, report, echo) for echo in asked.echoes]


def _chunks(asked: _Asked, index: int, parts: AnswerParts) -> Chunks:
    """Returns the wire of the prompt with this index."""
    kind = ChatChunks if asked.head.kind == "chat" else CompletionChunks
    return kind(parts, index * parts.num_outputs, says_usage=asked.fields.wants_usage)


def _collect(stream: GenerationStream) -> None:
    """Hands all events of an ended stream to its wire. Raises ServiceError: the stream failed."""
    if stream.failure is not None:
        raise stream.failure
    made_ns = time.monotonic_ns()
    stream.take()
    stream.take_done()
    if stream.recording is not None:
        stream.recording.wrote_all(made_ns, time.monotonic_ns())


def _raise_failure(wires: Sequence[Answer | Chunks], names: Mapping[str, str]) -> None:
    for wire in wires:
        if wire.error is not None:
            raise errors.renamed(wire.error, names)


async def _all(writers: Sequence[Coroutine[None, None, None]]) -> None:
    """Runs writers side by side; the first failure ends the others."""
    if len(writers) == 1:
        await writers[0]
        return
    tasks = [asyncio.create_task(writer) for writer in writers]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
