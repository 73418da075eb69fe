"""A client process of `bench_telemetry --part serving`, which reads many generations at once.

It does so again and again, and reports when their tokens came.

Owns the counting within a window. It lives as long as the benchmark, so that nobody's measurement
meets its start; jobs are lines of JSON on standard input, answers lines on standard output.
Generations that run when the window ends are read to their ends, so that every token that a server
reported was read.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import sys
import time
from typing import Any

import grpc
import msgspec
import uvloop

from headrace.v1 import generation_pb2, inference_pb2

GENERATE = "/headrace.v1.InferenceService/Generate"
CHANNELS = 4
_PROMPT = "The river runs to the sea"
# As long as burst256's on the average, and not all ending at once.
OUTPUT_TOKENS = (192, 320)


class Job(msgspec.Struct, frozen=True):
    """One window.

    Attributes:
        address: the service.
        streams: generations open at once.
        begin_s: CLOCK_MONOTONIC at which to begin.
        warm_up_s: from then to the window.
        seconds: length of the window.
        seed: of the outputs' lengths.
        detail: TraceDetail of the requests, 0: what the server has.
        traceparent: that calls bring; "": none.
    """

    address: str
    streams: int
    begin_s: float
    warm_up_s: float
    seconds: float
    seed: int
    detail: int = 0
    traceparent: str = ""


class Seen(msgspec.Struct):
    """What came.

    Attributes:
        tokens: within the window.
        messages: within the window.
        gaps_us: between messages of a stream, whose later one came within the window.
        all_tokens: of the whole job.
    """

    tokens: int = 0
    messages: int = 0
    gaps_us: list[int] = []
    all_tokens: int = 0


def request_bytes(detail: int, max_tokens: int) -> bytes:
    """A GenerateRequest for so many tokens, with a TraceDetail (0: what the server has)."""
    stop = generation_pb2.StopConditions(ignore_eos=True, max_tokens=max_tokens)
    spec = generation_pb2.GenerationSpec(text=_PROMPT, stop=stop, trace_detail=detail)
    data: bytes = inference_pb2.GenerateRequest(spec=spec).SerializeToString()
    return data


async def _read(call: Any, job: Job, seen: Seen) -> None:
    window_s = job.begin_s + job.warm_up_s
    end_s, before_s = window_s + job.seconds, 0.0
    while isinstance(data := await call.read(), bytes):
        event = inference_pb2.GenerateResponse.FromString(data).event
        if not event.HasField("delta"):
            continue
        now_s = time.monotonic()
        num_tokens = len(event.delta.token_ids)
        seen.all_tokens += num_tokens
        if window_s <= now_s < end_s:
            seen.messages += 1
            seen.tokens += num_tokens
            if before_s:
                seen.gaps_us.append(round((now_s - before_s) * 1e6))
        before_s = now_s


async def _stream(generate: Any, job: Job, number: int, seen: Seen) -> None:
    lengths = random.Random(job.seed * 1000 + number)
    metadata = (("traceparent", job.traceparent),) if job.traceparent else ()
    # The first ones are of any length, so that ends come evenly from the beginning.
    shortest = 1
    while time.monotonic() < job.begin_s + job.warm_up_s + job.seconds:
        call = generate(request_bytes(job.detail, lengths.randint(shortest, OUTPUT_TOKENS[1])), metadata=metadata)
        await _read(call, job, seen)
        if (code := await call.code()) is not grpc.StatusCode.OK:
            raise SystemExit(f"{job.address}: {code.name}: {await call.details()}")
        shortest = OUTPUT_TOKENS[0]


async def _run() -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    stubs: dict[str, list[Any]] = {}
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        job = msgspec.json.decode(line, type=Job)
        if job.address not in stubs:
            channels = [grpc.aio.insecure_channel(job.address, options=options) for _ in range(CHANNELS)]
            await asyncio.gather(*(channel.channel_ready() for channel in channels))
            stubs[job.address] = [channel.unary_stream(GENERATE) for channel in channels]
        seen = Seen(gaps_us=[])
        gc.collect()
        gc.disable()
        await asyncio.sleep(max(0.0, job.begin_s - time.monotonic()))
        shared = itertools.cycle(stubs[job.address])
        await asyncio.gather(*(_stream(next(shared), job, number, seen) for number in range(job.streams)))
        gc.enable()
        sys.stdout.write(msgspec.json.encode(seen).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(_run())
