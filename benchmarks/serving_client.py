"""A client process of `bench_serving`: sends texts through gRPC and notes when their tokens arrive.

Owns its share of a workload's calls. It speaks the public protocol through bare stubs, so that what
is measured is the server and not a client library. A job comes as msgpack on standard input, its
results go to standard output. Times are CLOCK_MONOTONIC, the same for all processes of the machine.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import time
from typing import Any

import grpc
import msgspec
import uvloop

from headrace.v1 import inference_pb2

_GENERATE = "/headrace.v1.InferenceService/Generate"
_CHANNELS_PER_SERVICE = 4
_MAX_MESSAGE = 16 << 20


class Call(msgspec.Struct, frozen=True):
    """One request of the workload."""

    index: int
    text: str
    max_tokens: int
    # Open loop: seconds after the beginning; None: as soon as a place is free.
    at_s: float | None
    # Of a user: seconds of thinking before it.
    think_s: float = 0.0


class Job(msgspec.Struct, frozen=True):
    """What one process sends."""

    addresses: list[str]
    begin_s: float
    # Closed loop: calls open at once.
    concurrency: int
    salt: str
    calls: list[Call]
    # Closed loop of people, each with calls of their own: none is sent after so many seconds.
    users: list[list[Call]] = []
    seconds: float = 0.0
    # How long after that their last answers may take.
    drain_s: float = 0.0
    # TraceDetail of the requests; 0: what the server has.
    detail: int = 0


class CallResult(msgspec.Struct):
    """What came back, and when."""

    index: int
    start_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    arrivals_s: list[float] = []
    error: str = ""
    # Given up, because the time for answers was over.
    unanswered: bool = False


def _request(call: Call, salt: str, detail: int) -> bytes:
    request = inference_pb2.GenerateRequest()
    spec = request.spec
    spec.text = call.text
    spec.cache_salt = salt
    spec.sampling.temperature = 0.0
    spec.stop.max_tokens = call.max_tokens
    spec.stop.ignore_eos = True
    spec.trace_detail = detail
    data: bytes = request.SerializeToString()
    return data


async def _generate(stub: Any, index: int, request: bytes) -> CallResult:
    result = CallResult(index, time.perf_counter(), arrivals_s=[])
    call = stub(request)
    try:
        while isinstance(data := await call.read(), bytes):
            event = inference_pb2.GenerateResponse.FromString(data).event
            if event.HasField("delta"):
                result.arrivals_s += [time.perf_counter()] * len(event.delta.token_ids)
            elif event.HasField("done"):
                result.prompt_tokens = event.done.usage.prompt_tokens
                result.cached_tokens = event.done.usage.cached_tokens
    except grpc.aio.AioRpcError as error:
        result.error = f"{error.code().name}: {error.details()}"
    return result


async def _user(calls: list[tuple[Call, bytes]], end_s: float, drain_s: float, stub: Any) -> list[CallResult]:
    """Thinks, asks, reads the whole answer, and so on until the time is over.

    An answer that is not whole `drain_s` later is given up.
    """
    results = []
    for call, request in calls:
        await asyncio.sleep(call.think_s)
        if time.perf_counter() > end_s:
            break
        try:
            async with asyncio.timeout(max(0.0, end_s + drain_s - time.perf_counter())):
                results.append(await _generate(stub, call.index, request))
        except TimeoutError:
            results.append(CallResult(call.index, unanswered=True))
    return results


async def _run(job: Job) -> list[CallResult]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", _MAX_MESSAGE)]
    channels = [
        grpc.aio.insecure_channel(address, options=options)
        for _, address in itertools.product(range(_CHANNELS_PER_SERVICE), job.addresses)
    ]
    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    stubs = itertools.cycle([channel.unary_stream(_GENERATE) for channel in channels])
    requests = [(call, _request(call, job.salt, job.detail)) for call in job.calls]
    own = [[(call, _request(call, job.salt, job.detail)) for call in calls] for calls in job.users]
    gc.freeze()
    await asyncio.sleep(max(0.0, job.begin_s - time.perf_counter()))
    if own:
        # From now: a process that started late has as much time as the others.
        end_s = time.perf_counter() + job.seconds
        parts = await asyncio.gather(*(_user(calls, end_s, job.drain_s, next(stubs)) for calls in own))
        return [result for part in parts for result in part]
    if job.calls and job.calls[0].at_s is not None:
        tasks = []
        for call, request in requests:
            await asyncio.sleep(max(0.0, job.begin_s + (call.at_s or 0.0) - time.perf_counter()))
            tasks.append(asyncio.create_task(_generate(next(stubs), call.index, request)))
        return list(await asyncio.gather(*tasks))
    results: list[CallResult] = []
    waiting = iter(requests)

    async def caller() -> None:
        for call, request in waiting:
            results.append(await _generate(next(stubs), call.index, request))

    await asyncio.gather(*(caller() for _ in range(job.concurrency)))
    return results


def main() -> None:
    """One job."""
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    sys.stdout.buffer.write(msgspec.msgpack.encode(uvloop.run(_run(job))))


if __name__ == "__main__":
    main()
