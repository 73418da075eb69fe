"""A client process of `bench_front`: it reads many generations in one of the ways of the API.

It prints what came as JSON.

Owns the counting: messages and tokens within a window, and gaps between messages of one stream.
Several of these run side by side, because one would be the bottleneck.

    python -m benchmarks.front_client generate ADDRESS STREAMS SECONDS START_S
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import uvloop

from headrace.v1 import generation_pb2, inference_pb2
from headrace_protos.inference import grpc_service_pb2 as kserve

SERVICE = "/headrace.v1.InferenceService/"
KSERVE = "/inference.GRPCInferenceService/"
WARM_UP_S = 1.0
_CHANNELS = 4
_MAX_TOKENS = 1900
_PROMPT = "The river runs to the sea"
# What the chunk of a token has, and what a stream ends with.
OPENAI_TOKEN = b'"finish_reason":null'
OPENAI_END = b"0\r\n\r\n"


class Meter:
    """What was received within the window."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin_s, self.end_s = begin_s, end_s
        self.messages = 0
        self.tokens = 0
        self.gaps_ms: list[float] = []

    @property
    def over(self) -> bool:
        """Whether the window has ended."""
        return time.monotonic() >= self.end_s

    def count(self, now_s: float, before_s: float, num_tokens: int) -> None:
        """Counts a message; `before_s` is when the stream's last one came, 0 for none."""
        if self.begin_s <= now_s < self.end_s:
            self.messages += 1
            self.tokens += num_tokens
            if before_s and self.messages % 16 == 0:
                self.gaps_ms.append((now_s - before_s) * 1e3)


def spec(token_ids_only: bool = False) -> generation_pb2.GenerationSpec:
    """A long generation."""
    stop = generation_pb2.StopConditions(ignore_eos=True, max_tokens=_MAX_TOKENS)
    return generation_pb2.GenerationSpec(text=_PROMPT, stop=stop, token_ids_only=token_ids_only)


async def _read_generate(channel: grpc.aio.Channel, meter: Meter) -> None:
    request = inference_pb2.GenerateRequest(spec=spec()).SerializeToString()
    generate = channel.unary_stream(SERVICE + "Generate")
    while not meter.over:
        before_s = 0.0
        call = generate(request)
        while isinstance(data := await call.read(), bytes):
            event = inference_pb2.GenerateResponse.FromString(data).event
            if event.HasField("delta"):
                now_s = time.monotonic()
                meter.count(now_s, before_s, len(event.delta.token_ids))
                before_s = now_s
                if now_s >= meter.end_s:
                    call.cancel()
                    return


async def _read_bare(channel: grpc.aio.Channel, meter: Meter) -> None:
    before_s = 0.0
    call = channel.unary_stream("/bare/Stream")(b"")
    while isinstance(await call.read(), bytes):
        now_s = time.monotonic()
        meter.count(now_s, before_s, 1)
        before_s = now_s
        if now_s >= meter.end_s:
            call.cancel()
            return


async def _read_kserve(channel: grpc.aio.Channel, meter: Meter) -> None:
    inputs = {
        "text_input": _PROMPT.encode(),
        "stream": True,
        "sampling_parameters": json.dumps({"max_tokens": _MAX_TOKENS, "ignore_eos": True}).encode(),
    }
    request = kserve.ModelInferRequest(model_name="vllm_model", id="0")
    for name, value in inputs.items():
        contents = (
            kserve.InferTensorContents(bool_contents=[value])
            if isinstance(value, bool)
            else kserve.InferTensorContents(bytes_contents=[value])
        )
        request.inputs.add(
            name=name, datatype="BOOL" if isinstance(value, bool) else "BYTES", shape=[1], contents=contents
        )
    infer = channel.stream_stream(KSERVE + "ModelStreamInfer")
    while not meter.over:
        before_s = 0.0
        call = infer()
        await call.write(request.SerializeToString())
        await call.done_writing()
        while isinstance(data := await call.read(), bytes):
            response = kserve.ModelStreamInferResponse.FromString(data)
            if response.error_message:
                raise SystemExit(f"KServe: {response.error_message}")
            now_s = time.monotonic()
            meter.count(now_s, before_s, 1)
            before_s = now_s
            if now_s >= meter.end_s:
                call.cancel()
                return


