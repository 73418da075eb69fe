"""Generation events of headrace.v1 as bytes, ready for `context.write`.

This module is an `EventWire`.

Owns the encoding of every `GenerationEvent`. The answers of Generate, Chat and Subscribe hold their
event in field 1, so that one encoding serves all three, and streams are registered without a
serializer. The message of one token is joined from parts that protobuf encoded before (fields may
follow each other in pieces, so that position and token can be kept apart): 0.5 us against 3.4 us
for building it from scratch.

No message is kept and filled again: protobuf frees what a message ever held only together with the
message, so that one which lives as long as the process grows with everything that passes through
it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from headrace.v1 import generation_pb2, inference_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service.messages import varint
from headrace_service.output_forms.parts import CallArguments, CallFinished, CallStarted, Part, Reasoning, Text
from headrace_service.streams.engine_columns import floats_of, output_indices_of, token_ids_of
from headrace_service.streams.wires import TokenLogprobs
from headrace_service.tracing.recording import Recording

_REASONS = {
    engine_pb2.OUTPUT_END_REASON_STOP: generation_pb2.FINISH_REASON_STOP,
    engine_pb2.OUTPUT_END_REASON_LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    engine_pb2.OUTPUT_END_REASON_CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
    engine_pb2.OUTPUT_END_REASON_DEADLINE: generation_pb2.FINISH_REASON_DEADLINE,
    engine_pb2.OUTPUT_END_REASON_ERROR: generation_pb2.FINISH_REASON_ERROR,
}

# Parts of one-token messages that are kept, the latest used of each kind; about 100 bytes each.
_MAX_KEPT_PARTS = 1 << 14

# Field number and wire type of a field that begins with its length.
_EVENT_TAG = bytes([inference_pb2.GenerateResponse.EVENT_FIELD_NUMBER << 3 | 2])
_DELTA_TAG = bytes([generation_pb2.GenerationEvent.DELTA_FIELD_NUMBER << 3 | 2])


def finish_reason(reason: engine_pb2.OutputEndReason, calls_tools: bool = False) -> generation_pb2.FinishReason:
    """Returns the public name of why an output ended, one that called functions or not."""
    if calls_tools and reason == engine_pb2.OUTPUT_END_REASON_STOP:
        return generation_pb2.FINISH_REASON_TOOL_CALLS
    return _REASONS.get(reason, generation_pb2.FINISH_REASON_ERROR)


def record(recording: Recording) -> bool:
    """Notes nothing: whoever writes a message does."""
    return False


def accepted(request_id: str, model_revision: str, prompt_tokens: int) -> bytes:
    """Returns the Accepted event."""
    event = generation_pb2.Accepted(request_id=request_id, model_revision=model_revision, prompt_tokens=prompt_tokens)
    return _response(generation_pb2.GenerationEvent(accepted=event))


def started(cached_tokens: int) -> bytes:
    """Returns the Started event."""
    return _response(generation_pb2.GenerationEvent(started=generation_pb2.Started(cached_tokens=cached_tokens)))


def prompt_logprobs(first_token_index: int, columns: engine_pb2.LogprobColumns) -> bytes:
    """Returns the PromptLogprobs event."""
    logprobs = generation_pb2.Logprobs(
        sampled=floats_of(columns.sampled),
        ranks=token_ids_of(columns.ranks),
        top_counts=output_indices_of(columns.top_counts),
        top_token_ids=token_ids_of(columns.top_token_ids),
        top_logprobs=floats_of(columns.top_logprobs),
    )
    event = generation_pb2.PromptLogprobs(first_token_index=first_token_index, logprobs=logprobs)
    return _response(generation_pb2.GenerationEvent(prompt_logprobs=event))


def resumed(pause_ns: int) -> bytes:
    """Returns the Resumed event."""
    return _response(generation_pb2.GenerationEvent(resumed=generation_pb2.Resumed(pause_ns=pause_ns)))


def delta(
    output_index: int,
    first_token_index: int,
    token_ids: Sequence[int],
    text: str,
    logprobs: Sequence[TokenLogprobs] | None,
    parts: Sequence[Part] | None = None,
) -> bytes:
    """Returns the Delta event.

    Args:
        output_index: which of the n outputs.
        first_token_index: position of the first token in its output.
        token_ids: at least one, but where an output's end alone ends a call.
        text: the text of these tokens; may be empty.
        logprobs: one per token, or None if not asked for.
        parts: what the tokens are of an output that has parts, instead of text.
    """
    if logprobs is None and len(token_ids) == 1 and not parts:
        return _framed(_position(output_index, first_token_index) + _token(token_ids[0], text))
    message = generation_pb2.Delta(output_index=output_index, first_token_index=first_token_index, token_ids=token_ids)
    if text:
        message.content.add().text = text
    message.content.extend(map(_content, parts or ()))
    if logprobs is not None:
        _fill_logprobs(message.logprobs, logprobs)
    return _framed(message.SerializeToString())


def output_finished(end: engine_pb2.OutputEnd, stop_strings: Sequence[str], calls_tools: bool = False) -> bytes:
    """Returns the OutputFinished event.

    Args:
        end: how the output ended.
        stop_strings: the request's, to name the one that matched.
        calls_tools: whether the output called functions.
    """
    reason = finish_reason(end.reason, calls_tools)
    event = generation_pb2.OutputFinished(output_index=end.output_index, reason=reason)
    if end.HasField("stop_token_id"):
        event.matched_stop.token_id = end.stop_token_id
    elif end.HasField("stop_string_index") and end.stop_string_index < len(stop_strings):
        event.matched_stop.text = stop_strings[end.stop_string_index]
    if end.HasField("error"):
        event.error.CopyFrom(end.error)
    if end.HasField("score"):
        event.score = end.score
    return _response(generation_pb2.GenerationEvent(output_finished=event))


def done(engine_done: engine_pb2.RequestDone, ledger: generation_pb2.Ledger, reasoning_tokens: int = 0) -> bytes:
    """Returns the Done event, with the number of reasoning tokens among those of outputs."""
    usage = generation_pb2.Usage(
        prompt_tokens=engine_done.prompt_tokens,
        output_tokens=engine_done.output_tokens,
        cached_tokens=engine_done.cached_tokens,
        reasoning_tokens=reasoning_tokens,
    )
    return _response(generation_pb2.GenerationEvent(done=generation_pb2.Done(usage=usage, ledger=ledger)))


@functools.lru_cache(_MAX_KEPT_PARTS)
def _position(output_index: int, first_token_index: int) -> bytes:
    return generation_pb2.Delta(output_index=output_index, first_token_index=first_token_index).SerializeToString()


@functools.lru_cache(_MAX_KEPT_PARTS)
def _token(token_id: int, text: str) -> bytes:
    content = [generation_pb2.Content(text=text)] if text else []
    return generation_pb2.Delta(token_ids=[token_id], content=content).SerializeToString()


def _framed(delta: bytes) -> bytes:
    """Returns an encoded Delta as the whole answer that holds it."""
    return _frame(len(delta)) + delta


@functools.lru_cache(_MAX_KEPT_PARTS)
def _frame(size: int) -> bytes:
    """Returns the bytes before a Delta of `size` bytes.

    Tag and length of the event within the answer, and of the delta within the event.
    """
    inner = _DELTA_TAG + varint.encode(size)
    return _EVENT_TAG + varint.encode(len(inner) + size) + inner


def _content(part: Part) -> generation_pb2.Content:
    match part:
        case Text(text):
            return generation_pb2.Content(text=text)
        case Reasoning(text):
            return generation_pb2.Content(reasoning=text)
        case CallStarted(index, id, name):
            started = generation_pb2.ToolCallStarted(index=index, id=id, name=name)
            return generation_pb2.Content(tool_call_started=started)
        case CallArguments(index, delta):
            arguments = generation_pb2.ToolCallArguments(index=index, delta=delta)
            return generation_pb2.Content(tool_call_arguments=arguments)
        case CallFinished(index, whole, valid):
            finished = generation_pb2.ToolCallFinished(index=index, arguments=whole, valid=valid)
            return generation_pb2.Content(tool_call_finished=finished)


def _fill_logprobs(columns: generation_pb2.Logprobs, logprobs: Sequence[TokenLogprobs]) -> None:
    for entry in logprobs:
        columns.sampled.append(entry.sampled)
        columns.ranks.append(entry.rank)
        columns.top_counts.append(len(entry.top_ids))
        columns.top_token_ids.extend(entry.top_ids)
        columns.top_logprobs.extend(entry.top_logprobs)


def _response(event: generation_pb2.GenerationEvent) -> bytes:
    return inference_pb2.GenerateResponse(event=event).SerializeToString()
