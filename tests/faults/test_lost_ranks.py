"""One rank of several is killed, stopped or runs out of memory while streams are open.

All ranks end for one reason that names it, all are started again, and streams go on. Nothing is
left, also no memory on cards.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import grpc
import psutil
import pytest
import torch
from benchmarks.gpu_watch import GpuMemory
from tests.support.processes import alive, wait_until
from tests.support.rpc import CALL_TIMEOUT_S, greedy, idle_load
from tests.support.running_server import ROOT, RunningServer, environment, running_server

from headrace.v1 import inference_pb2, inference_pb2_grpc

STREAMS = 6
WATCHDOG_S = 15
# A machine that is busy may look like a rank that hangs; then workers are replaced once more, and
# that is all.
PATIENCE = ("--watchdog-s", str(WATCHDOG_S), "--max-worker-restarts", "50")
# Nearly the demo model's context: needs more memory at once than all that was computed before.
LONG_PROMPT = [17 * index % 4000 + 3 for index in range(1900)]
LONG_PROMPTS = 4
# Libraries and drivers keep a little more or less from one life to the next; the cache is a GiB of
# each.
CARD_SLACK_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of the ranks, and how many tokens keep them busy while one is harmed."""

    device: str
    tp: int
    tokens: int
    options: tuple[str, ...]
    # Pipeline stages, of `tp` ranks each.
    pp: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return self.pp * self.tp

    @property
    def victim(self) -> int:
        """The last rank."""
        return self.num_ranks - 1


CPU = Place("cpu", 2, 60, ("--dtype", "fp32", "--num-blocks", "640"))
STAGES = dataclasses.replace(CPU, tp=1, pp=2)
CARDS = Place(
    "cuda",
    min(torch.cuda.device_count(), 4),
    1800,
    (
        "--dtype",
        "bf16",
        "--num-blocks",
        "65536",
        "--max-num-seqs",
        "16",
        "--graph-sizes",
        "1,2,4,8",
        "--max-num-batched-tokens",
        "4096",
    ),
)
NEEDS_CARDS = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several CUDA GPUs"),
    pytest.mark.timeout(900),
]


def used_bytes(place: Place) -> list[int]:
    """Memory in use on each card that ranks are on."""
    if place.device == "cpu":
        return []
    cards = [GpuMemory(index) for index in range(place.tp)]
    used = [card.used_bytes for card in cards]
    for card in cards:
        card.close()
    assert None not in used, "no NVML, no figures"
    return [figure or 0 for figure in used]


@contextlib.contextmanager
def unchanged_cards(place: Place) -> Iterator[None]:
    """Afterwards all cards have as much memory in use as before."""
    before = used_bytes(place)
    yield

    def is_given_back() -> bool:
        return all(now < used + CARD_SLACK_BYTES for now, used in zip(used_bytes(place), before, strict=True))

    wait_until(is_given_back, 30, "the cards' memory given back")


@dataclasses.dataclass
class Shared:
    """A server for all tests, and what it answers undisturbed."""

    place: Place
    server: RunningServer
    expected: list[list[int]]


# Ranks that are lost are named in tests/parallel/test_rank_processes, and what a service and its
# streams make of a lost worker is in test_processes_die.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(CPU, marks=pytest.mark.slow),
        pytest.param(STAGES, marks=pytest.mark.slow),
        pytest.param(CARDS, marks=NEEDS_CARDS),
    ],
    ids=["cpu", "stages", "cards"],
)
def shared(request: pytest.FixtureRequest) -> Iterator[Shared]:
    place: Place = request.param
    options = ("--device", place.device, "--tp", str(place.tp), "--pp", str(place.pp), *place.options, *PATIENCE)
    with unchanged_cards(place), running_server(*options) as server:
        expected = asyncio.run(read_all(server.address, place.tokens))
        yield Shared(place, server, [reader.tokens for reader in expected])
        wait_until(lambda: idle_load(server.address), 60, "no request and no block left")


def ranks(server: RunningServer) -> list[int]:
    """Worker processes by rank."""
    found = server.descendants("headrace_backend.worker")
    by_rank = sorted(found, key=lambda process: int(process.cmdline()[process.cmdline().index("--rank") + 1]))
    return [process.pid for process in by_rank]


