"""Hundreds of random requests against a server whose cache is far too small: every call ends once, and no answer depends on the others.

Readers cancel, let deadlines pass, stop reading, or read to the end. Golden answers come from the same server, one request at a time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random

import grpc
import psutil
import pytest
from tests.support.running_server import RunningServer, running_server, wait_until

from headrace.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

REQUESTS = 500
SHAPES = 32
CONCURRENCY = 64


@dataclasses.dataclass
class Call:
    """One request, what its reader does, and what came of it."""

    shape: int
    behaviour: str
    stop_after: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    code: grpc.StatusCode | None = None
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


def spec(shape: tuple[list[int], int]) -> generation_pb2.GenerationSpec:
    """Greedy, to its full length."""
    prompt, output = shape
    return generation_pb2.GenerationSpec(
        token_ids=generation_pb2.TokenIds(ids=prompt),
        sampling=generation_pb2.SamplingParameters(temperature=0),
        stop=generation_pb2.StopConditions(max_tokens=output, ignore_eos=True),
    )


async def read(stub: inference_pb2_grpc.InferenceServiceStub, shape: tuple[list[int], int], call: Call) -> None:
    """Makes the call and behaves as told."""
    timeout = random.Random(call.stop_after).uniform(0.01, 0.5) if call.behaviour == "deadline" else 120
    stream = stub.Generate(inference_pb2.GenerateRequest(spec=spec(shape)), timeout=timeout)
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
    except grpc.aio.AioRpcError:
        pass
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


def idle(address: str) -> inference_pb2.GetLoadResponse | None:
    """The load once nothing runs or waits, else None."""
    with grpc.insecure_channel(address) as channel:
        load = inference_pb2_grpc.InferenceServiceStub(channel).GetLoad(inference_pb2.GetLoadRequest())
    return None if load.running_sequences or load.waiting_requests else load


def descriptors(server: RunningServer) -> dict[int, int]:
    """Open descriptors of each process."""
    return {pid: psutil.Process(pid).num_fds() for pid in server.all_pids()}


@pytest.mark.timeout(280)
def test_every_call_ends_once_and_no_answer_depends_on_the_others() -> None:
    rng = random.Random(11)
    options = (
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        "--num-blocks",
        "72",
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "96",
    )
    with running_server(*options, "--max-model-len", "512") as server:
        with grpc.insecure_channel(server.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            vocab = stub.GetModel(inference_pb2.GetModelRequest()).model.vocabulary_size
        made = shapes(rng, vocab)
        golden = [Call(index, "read", 0) for index in range(SHAPES)]
        asyncio.run(storm(server.address, made, golden, 1))
        wait_until(lambda: idle(server.address), 5, "idle after the golden run")
        baseline = descriptors(server)

        behaviours = ["read"] * 5 + ["cancel", "deadline", "stall"]
        calls = [Call(rng.randrange(SHAPES), rng.choice(behaviours), rng.randrange(0, 24)) for _ in range(REQUESTS)]
        asyncio.run(storm(server.address, made, calls, CONCURRENCY))

        wait_until(lambda: idle(server.address), 5, "idle after the storm")
        load = idle(server.address)
        assert load is not None and load.kv_cache_usage == 0
        wait_until(
            lambda: all(n <= baseline[pid] + 4 for pid, n in descriptors(server).items()), 10, "descriptors at baseline"
        )

    for call in calls:
        reference = golden[call.shape].tokens
        assert call.tokens == reference[: len(call.tokens)], f"shape {call.shape} ({call.behaviour})"
        if call.behaviour == "read":
            assert (call.code, call.finish) == (grpc.StatusCode.OK, generation_pb2.FINISH_REASON_LENGTH)
            assert len(call.tokens) == made[call.shape][1]
        else:
            assert call.code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
