"""A whole service in the test's own process.

Fake engine, service, and a channel of a client, over real sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from unittest import mock

import grpc
from google.protobuf import message
from google.rpc import error_details_pb2, status_pb2
from tests.service.fake_engine import FakeEngine, Script
from tests.service.model_folder import CONTEXT
from tokenizers import Tokenizer

from headrace.v1 import generation_pb2, inference_pb2_grpc
from headrace_model_folder import ModelFolder
from headrace_protos.engine.v1 import engine_pb2
from headrace_service.config import ServiceConfig
from headrace_service.server import Service
from headrace_service.text import text_loader
from headrace_service.text.chat_template import ChatTemplateRenderer

ANSWER = "the quick brown fox jumps over the lazy dog: größer, naïve, 東京, 🙂 done"


@dataclasses.dataclass
class Running:
    """Fake engine, service and client channel of one test."""

    engine: FakeEngine
    service: Service
    channel: grpc.aio.Channel
    stub: Any
    tokenizer: Tokenizer
    address: str
    folder: pathlib.Path

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        encoded: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return encoded

    async def until(self, condition: Any, timeout_s: float = 60.0) -> None:
        """Waits until a condition of the test holds."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)


def engine_model(folder: pathlib.Path, context: int = CONTEXT) -> engine_pb2.EngineModel:
    """What the backend would say of the folder."""
    opened = ModelFolder.open(folder, require_weights=False)
    return engine_pb2.EngineModel(
        name=opened.name,
        revision=opened.revision,
        architecture=opened.config.architecture,
        parameter_count=opened.parameter_count,
        dtype="fp32",
        vocabulary_size=opened.config.vocab_size,
        max_context_tokens=context,
        max_outputs=16,
        end_of_text_token_ids=opened.generation_defaults.eos_token_ids,
        kv_block_tokens=16,
        kv_blocks=64,
        device="cpu",
        folder=str(folder),
        max_waiting_requests=8,
        memory=engine_pb2.EngineMemory(
            **{field.name: field.number for field in engine_pb2.EngineMemory.DESCRIPTOR.fields if field.number < 9},
            measured=True,
        ),
        quantization=engine_pb2.EngineQuantization(
            scheme="int4",
            group_size=64,
            bits_per_weight=4.5,
            mean_relative_error=0.25,
            worst_relative_error=0.5,
            worst_tensor="a",
            head_scheme="int8",
            head_bits_per_weight=8.5,
            head_relative_error=0.75,
            activations="int8 per token",
            measured=engine_pb2.EngineMeasuredLoss(
                method="gptq",
                tokens=9,
                perplexity_before=3.25,
                perplexity_after=3.5,
                divergence=0.125,
                divergence_interval=0.0,
            ),
        ),
    )


@contextlib.contextmanager
def quick_start() -> Iterator[None]:
    """Services that collect no garbage when they begin, and start a template's helper when asked.

    This process holds all that pytest and other tests ever loaded, and going through that takes 0.4
    s. A helper takes 0.1 s, and few tests have conversations.
    """
    with (
        mock.patch.object(text_loader, "_leave_out_of_collections"),
        mock.patch.object(ChatTemplateRenderer, "warm_up"),
    ):
        yield


@contextlib.asynccontextmanager
async def running_service(
    folder: pathlib.Path,
    sockets: pathlib.Path,
    script: Script | None = None,
    context: int = CONTEXT,
    channel_credentials: grpc.ChannelCredentials | None = None,
    **config: Any,
) -> AsyncIterator[Running]:
    """Starts everything and waits until the service says it is serving."""
    with quick_start():
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        answer = tokenizer.encode(ANSWER, add_special_tokens=False).ids
        engine = FakeEngine(engine_model(folder, context), script or (lambda add, index: answer))
        await engine.start(f"unix:{sockets}/engine.sock")
        values = {
            "listen": ("127.0.0.1:0",),
            "engine": (engine.address,),
            "shutdown_grace_s": 1.0,
            "template_timeout_s": 30.0,
            **config,
        }
        service = Service(ServiceConfig(**values))
        (address,) = await service.start()
        options = [("grpc.use_local_subchannel_pool", 1)]
        if channel_credentials is None:
            channel = grpc.aio.insecure_channel(address, options=options)
        else:
            channel = grpc.aio.secure_channel(address, channel_credentials, options=options)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        running = Running(engine, service, channel, stub, tokenizer, address, folder)
        try:
            await running.until(lambda: service.core.serving)
            yield running
        finally:
            await channel.close()
            await service.stop(0)
            await engine.stop()


async def events_of(call: Any) -> list[generation_pb2.GenerationEvent]:
    """All events of a stream from here on."""
    events = []
    while isinstance(response := await call.read(), message.Message):
        events.append(response.event)  # type: ignore[attr-defined]
    return events


def text_of(events: Sequence[generation_pb2.GenerationEvent], output_index: int = 0) -> str:
    """The text of one output."""
    return "".join(content.text for event in _deltas(events, output_index) for content in event.delta.content)


def ids_of(events: Sequence[generation_pb2.GenerationEvent], output_index: int = 0) -> list[int]:
    """The token ids of one output."""
    return [token for event in _deltas(events, output_index) for token in event.delta.token_ids]


def kinds_of(events: Sequence[generation_pb2.GenerationEvent]) -> list[str]:
    """The kinds of events in order, neighbouring deltas as one."""
    kinds = [event.WhichOneof("event") or "" for event in events]
    return [kind for index, kind in enumerate(kinds) if index == 0 or kind != "delta" or kinds[index - 1] != "delta"]


def violations_of(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """Field and description of each violation in an error's BadRequest."""
    found = error_details_pb2.BadRequest()
    for detail in status_of(error).details:
        if detail.Is(found.DESCRIPTOR):
            detail.Unpack(found)
    return {violation.field: violation.description for violation in found.field_violations}


def retry_delay_s(error: grpc.aio.AioRpcError) -> float | None:
    """The delay of an error's RetryInfo."""
    found = error_details_pb2.RetryInfo()
    for detail in status_of(error).details:
        if detail.Is(found.DESCRIPTOR):
            detail.Unpack(found)
            return float(found.retry_delay.ToNanoseconds()) / 1e9
    return None


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The google.rpc.Status that came with an error."""
    metadata = {key: value for key, value in error.trailing_metadata() or ()}
    return status_pb2.Status.FromString(metadata.get("grpc-status-details-bin", b""))  # type: ignore[arg-type]


def _deltas(
    events: Sequence[generation_pb2.GenerationEvent], output_index: int
) -> list[generation_pb2.GenerationEvent]:
    return [
        event for event in events if event.WhichOneof("event") == "delta" and event.delta.output_index == output_index
    ]
