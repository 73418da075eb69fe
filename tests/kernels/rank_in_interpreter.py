"""One rank of a test of `all_reduce`, as a process: `python -m tests.kernels.rank_in_interpreter RANK WORLD MEMORY FOLDER`.

Ranks share an anonymous file, each sees it at addresses of its own, and kernels run in the interpreter: the same loads, stores, marks and waits as between cards. What is to be done comes as `cases.pt` in FOLDER, and results go there.
"""

from __future__ import annotations

import dataclasses
import mmap
import pathlib
import sys

import torch
from torch import Tensor

from headrace_kernels import all_reduce
from headrace_kernels.all_reduce import PROGRAMS, Peers, Slots

CAPACITY_BYTES = 16 << 10
_FLAG_BYTES = 8 * PROGRAMS * 4
# A call's way, by its name in the list of calls.
WAYS = {"push": all_reduce.push, "two": all_reduce.two_shot}
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: every rank's tensor, [world_size, ...], and with the norm what is the same on all ranks."""

    way: str
    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the ranks find: calls of two shots that were before; the sizes of pushes, small so that they are quick and their limits near."""

    calls: int = 0
    push_programs: int = 4
    slot_bytes: int = 16 << 10

    def take(self) -> None:
        """Has this process's launches keep to it."""
        all_reduce.PUSH_PROGRAMS, all_reduce.SLOT_BYTES = self.push_programs, self.slot_bytes


def rank_bytes(world_size: int) -> int:
    """Of the file, for each rank: tensors and sums, flags, slots. As `Setting.take` has it."""
    return all_reduce.data_bytes(CAPACITY_BYTES) + _FLAG_BYTES + all_reduce.slot_bytes(world_size)


def peers_in(memory: Tensor, rank: int, world_size: int, calls: int) -> Peers:
    """The group over shared memory, uint8 [world_size * rank_bytes(world_size)], after so many calls."""
    starts = [memory.data_ptr() + other * rank_bytes(world_size) for other in range(world_size)]
    data = torch.tensor(starts)
    flags = data + all_reduce.data_bytes(CAPACITY_BYTES)
    slots = Slots.of((flags + _FLAG_BYTES).tolist(), rank, memory.device)
    return Peers(
        rank, world_size, data, flags, torch.full((PROGRAMS,), calls, dtype=torch.int32), CAPACITY_BYTES, slots
    )


def result(case: Case, peers: Peers) -> tuple[Tensor, Tensor | None]:
    """What a rank gets, and its residual stream afterwards."""
    x = case.x[peers.rank].clone()
    if case.residual is None or case.weight is None:
        return WAYS[case.way](x, peers), None
    residual = case.residual.clone()
    return all_reduce.all_reduce_add_rms_norm(x, residual, case.weight, EPS, peers), residual


def main(rank: int, world_size: int, descriptor: int, folder: pathlib.Path) -> None:
    setting, cases = torch.load(folder / "cases.pt", weights_only=False)
    setting.take()
    shared = mmap.mmap(descriptor, world_size * rank_bytes(world_size))
    memory = torch.frombuffer(shared, dtype=torch.uint8)
    peers = peers_in(memory, rank, world_size, setting.calls)
    torch.save([result(case, peers) for case in cases], folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4]))
