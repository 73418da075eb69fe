"""A client process of `bench_telemetry --part live`, whose streams never stop.

What they see is counted window by window.

Owns the counting within windows. Windows are lines of JSON on standard input, each with the trace
context that generations bring from then on; answers are lines on standard output, when a window's
time is over. A stream takes up its next generation when one ends, on the connections that it has.
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

from benchmarks.telemetry_client import CHANNELS, GENERATE, OUTPUT_TOKENS, Seen, request_bytes
from headrace.v1 import inference_pb2

# So late, tokens of a window may still be in a call's buffer; they count by when they are read, and
# then are the next one's.
_GRACE_S = 0.05


class Window(msgspec.Struct, frozen=True):
    """When to count, and what is sent along meanwhile.

    Attributes:
        begin_s: CLOCK_MONOTONIC of the window's begin.
        end_s: and of its end.
        traceparent: that generations bring which begin from now on; "": none.
    """

    begin_s: float
    end_s: float
    traceparent: str = ""


class Steady:
    """The streams of one process, and the window that counts now."""

    def __init__(self, stubs: list[Any], first: Window, seed: int) -> None:
        """Nothing open.

        Args:
            stubs: of Generate, one a connection.
            first: window.
            seed: of the outputs' lengths.
        """
        self._stubs = itertools.cycle(stubs)
        self._lengths = random.Random(seed)
        self.window = first
        self.seen = Seen(gaps_us=[])

    async def stream(self) -> None:
        """One generation after the other, for ever."""
        # The first is of any length, so that ends come evenly from the beginning.
        shortest = 1
        while True:
            window = self.window
            metadata = (("traceparent", window.traceparent),) if window.traceparent else ()
            data = request_bytes(0, self._lengths.randint(shortest, OUTPUT_TOKENS[1]))
            call = next(self._stubs)(data, metadata=metadata)
            await self._read(call)
            if (code := await call.code()) is not grpc.StatusCode.OK:
                raise SystemExit(f"{code.name}: {await call.details()}")
            shortest = OUTPUT_TOKENS[0]

    async def _read(self, call: Any) -> None:
        before_s = 0.0
        while isinstance(data := await call.read(), bytes):
            event = inference_pb2.GenerateResponse.FromString(data).event
            if not event.HasField("delta"):
                continue
            now_s = time.monotonic()
            if self.window.begin_s <= now_s < self.window.end_s:
                self._count(len(event.delta.token_ids), now_s - before_s if before_s else 0.0)
            before_s = now_s

    def _count(self, num_tokens: int, gap_s: float) -> None:
        seen = self.seen
        seen.messages += 1
        seen.tokens += num_tokens
        if gap_s:
            seen.gaps_us.append(round(gap_s * 1e6))

    async def counted(self, window: Window) -> Seen:
        """What came in a window, when it is over."""
        self.window, self.seen = window, Seen(gaps_us=[])
        await asyncio.sleep(window.end_s + _GRACE_S - time.monotonic())
        return self.seen


async def _run(address: str, num_streams: int, seed: int) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(CHANNELS)]
    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    stubs = [channel.unary_stream(GENERATE) for channel in channels]
    steady = Steady(stubs, Window(0.0, 0.0), seed)
    async with asyncio.TaskGroup() as streams:
        # Collections that look through everything would be gaps of all streams at once.
        gc.freeze()
        streams.create_task(_answer(steady))
        for _ in range(num_streams):
            streams.create_task(steady.stream())


async def _answer(steady: Steady) -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        seen = await steady.counted(msgspec.json.decode(line, type=Window))
        sys.stdout.write(msgspec.json.encode(seen).decode() + "\n")
        sys.stdout.flush()
    raise SystemExit(0)


if __name__ == "__main__":
    uvloop.run(_run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