async def _read_session(channel: grpc.aio.Channel, meter: Meter, streams: int, token_ids_only: bool) -> None:
    call = channel.stream_stream(SERVICE + "Session")()
    submit = inference_pb2.SessionSubmit(spec=spec(token_ids_only))
    for stream_id in range(1, streams + 1):
        await call.write(inference_pb2.SessionRequest(stream_id=stream_id, submit=submit).SerializeToString())
    before_s = 0.0
    while isinstance(data := await call.read(), bytes):
        response = inference_pb2.SessionResponse.FromString(data)
        now_s = time.monotonic()
        if response.HasField("tokens"):
            meter.count(now_s, before_s, len(response.tokens.token_ids))
            before_s = now_s
        if now_s >= meter.end_s:
            call.cancel()
            return
        for event in response.events:
            if event.HasField("error"):
                raise SystemExit(f"session: {event.error.message}")
            if event.event.HasField("done"):
                again = inference_pb2.SessionRequest(stream_id=event.stream_id, submit=submit)
                await call.write(again.SerializeToString())


async def _read_openai(address: str, meter: Meter) -> None:
    """Reads chunks as they come; several that come together are counted one by one."""
    host, _, port = address.rpartition(":")
    request = openai_request()
    while not meter.over:
        before_s = 0.0
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        while data := await reader.read(1 << 16):
            now_s = time.monotonic()
            for _ in range(data.count(OPENAI_TOKEN)):
                meter.count(now_s, before_s, 1)
                before_s = now_s
            if now_s >= meter.end_s or data.endswith(OPENAI_END):
                break
        writer.close()


def openai_request(max_tokens: int = _MAX_TOKENS) -> bytes:
    """Returns the HTTP request of the generation that `spec` asks for."""
    body = json.dumps({"prompt": _PROMPT, "stream": True, "max_tokens": max_tokens, "ignore_eos": True}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


_READERS: dict[str, Callable[[grpc.aio.Channel, Meter], Awaitable[None]]] = {
    "generate": _read_generate,
    "bare": _read_bare,
    "kserve": _read_kserve,
}


async def _run(way: str, address: str, streams: int, seconds: float, start_s: float) -> None:
    meter = Meter(start_s + WARM_UP_S, start_s + WARM_UP_S + seconds)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 1 << 26)]
    if way == "openai":
        await asyncio.sleep(max(0.0, start_s - time.monotonic()))
        await asyncio.gather(*(_read_openai(address, meter) for _ in range(streams)))
        print(json.dumps({"messages": meter.messages, "tokens": meter.tokens, "gaps_ms": meter.gaps_ms}))
        return
    channels: list[Any] = [grpc.aio.insecure_channel(address, options=options) for _ in range(min(_CHANNELS, streams))]
    await asyncio.sleep(max(0.0, start_s - time.monotonic()))
    if way.startswith("session"):
        await _read_session(channels[0], meter, streams, way == "session-ids")
    else:
        read = _READERS[way]
        await asyncio.gather(*(read(channels[index % len(channels)], meter) for index in range(streams)))
    print(json.dumps({"messages": meter.messages, "tokens": meter.tokens, "gaps_ms": meter.gaps_ms}))


def main() -> None:
    """Reads until the window is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=[*_READERS, "openai", "session-ids", "session-text"])
    parser.add_argument("address")
    parser.add_argument("streams", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("start_s", type=float, help="CLOCK_MONOTONIC at which to begin")
    options = parser.parse_args()
    uvloop.run(_run(options.way, options.address, options.streams, options.seconds, options.start_s))


if __name__ == "__main__":
    main()
