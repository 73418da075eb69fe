"""Compiles the kernels of `all_reduce` for a card that this machine does not have: `python -m tests.support.compiled_all_reduce 90`.

Prints one line of JSON per kernel: its resources, and how many loads and stores its code has of which kind.
"""

from __future__ import annotations

import json
import re
import sys

import torch
import triton
from tests.support.compiled_kernels import compiling_for, resources

from headrace_kernels import all_reduce
from headrace_kernels.all_reduce import Peers

WORLD_SIZE = 4
SIZES = (4096, 8192)
# What the code must have: whole vectors between cards, and what any card may change looked at past the caches.
_INSTRUCTIONS = {
    "vector_loads": r"ld\.global\.v4\.b32",
    "vector_stores": r"st\.global\.v4\.b32",
    "sent": r"st\.relaxed\.sys\.global\.v4\.b32",
    "awaited": r"ld\.relaxed\.sys\.global\.v4\.b32",
}


def launch_all(dtype: torch.dtype, rank: int) -> None:
    """Every way, for some numbers of tokens."""
    # Addresses of a card are no smaller.
    starts = [(1 << 40) + (rank << 30) for rank in range(WORLD_SIZE)]
    peers = Peers.of(starts, rank, 16 << 20, torch.device("cpu"))
    for size in SIZES:
        weight = torch.empty(size, dtype=dtype)
        for num_tokens in (1, 2, 7, 16):
            x = torch.empty(num_tokens, size, dtype=dtype)
            all_reduce.one_shot(x, peers)
            all_reduce.two_shot(x, peers)
            all_reduce.all_reduce_add_rms_norm(x, x.clone(), weight, 1e-5, peers)


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret, "unset TRITON_INTERPRET"
    with compiling_for(int(sys.argv[1])) as compiled:
        for each in (torch.bfloat16, torch.float16):
            # The rank is no constant: all ranks share what one has compiled.
            launch_all(each, 0)
            launch_all(each, 1)
    for kernel in {id(kernel): kernel for kernel in compiled}.values():
        found = {name: len(re.findall(words, kernel.asm["ptx"])) for name, words in _INSTRUCTIONS.items()}
        found["layout_changes"] = kernel.asm["ttgir"].count("convert_layout")
        print(json.dumps(resources(kernel) | found))