@dataclasses.dataclass
class Reader:
    """One open stream."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    resumed: int = 0
    is_done: bool = False

    async def read(self, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        """To the end; no token may be missing, none sent twice."""
        request = inference_pb2.GenerateRequest(spec=greedy(self.prompt, self.max_tokens))
        async for response in stub.Generate(request, timeout=CALL_TIMEOUT_S):
            if response.event.HasField("delta"):
                assert response.event.delta.first_token_index == len(self.tokens)
                self.tokens.extend(response.event.delta.token_ids)
            self.resumed += response.event.HasField("resumed")
            self.is_done |= response.event.HasField("done")


async def read_all(
    address: str, tokens: int, disturb: Callable[[], None] | None = None, further: int = 0
) -> list[Reader]:
    """Streams to their ends.

    Once some have tokens `disturb` is called, then a short prompt and so many long ones come as
    well.
    """
    readers = [Reader([20 + index, 30, 40 + index], tokens) for index in range(STREAMS)]
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        tasks = [asyncio.create_task(reader.read(stub)) for reader in readers]
        if disturb is not None:
            while not any(len(reader.tokens) >= 5 for reader in readers):
                await asyncio.sleep(0.002)
            await asyncio.to_thread(disturb)
            readers.append(Reader([7, 8, 9], 8))
        readers += [Reader([number + 3, *LONG_PROMPT], 8) for number in range(further)]
        tasks += [asyncio.create_task(reader.read(stub)) for reader in readers[STREAMS:]]
        await asyncio.gather(*tasks)
    return readers


def check_loss(shared: Shared, disturb: Callable[[list[int]], None], said: str, further: int = 0) -> str:
    """Has something happen to a rank under streams, and looks at all that follows.

    Returns what the log says of it.
    """
    # Readers that a busy machine holds up do not see that all has been said before anything
    # happens: then again.
    for _ in range(5):
        readers, lost = lose(shared, disturb, said, further)
        if any(reader.resumed for reader in readers):
            return lost
    raise AssertionError("no stream was open when it happened")


def lose(shared: Shared, disturb: Callable[[list[int]], None], said: str, further: int) -> tuple[list[Reader], str]:
    """One loss: who read meanwhile, and what the log says."""
    place, server = shared.place, shared.server
    wait_until(
        lambda: len(ranks(server)) == place.num_ranks and idle_load(server.address), 120, "all ranks, and no request"
    )
    old, before, num_lines = ranks(server), used_bytes(place), len(server.lines)
    readers = asyncio.run(read_all(server.address, place.tokens, lambda: disturb(old), further))
    lost = wait_until(
        lambda: [line for line in server.lines[num_lines:] if "worker lost" in line], 120, "a lost worker"
    )
    print(f"{place.device} x{place.num_ranks}: {lost[0]}")
    assert said in lost[0]
    wait_until(lambda: not alive(old), 60, "the old ranks gone")
    assert all(reader.is_done and len(reader.tokens) == reader.max_tokens for reader in readers)
    # What the lost ranks held is free again, before the next ones have as much.
    assert all(now < used + CARD_SLACK_BYTES for now, used in zip(used_bytes(place), before, strict=True))
    if place.device == "cpu":
        # In bf16 a prompt that is computed again may be rounded to another token.
        assert [reader.tokens for reader in readers[:STREAMS]] == shared.expected
    return readers, lost[0]


def test_a_killed_rank(shared: Shared) -> None:
    place = shared.place
    check_loss(
        shared,
        lambda pids: os.kill(pids[place.victim], signal.SIGKILL),
        f"worker {place.victim} ended with signal 9",
    )


def test_a_stopped_rank(shared: Shared) -> None:
    place = shared.place
    said = f"no progress in a step for {WATCHDOG_S} s: the others wait for rank {place.victim}"
    check_loss(shared, lambda pids: os.kill(pids[place.victim], signal.SIGSTOP), said)


def narrow(pid: int) -> None:
    """No further memory for a process."""
    process = psutil.Process(pid)
    process.rlimit(resource.RLIMIT_AS, (process.memory_info().vms // 2,) * 2)


@contextlib.contextmanager
def full_card(index: int) -> Iterator[None]:
    """Somebody else holds all memory of a card that was free."""
    command = [sys.executable, "-m", "tests.support.held_card", str(index)]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline().startswith("holds ")
            yield
        finally:
            holder.kill()


# A rank on a card has all memory that it needs once it has started, as the next test shows.
@pytest.mark.slow
@pytest.mark.parametrize("shared", [CPU, STAGES], ids=["cpu", "stages"], indirect=True)
def test_a_rank_without_memory(shared: Shared) -> None:
    place = shared.place
    check_loss(shared, lambda pids: narrow(pids[place.victim]), f"worker {place.victim}: ", LONG_PROMPTS)


@pytest.mark.parametrize("shared", [pytest.param(CARDS, marks=NEEDS_CARDS)], ids=["cards"], indirect=True)
def test_a_card_that_somebody_else_fills_ends_no_rank(shared: Shared) -> None:
    place, server = shared.place, shared.server
    wait_until(
        lambda: len(ranks(server)) == place.num_ranks and idle_load(server.address), 120, "all ranks, and no request"
    )
    started, num_lines = ranks(server), len(server.lines)
    with full_card(place.victim):
        readers = asyncio.run(read_all(server.address, place.tokens, lambda: None, LONG_PROMPTS))
    assert all(reader.is_done and len(reader.tokens) == reader.max_tokens for reader in readers)
    assert ranks(server) == started
    assert not any("worker lost" in line for line in server.lines[num_lines:])
