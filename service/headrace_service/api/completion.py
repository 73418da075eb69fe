"""A whole generation as one answer: the events of a stream, put together.

Owns the join only; the events are the same ones that a streaming reader gets, so that both ways
cannot differ.
"""

from __future__ import annotations

import time

from headrace.v1 import generation_pb2, inference_pb2
from headrace_service.resolved_spec import ResolvedSpec
from headrace_service.streams.generation_stream import GenerationStream


def collect(stream: GenerationStream, model_revision: str, spec: ResolvedSpec) -> inference_pb2.CompleteResponse:
    """Returns the answer of an ended stream, whose wire is `event_wire`.

    Raises:
        ServiceError: the stream failed before its request ended.
    """
    if stream.done is None:
        assert stream.failure is not None
        raise stream.failure
    response = inference_pb2.CompleteResponse(request_id=stream.request_id, model_revision=model_revision)
    for index in range(spec.request.n):
        response.outputs.add(output_index=index)
    made_ns = time.monotonic_ns()
    for message in stream.take():
        _join(response, inference_pb2.GenerateResponse.FromString(message).event)
    last = stream.take_done()
    assert last is not None
    done = inference_pb2.GenerateResponse.FromString(last).event.done
    response.usage.CopyFrom(done.usage)
    response.ledger.CopyFrom(done.ledger)
    if stream.recording is not None:
        stream.recording.wrote_all(made_ns, time.monotonic_ns())
    return response


def _join(response: inference_pb2.CompleteResponse, event: generation_pb2.GenerationEvent) -> None:
    kind = event.WhichOneof("event")
    if kind == "prompt_logprobs":
        response.prompt_logprobs.add().CopyFrom(event.prompt_logprobs)
    elif kind == "output_finished":
        response.outputs[event.output_finished.output_index].finished.CopyFrom(event.output_finished)
    elif kind == "delta":
        _join_delta(response.outputs[event.delta.output_index], event.delta)


def _join_delta(output: inference_pb2.Output, delta: generation_pb2.Delta) -> None:
    output.token_ids.extend(delta.token_ids)
    if delta.HasField("logprobs"):
        output.logprobs.MergeFrom(delta.logprobs)
    for content in delta.content:
        if output.content:
            output.content[0].text += content.text
        else:
            output.content.add().CopyFrom(content)
