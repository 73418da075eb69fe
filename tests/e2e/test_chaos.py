"""Hundreds of random requests against a server whose cache is far too small.

Every call ends once, and no answer depends on the others.

Readers cancel, let deadlines pass, stop reading, or read to the end. In the middle of it all the
worker is killed. Golden answers come from the same server, one request at a time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random

import grpc
import psutil
import pytest
from tests.support.processes import wait_until
from tests.support.rpc import connected, details, greedy, idle_load
from tests.support.running_server import RunningServer, running_server

from headrace.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

REQUESTS = 200
SHAPES = 24
CONCURRENCY = 64
# 72 blocks for 16 rows of up to 12 blocks each, and prompts that take two steps.
TINY = ("--num-blocks", "72", "--max-num-seqs", "16", "--max-num-batched-tokens", "96", "--max-model-len", "512")

# How a call may end, by what its reader does. A short deadline may be refused at once, because the
# expected wait is longer.
ENDS = {
    "cancel": {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED},
    "stall": {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED},
    "deadline": {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED},
}


@dataclasses.dataclass
class Call:
    """One request, what its reader does, and what came of it."""

    shape: int
    behaviour: str
    stop_after: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    code: grpc.StatusCode | None = None
    retry_info: bool = False
    finish: int = 0


def shapes(rng: random.Random, vocab: int) -> list[tuple[list[int], int]]:
    """Random prompts, every third beginning like the one before it, so that prefixes are shared."""
    made: list[tuple[list[int], int]] = []
    for index in range(SHAPES):
        shared = made[-1][0][: rng.randrange(16, 80)] if index % 3 == 2 else []
        made.append(
            ([*shared, *(rng.randrange(10, vocab) for _ in range(rng.randrange(1, 150)))], rng.randrange(1, 48))
        )
    return made


async def read(stub: inference_pb2_grpc.InferenceServiceStub, shape: tuple[list[int], int], call: Call) -> None:
    """Makes the call and behaves as it was chosen to."""
    timeout = random.Random(call.stop_after).uniform(0.01, 0.5) if call.behaviour == "deadline" else 600
    stream = stub.Generate(inference_pb2.GenerateRequest(spec=greedy(*shape)), timeout=timeout)
    try:
        async for response in stream:
            event = response.event
            call.tokens.extend(event.delta.token_ids)
            call.finish = event.output_finished.reason or call.finish
            if call.behaviour == "cancel" and len(call.tokens) >= call.stop_after:
                stream.cancel()
            if call.behaviour == "stall" and len(call.tokens) >= call.stop_after:
                await asyncio.sleep(0.5)
                stream.cancel()
    except grpc.aio.AioRpcError as error:
        call.retry_info = "RetryInfo" in details(error.trailing_metadata())
    except asyncio.CancelledError:
        pass
    call.code = await stream.code()


async def storm(address: str, made: list[tuple[list[int], int]], calls: list[Call], width: int) -> None:
    """Runs all calls, `width` at a time."""
    gate = asyncio.Semaphore(width)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def one(call: Call) -> None:
            async with gate:
                await read(stub, made[call.shape], call)

        await asyncio.gather(*(one(call) for call in calls))


async def storm_with_a_death(server: RunningServer, made: list[tuple[list[int], int]], calls: list[Call]) -> None:
    """A storm in which the worker is killed when a third of the calls have ended."""
    running = asyncio.create_task(storm(server.address, made, calls, CONCURRENCY))
    while sum(call.code is not None for call in calls) < len(calls) // 3:
        await asyncio.sleep(0.05)
    server.worker().kill()
    await running


def descriptors(server: RunningServer) -> list[int]:
    """Open descriptors of the supervisor, backend, worker and service."""
    processes = (psutil.Process(server.process.pid), server.backend(), server.worker(), *server.services())
    return [process.num_fds() for process in processes]


def settled(server: RunningServer, baseline: list[int]) -> bool:
    """Whether no process has more descriptors than before, but for a few connections."""
    return all(now <= before + 4 for now, before in zip(descriptors(server), baseline, strict=True))


@pytest.mark.timeout(900)
# What happens here at once is tried alone elsewhere: preemption and prefixes in test_equal_answers,
# readers that leave in test_streams, a worker's death in tests/faults.
@pytest.mark.slow
def test_every_call_ends_once_and_no_answer_depends_on_the_others() -> None:
    rng = random.Random(11)
    with running_server("--dtype", "fp32", "--device", "cpu", *TINY) as server:
        with connected(server.address) as stub:
            vocab = stub.GetModel(inference_pb2.GetModelRequest()).model.vocabulary_size
        made = shapes(rng, vocab)
        golden = [Call(index, "read", 0) for index in range(SHAPES)]
        asyncio.run(storm(server.address, made, golden, 1))
        wait_until(lambda: idle_load(server.address), 60, "idle after the golden run")
        baseline = descriptors(server)

        behaviours = ["read"] * 5 + ["cancel", "deadline", "stall"]
        calls = [Call(rng.randrange(SHAPES), rng.choice(behaviours), rng.randrange(0, 24)) for _ in range(REQUESTS)]
        asyncio.run(storm_with_a_death(server, made, calls))

        wait_until(lambda: idle_load(server.address), 60, "no request and no block left after the storm")
        wait_until(lambda: settled(server, baseline), 60, "descriptors at baseline")

    for call in calls:
        reference = golden[call.shape].tokens
        assert call.tokens == reference[: len(call.tokens)], f"shape {call.shape} ({call.behaviour})"
        if call.behaviour == "read":
            assert (call.code, call.finish) == (grpc.StatusCode.OK, generation_pb2.FINISH_REASON_LENGTH)
            assert len(call.tokens) == made[call.shape][1]
        else:
            assert call.code in ENDS[call.behaviour]
        assert call.retry_info == (call.code == grpc.StatusCode.RESOURCE_EXHAUSTED)
