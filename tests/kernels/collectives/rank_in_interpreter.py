"""One rank of a test of `all_reduce`, as a process.

    python -m tests.kernels.collectives.rank_in_interpreter RANK WORLD MEMORY FOLDER

Ranks share an anonymous file, each sees it at addresses of its own, and kernels run in the
interpreter: the same loads, stores, marks and waits as between cards. What is to be done comes as
`cases.pt` in FOLDER, and results go there.
"""

from __future__ import annotations

import dataclasses
import mmap
import pathlib
import sys
import time
from typing import Any

import numpy as np
import torch
from tests.support import quick_interpreter
from torch import Tensor

from headrace_kernels.collectives import all_reduce
from headrace_kernels.collectives.all_reduce import Peers
from headrace_kernels.collectives.words import SENTINEL
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rounded_tokens import RoundedTokens

# A call's way, by its name in the list of calls.
WAYS = {"one": all_reduce.one_shot, "two": all_reduce.two_shot}
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: every rank's tensor, [world_size, ...], and the norm that all ranks share."""

    way: str
    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    # Of the norm, to 8 bits.
    rounding: InputRounding | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """The ranks' programs and memory: few and little.

    Calls are quick then, and their limits near.
    """

    programs: int = 4
    capacity_bytes: int = 32 << 10

    def peers(self, memory: Tensor, rank: int, world_size: int) -> Peers:
        """The group over shared memory, uint8 [world_size * memory_bytes].

        This process's launches are as it is set.
        """
        all_reduce.PROGRAMS = self.programs
        num_bytes = all_reduce.memory_bytes(self.capacity_bytes, world_size)
        starts = [memory.data_ptr() + other * num_bytes for other in range(world_size)]
        return Peers.of(starts, rank, self.capacity_bytes, memory.device)


# What a rank gets, rounded tokens or not, and its residual stream afterwards.
Result = tuple[Tensor | RoundedTokens, Tensor | None]


def result(case: Case, peers: Peers) -> Result:
    """Returns what one call gives a rank."""
    residual = None if case.residual is None else case.residual.clone()
    return called(case, case.x[peers.rank].clone(), residual, peers)


def called(case: Case, x: Tensor, residual: Tensor | None, peers: Peers) -> Result:
    """Makes the call with tensors of this rank's, of which it changes the residual stream."""
    if residual is None or case.weight is None:
        return WAYS[case.way](x, peers), None
    if case.rounding is not None:
        about = (case.weight, EPS, case.rounding, peers)
        return all_reduce.all_reduce_rounded_add_rms_norm(x, residual, *about), residual
    return all_reduce.all_reduce_add_rms_norm(x, residual, case.weight, EPS, peers), residual


def wait_politely(interpreter: Any) -> None:
    """Lets others run after a look in vain.

    They may be the ones that are waited for: on a busy machine two ranks that spin took minutes for
    what takes seconds.
    """
    look = interpreter.InterpreterBuilder.create_masked_load

    def create_masked_load(builder: Any, *arguments: Any) -> Any:
        found = look(builder, *arguments)
        if found.data.dtype == np.int32 and (found.data == SENTINEL).any():
            time.sleep(1e-5)
        return found

    interpreter.InterpreterBuilder.create_masked_load = create_masked_load


def main(rank: int, world_size: int, memory: str, folder: pathlib.Path) -> None:
    interpreter = sys.modules["triton.runtime.interpreter"]
    quick_interpreter.install(interpreter)
    wait_politely(interpreter)
    setting, cases = torch.load(folder / "cases.pt", weights_only=False)
    with open(memory, "r+b") as file:
        shared = mmap.mmap(file.fileno(), world_size * all_reduce.memory_bytes(setting.capacity_bytes, world_size))
    peers = setting.peers(torch.frombuffer(shared, dtype=torch.uint8), rank, world_size)
    torch.save([result(case, peers) for case in cases], folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4]))
