"""Streams that are open while something happens to a process, and what their readers saw."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2
from tests.support.rpc import CALL_TIMEOUT_S, details, greedy

from headrace.v1 import inference_pb2, inference_pb2_grpc

STREAMS = 3
# Enough to be still running when a reader that was held up for a second strikes.
TOKENS = 300
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def prompt(index: int) -> list[int]:
    return [20 + index, 30, 40 + index]


@dataclasses.dataclass
class Reader:
    """One open stream."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    resumed: int = 0
    code: grpc.StatusCode | None = None
    retry_info: bool = False

    async def read(self, stub: inference_pb2_grpc.InferenceServiceStub, index: int, num_tokens: int) -> None:
        """Reads to the end, whatever it is."""
        request = inference_pb2.GenerateRequest(spec=greedy(prompt(index), num_tokens))
        stream = stub.Generate(request, timeout=CALL_TIMEOUT_S)
        try:
            async for response in stream:
                self.tokens.extend(response.event.delta.token_ids)
                self.resumed += response.event.HasField("resumed")
        except grpc.aio.AioRpcError as error:
            self.retry_info = "RetryInfo" in details(error.trailing_metadata())
        self.code = await stream.code()


async def read_all(address: str, disturb: Callable[[], None] | None = None, num_tokens: int = TOKENS) -> list[Reader]:
    """Opens the streams; once all have tokens, calls `disturb`."""
    readers = [Reader() for _ in range(STREAMS)]
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        tasks = [asyncio.create_task(reader.read(stub, index, num_tokens)) for index, reader in enumerate(readers)]
        if disturb is not None:
            while not all(len(reader.tokens) >= 5 for reader in readers):
                await asyncio.sleep(0.005)
            disturb()
        await asyncio.gather(*tasks)
    return readers


class Strike:
    """Sends a signal to a process, and remembers when."""

    def __init__(self, pid: int, kind: int) -> None:
        self._pid, self._kind = pid, kind
        self.at = 0.0

    def __call__(self) -> None:
        self.at = time.monotonic()
        os.kill(self._pid, self._kind)
