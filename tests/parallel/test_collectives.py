"""Collectives between processes.

Gloo's on a CPU; on cards every way of adding up, checked and timed by the benchmark itself, and
models shared by cards against one card.
"""

from __future__ import annotations

import gc
import pathlib
import re
import sys
import weakref
from collections.abc import Callable

import psutil
import pytest
import torch
import torch.distributed as dist
from benchmarks.bench_collectives import results
from tests.models.checkpoints import write_checkpoint
from tests.parallel.rank_group import ranks
from tests.worker.driver import Entry, admission, step

from headrace_backend.parallel.collectives import Collectives
from headrace_backend.parallel.errors import PeerLost
from headrace_backend.parallel.gloo import GlooCollectives
from headrace_backend.parallel.nccl import NcclCollectives

needs_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several CUDA GPUs")


# The widths of the norms that a tensor of so many bytes has whole rows of.
WAYS_ON_A_CPU = {
    8192: ("all_reduce", "norm_4096", "norm_4096_apart"),
    1 << 16: ("all_reduce", "norm_4096", "norm_4096_apart", "norm_8192", "norm_8192_apart"),
}


# Ranks of a model add up through Gloo in test_rank_processes; here the benchmark itself is tried.
@pytest.mark.slow
def test_ranks_on_a_cpu_add_up() -> None:
    found = list(results(2, "cpu", [8192, 1 << 16]))
    assert [(result["bytes"], result["way"]) for result in found] == [
        (num_bytes, way) for num_bytes in (8192, 1 << 16) for way in WAYS_ON_A_CPU[num_bytes]
    ]


class Gathered(GlooCollectives):
    """Without the sockets."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts = parts

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_on_a_cpu_are_rounded_once(dtype: torch.dtype) -> None:
    # Between the first number and the next of its type lie two of the others.
    first = 2 / torch.finfo(dtype).eps
    parts = [torch.tensor([number], dtype=dtype) for number in (first, 1.0, 1.0, 0.0)]
    found = Gathered(parts).all_reduce(parts[0])
    if dtype == torch.float32:
        # There is no wider type: rounded at each addition, in the order of the ranks.
        assert found.item() == first
    else:
        assert found.item() == first + 2 and (parts[0] + parts[1] + parts[2]).item() == first
    assert found.dtype == dtype


def unconnected(kind: type[Collectives], on_enter: Callable[[], None] = lambda: None) -> Collectives:
    """A rank without a group."""
    collectives = kind.__new__(kind)
    collectives.rank, collectives.world_size, collectives.device = 0, 2, torch.device("cpu")
    vars(collectives)["_on_enter"] = on_enter
    return collectives


@pytest.mark.parametrize(
    ("operation", "more"),
    [("all_reduce", ()), ("begin_all_reduce", ()), ("all_gather", ()), ("all_to_all", ([1, 1], torch.zeros(2, 1, 3)))],
)
def test_an_error_of_nccl_blames_no_rank(
    monkeypatch: pytest.MonkeyPatch, operation: str, more: tuple[object, ...]
) -> None:
    def fail(*arguments: object, async_op: bool = False) -> None:
        raise dist.DistBackendError("NCCL error: remote process exited")

    monkeypatch.setattr(dist, "all_reduce", fail)
    monkeypatch.setattr(dist, "all_gather_into_tensor", fail)
    monkeypatch.setattr(dist, "all_to_all_single", fail)
    with pytest.raises(PeerLost, match="the ranks' connection broke: NCCL error: remote process exited"):
        getattr(unconnected(NcclCollectives), operation)(torch.zeros(2, 3), *more)


class BegunWork:
    """Work of an operation on another stream: it ends when it is waited for."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.is_done = False

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        self.is_done = True


@pytest.mark.parametrize(
    ("kind", "operation", "error"),
    [
        (NcclCollectives, "all_reduce", dist.DistBackendError("NCCL error: remote process exited")),
        (GlooCollectives, "all_gather_into_tensor", RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed")),
    ],
)
def test_an_error_of_a_begun_all_reduce_shows_when_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, kind: type[Collectives], operation: str, error: Exception
) -> None:
    entered: list[None] = []
    monkeypatch.setattr(dist, operation, lambda *_, async_op: BegunWork(error))
    pending = unconnected(kind, lambda: entered.append(None)).begin_all_reduce(torch.zeros(2, 3))
    assert len(entered) == 1, "who watches sees it begin"
    with pytest.raises(PeerLost, match=re.escape(str(error))):
        pending.wait()


def test_what_nccl_adds_up_is_held_until_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    work = BegunWork(None)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, async_op: work if async_op else None)
    partial = torch.zeros(2, 3)
    held, place = weakref.ref(partial), partial.data_ptr()
    pending = unconnected(NcclCollectives).begin_all_reduce(partial)
    del partial
    gc.collect()
    assert held() is not None and not work.is_done
    total = pending.wait()
    assert work.is_done and total.data_ptr() == place
    del pending, total
    gc.collect()
    assert held() is None, "held longer than needed"


def test_a_rank_that_fails_ends_the_others(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "rank"
    program.write_text('#!/bin/sh\ncase "$*" in *"--seat 1,"*) exit 3;; esac\nexec sleep 600\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(SystemExit, match="rank 1 failed with 3"):
        list(results(3, "cpu", [8192]))


def check_sockets(processes: list[int]) -> None:
    """All are this machine's alone; none is NCCL's own for whoever asks, which is off."""
    found = [connection for pid in processes for connection in psutil.Process(pid).net_connections("inet")]
    assert {connection.laddr.ip for connection in found} <= {"127.0.0.1", "::1"}
    assert 28028 not in {connection.laddr.port for connection in found}


@pytest.mark.multi_gpu
@needs_cards
def test_cards_add_up_in_every_way() -> None:
    sizes = [8192, 1 << 17, 1 << 20, 1 << 24, 1 << 26]
    found = list(results(torch.cuda.device_count(), "cuda", sizes))
    assert {result["way"] for result in found} >= {
        "nccl",
        "one_shot",
        "two_shot",
        "norm_4096",
        "norm_8192",
        "norm_8192_apart",
        "norm_4096_rounded",
        "norm_8192_rounded",
        "norm_8192_rounded_apart",
    }
    assert {result["bytes"] for result in found} == set(sizes)


@pytest.mark.multi_gpu
@needs_cards
# Two groups start, and each compiles its kernels where none are cached.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("graph_sizes", ["off", "1,2,4,8"])
async def test_two_cards_draw_the_tokens_of_one(tmp_path: pathlib.Path, graph_sizes: str) -> None:
    write_checkpoint(tmp_path / "llama", "llama-wide")
    prompt = [17 * index % 89 + 3 for index in range(30)]
    steps = [step([Entry(0, 0, prompt, (0,))], [admission(0)], {0: list(range(16))})]
    steps += [step([Entry(0, 30 + i, None, (0,), i + 1)], step_id=i + 2) for i in range(12)]
    tokens = {}
    for tp in (1, 2):
        async with ranks(tmp_path / "llama", tp, device="cuda", graph_sizes=graph_sizes, num_blocks=64) as group:
            await group.group.wait_ready()
            check_sockets(group.processes)
            found = await group.answered(steps)
            tokens[tp] = [result.tokens.tolist() for result in found]
            assert not any(result.late_work for result in found)
    assert tokens[1] == tokens[2]
