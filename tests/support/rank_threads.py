"""Several ranks as threads of one process, without sockets.

Layers and collectives are those of ranks in processes.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from headrace_backend.parallel.collectives import Collectives
from headrace_backend.weights.placement import Shard
from headrace_kernels.collectives.all_reduce import all_reduce_reference

_T = TypeVar("_T")
_LIMIT_S = 240.0


class ThreadGroup:
    """What the ranks share."""

    def __init__(self, world_size: int) -> None:
        self.parts: list[torch.Tensor] = [torch.empty(0)] * world_size
        self.barrier = threading.Barrier(world_size)


class ThreadCollectives(Collectives):
    """One rank's end: gathers through memory, adds as gloo's does."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank, self.world_size = rank, len(group.parts)
        self.device = torch.device("cpu")
        self._group = group
        self.num_calls = 0

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return all_reduce_reference(self.all_gather(partial).unbind())

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self._group.parts[self.rank] = part
        self._group.barrier.wait(_LIMIT_S)
        assert len({(tuple(other.shape), other.dtype) for other in self._group.parts}) == 1, "ranks disagree"
        gathered = torch.stack(self._group.parts)
        self._group.barrier.wait(_LIMIT_S)
        return gathered


def on_ranks(world_size: int, body: Callable[[Shard], _T]) -> list[_T]:
    """What `body` returns on each rank. A rank that raises ends the others."""
    group = ThreadGroup(world_size)

    def run(rank: int) -> _T:
        try:
            return body(Shard(rank, world_size, ThreadCollectives(group, rank)))
        except BaseException:
            group.barrier.abort()
            raise

    with concurrent.futures.ThreadPoolExecutor(world_size) as pool:
        ranks = [pool.submit(run, rank) for rank in range(world_size)]
        concurrent.futures.wait(ranks)
    errors = [error for rank in ranks if (error := rank.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [rank.result() for rank in ranks]
