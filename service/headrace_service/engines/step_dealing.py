"""One StepOutputs, dealt out to the streams it holds tokens for.

Owns the loop that every token passes: columns to lists once, then one call per token. Rows of
handles that nobody holds any more (a caller left while the step was on its way) are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace_protos.engine.v1 import engine_pb2
from headrace_service.streams.engine_columns import LogprobReader, output_indices_of, token_ids_of
from headrace_service.streams.engine_reader import EngineReader


def deal(step: engine_pb2.StepOutputs, streams: dict[int, EngineReader]) -> None:
    """Gives each stream its tokens, then its events.

    A stream whose request is done leaves `streams`.
    """
    if step.tokens:
        if step.logprob_rows:
            _deal_with_logprobs(step, streams)
        else:
            _deal_tokens(step, streams)
    for event in step.events:
        stream = streams.get(event.handle)
        if stream is not None:
            stream.note(event)
            if stream.done is not None:
                del streams[event.handle]


def _deal_tokens(step: engine_pb2.StepOutputs, streams: Mapping[int, EngineReader]) -> None:
    find = streams.get
    for handle, output_index, token in zip(
        token_ids_of(step.handles), output_indices_of(step.output_indices), token_ids_of(step.tokens), strict=True
    ):
        stream = find(handle)
        if stream is not None:
            stream.push(output_index, token)


def _deal_with_logprobs(step: engine_pb2.StepOutputs, streams: Mapping[int, EngineReader]) -> None:
    reader = LogprobReader(step.logprobs)
    with_logprobs = set(token_ids_of(step.logprob_rows))
    rows = zip(
        token_ids_of(step.handles), output_indices_of(step.output_indices), token_ids_of(step.tokens), strict=True
    )
    for row, (handle, output_index, token) in enumerate(rows):
        entry = reader.next() if row in with_logprobs else None
        stream = streams.get(handle)
        if stream is not None:
            stream.push(output_index, token)
            if entry is not None:
                stream.push_logprobs(output_index, entry)
