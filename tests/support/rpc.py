"""The public API for tests against a real server: specs in, transcripts and errors out.

Generated stubs only, no client library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

# Of every call that must end by itself; generous, because the machine may be busy.
CALL_TIMEOUT_S = 240.0


@contextmanager
def connected(address: str) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
    """A stub on a connection of its own."""
    with grpc.insecure_channel(address) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def greedy(prompt: str | Sequence[int], max_tokens: int, **fields: Any) -> generation_pb2.GenerationSpec:
    """A greedy generation of exactly `max_tokens` tokens; `fields` are more fields of the spec."""
    spec = generation_pb2.GenerationSpec(
        sampling=generation_pb2.SamplingParameters(temperature=0),
        stop=generation_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        **fields,
    )
    if isinstance(prompt, str):
        spec.text = prompt
    else:
        spec.token_ids.ids.extend(prompt)
    return spec


@dataclasses.dataclass
class Transcript:
    """Everything that a stream said, by output."""

    events: list[generation_pb2.GenerationEvent] = dataclasses.field(default_factory=list)
    tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    texts: dict[int, str] = dataclasses.field(default_factory=dict)
    finished: dict[int, generation_pb2.OutputFinished] = dataclasses.field(default_factory=dict)
    done: generation_pb2.Done | None = None

    def take(self, event: generation_pb2.GenerationEvent) -> None:
        """Adds an event; deltas must follow each other without a gap."""
        self.events.append(event)
        if event.HasField("delta"):
            delta = event.delta
            tokens = self.tokens.setdefault(delta.output_index, [])
            assert not tokens or delta.first_token_index == self.first_token(delta.output_index) + len(tokens)
            tokens.extend(delta.token_ids)
            pieces = "".join(piece.text for piece in delta.content)
            self.texts[delta.output_index] = self.texts.get(delta.output_index, "") + pieces
        elif event.HasField("output_finished"):
            self.finished[event.output_finished.output_index] = event.output_finished
        elif event.HasField("done"):
            self.done = event.done

    def first_token(self, output_index: int = 0) -> int:
        """Index of the first token that came."""
        deltas = (event.delta for event in self.events if event.HasField("delta"))
        return next(delta.first_token_index for delta in deltas if delta.output_index == output_index)

    def reason(self, output_index: int = 0) -> int:
        """Why an output ended."""
        return self.finished[output_index].reason


def read(stream: Iterable[Any]) -> Transcript:
    """Reads a stream of Generate, Chat or Subscribe to its end."""
    transcript = Transcript()
    for response in stream:
        transcript.take(response.event)
    return transcript


def generate(address: str, spec: generation_pb2.GenerationSpec) -> Transcript:
    """One Generate call on a connection of its own."""
    with connected(address) as stub:
        return read(stub.Generate(inference_pb2.GenerateRequest(spec=spec), timeout=CALL_TIMEOUT_S))


def details(metadata: Iterable[Any] | None) -> dict[str, Message]:
    """Error details of a call's trailing metadata, by the name of their type."""
    found: dict[str, Message] = {}
    raw = dict(metadata or ()).get("grpc-status-details-bin", b"")
    assert isinstance(raw, bytes)
    for packed in status_pb2.Status.FromString(raw).details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            message = kind()
            if packed.Unpack(message):
                found[kind.DESCRIPTOR.name] = message
    return found


def health(address: str) -> int:
    """Serving status of the whole server."""
    with grpc.insecure_channel(address) as channel:
        return int(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60).status)


def serves(address: str) -> bool:
    """Whether the server can be reached and says SERVING."""
    try:
        return health(address) == health_pb2.HealthCheckResponse.SERVING
    except grpc.RpcError:
        return False


def idle_load(address: str) -> inference_pb2.GetLoadResponse | None:
    """The load once nothing runs or waits and no block is held, else None."""
    with connected(address) as stub:
        load = stub.GetLoad(inference_pb2.GetLoadRequest(), timeout=60)
    return None if load.running_sequences or load.waiting_requests or load.kv_cache_usage else load
