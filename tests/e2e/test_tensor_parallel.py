"""A server whose model is shared by two ranks gives the answers of one rank.

It does so under pressure too; settings that don't suit end the start.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import grpc
import psutil
import pytest
import torch
from tests.support.processes import wait_until
from tests.support.rpc import CALL_TIMEOUT_S, connected, generate, greedy, idle_load
from tests.support.running_server import RunningServer, refused, running_server

from headrace.v1 import inference_pb2, inference_pb2_grpc

STREAMS = 6
TOKENS = 60
# 20 blocks of 16 tokens; the streams together need 24 and more, so that one has to make room for
# another.
BLOCKS = 20
OPTIONS = ("--dtype", "fp32", "--device", "cpu", "--num-blocks", str(BLOCKS), "--tp", "2")
# A machine that is busy may look like a rank that hangs; then workers are replaced once more, and
# that is all.
PATIENCE = ("--watchdog-s", "60", "--max-worker-restarts", "50")


def prompt(index: int) -> list[int]:
    return [20 + index, 30, 40 + index]


@pytest.fixture(scope="module")
def pair() -> Iterator[RunningServer]:
    with running_server(*OPTIONS, *PATIENCE) as running:
        yield running
        wait_until(lambda: idle_load(running.address), 60, "no request and no block left")


@pytest.fixture(scope="module")
def golden(shared_server: RunningServer) -> list[list[int]]:
    """What one rank answers."""
    return [generate(shared_server.address, greedy(prompt(index), TOKENS)).tokens[0] for index in range(STREAMS)]


@dataclasses.dataclass
class Reader:
    """One open stream."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    preemptions: int = 0

    async def read(self, stub: inference_pb2_grpc.InferenceServiceStub, index: int) -> None:
        request = inference_pb2.GenerateRequest(spec=greedy(prompt(index), TOKENS))
        async for response in stub.Generate(request, timeout=CALL_TIMEOUT_S):
            self.tokens.extend(response.event.delta.token_ids)
            self.preemptions += response.event.done.ledger.preemptions


async def read_all(address: str) -> list[Reader]:
    """Reads all streams at the same time."""
    readers = [Reader() for _ in range(STREAMS)]
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await asyncio.gather(*(reader.read(stub, index) for index, reader in enumerate(readers)))
    return readers


def ranks(server: RunningServer) -> list[psutil.Process]:
    """Both worker processes."""
    found = server.descendants("headrace_backend.worker")
    return sorted(found, key=lambda process: process.cmdline()[process.cmdline().index("--rank") + 1])


# Real ranks are in tests/parallel/test_rank_processes, those of stages in a whole server in
# test_pipeline_parallel.
@pytest.mark.slow
def test_the_model_says_that_two_ranks_share_it(pair: RunningServer) -> None:
    assert len(ranks(pair)) == 2
    with connected(pair.address) as stub:
        assert stub.GetModel(inference_pb2.GetModelRequest()).model.device == "cpu x2"


# Cramped servers are in test_equal_answers, ranks whose steps are cut in tests/parallel.
@pytest.mark.slow
def test_answers_are_those_of_one_rank_under_pressure(pair: RunningServer, golden: list[list[int]]) -> None:
    # Requests that come one after the other, as on a busy machine, do not press each other out.
    for _ in range(10):
        readers = asyncio.run(read_all(pair.address))
        assert [reader.tokens for reader in readers] == golden
        if any(reader.preemptions for reader in readers):
            return
    raise AssertionError("nobody was preempted")


# Of stages that is in test_pipeline_parallel.
@pytest.mark.slow
def test_a_prefix_hit_gives_the_same_answer(pair: RunningServer, server: RunningServer) -> None:
    long = [17 * index % 4000 + 3 for index in range(150)]
    first, second = (generate(pair.address, greedy(long, 20)) for _ in range(2))
    assert second.done is not None and second.done.usage.cached_tokens == 144
    assert first.tokens == second.tokens == generate(server.address, greedy(long, 20)).tokens


def test_ranks_that_do_not_divide_the_model_end_the_start() -> None:
    ended, _ = refused("--tp", "3")
    assert ended.returncode == 2
    assert "tp is 3, which does not divide num_attention_heads 8; tp 1, 2, 4, 8 work" in ended.stderr


@pytest.mark.multi_gpu
@pytest.mark.skipif(not 2 <= torch.cuda.device_count() < 8, reason="needs two to seven CUDA GPUs")
def test_more_ranks_than_cards_end_the_start() -> None:
    ended, _ = refused("--tp", "8", "--device", "cuda")
    assert ended.returncode == 2
    found = torch.cuda.device_count()
    works = "tp 1, 2, 4 work" if found >= 4 else "tp 1, 2 work"
    reason = f"tp is 8, one GPU for each rank from cuda:0 on, and torch sees {found}; {works}"
    assert reason in ended.stdout + ended.stderr
