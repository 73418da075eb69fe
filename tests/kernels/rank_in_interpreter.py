"""One rank of a test of `all_reduce`, as a process: `python -m tests.kernels.rank_in_interpreter RANK WORLD MEMORY FOLDER`.

Ranks share an anonymous file, each sees it at addresses of its own, and kernels run in the interpreter: the same loads, stores, marks and waits as between cards. Inputs come as `inputs.pt`-like arrays in FOLDER, and results go there.
"""

from __future__ import annotations

import mmap
import pathlib
import sys

import numpy as np
import torch

from headrace_kernels import all_reduce
from headrace_kernels.all_reduce import PROGRAMS, Peers

CAPACITY_BYTES = 16 << 10
FLAG_BYTES = 8 * PROGRAMS * 4
RANK_BYTES = all_reduce.data_bytes(CAPACITY_BYTES) + FLAG_BYTES
# A call's way, by its name in the list of calls.
WAYS = {"one": all_reduce.one_shot, "two": all_reduce.two_shot}


def peers_in(memory: torch.Tensor, rank: int, world_size: int, calls: int) -> Peers:
    """The group over shared memory, uint8 [world_size * RANK_BYTES], after so many calls."""
    starts = [memory.data_ptr() + other * RANK_BYTES for other in range(world_size)]
    data = torch.tensor(starts)
    flags = data + all_reduce.data_bytes(CAPACITY_BYTES)
    return Peers(rank, world_size, data, flags, torch.full((PROGRAMS,), calls, dtype=torch.int32), CAPACITY_BYTES)


def main(rank: int, world_size: int, descriptor: int, folder: pathlib.Path) -> None:
    shared = mmap.mmap(descriptor, world_size * RANK_BYTES)
    memory = torch.frombuffer(shared, dtype=torch.uint8)
    cases = np.load(folder / "cases.npz")
    peers = peers_in(memory, rank, world_size, int(cases["calls"]))
    results = {}
    for index, way in enumerate(cases["ways"].tolist()):
        x = torch.from_numpy(cases[f"x{index}"][rank].copy())
        if way == "norm":
            residual = torch.from_numpy(cases[f"residual{index}"].copy())
            weight = torch.from_numpy(cases[f"weight{index}"].copy())
            results[f"out{index}"] = all_reduce.all_reduce_add_rms_norm(x, residual, weight, 1e-5, peers).numpy()
            results[f"residual{index}"] = residual.numpy()
        else:
            results[f"out{index}"] = WAYS[way](x, peers).numpy()
    np.savez(folder / f"rank{rank}.npz", **results)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4]))
