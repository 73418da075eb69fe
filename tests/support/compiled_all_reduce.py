"""Compiles the kernels of `all_reduce`, and the norm's own, for a card that is not here.

    python -m tests.support.compiled_all_reduce 90

Prints one line of JSON per kernel: its resources, how many loads and stores its code has of which
kind, and how it takes a row's mean square.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from unittest import mock

import torch
import triton
from tests.support.compiled_kernels import compiling_for, resources

from headrace_kernels import card, rms_norm
from headrace_kernels.collectives import all_reduce
from headrace_kernels.collectives.all_reduce import Peers
from headrace_kernels.input_rounding import InputRounding

WORLD_SIZE = 4
SIZES = (4096, 8192)
# What the code must have: whole vectors between cards, and what any card may change looked at past
# the caches.
_INSTRUCTIONS = {
    "vector_loads": r"ld\.global\.v4\.b32",
    "vector_stores": r"st\.global\.v4\.b32",
    "sent": r"st\.relaxed\.sys\.global\.v4\.b32",
    "awaited": r"ld\.relaxed\.sys\.global\.v4\.b32",
    # Of all that touches memory, what stands before the wait for the kernel ahead.
    "touched_early": r"(?:ld|st)\.(?:relaxed\.sys\.)?global(?=.*griddepcontrol\.wait)",
    "waits": r"griddepcontrol\.wait",
}


# Of the sum of squares, in the order of the code.
_ARITHMETIC = r"\s(mul|fma|add|shfl|div|rsqrt)\.[\w.]*(?:f32|b32)\s"


def mean_squares(ptx: str) -> list[list[str]]:
    """The instructions of each mean square: from the first square to the root."""
    found = [match[1] for match in re.finditer(_ARITHMETIC, ptx)]
    roots = [place for place, name in enumerate(found) if name == "rsqrt"]
    firsts = [max(place for place, name in enumerate(found[:root]) if name == "mul") for root in roots]
    return [found[first : root + 1] for first, root in zip(firsts, roots, strict=True)]


def launch_all(dtype: torch.dtype, rank: int, roundings: list[InputRounding]) -> None:
    """Every way, for some numbers of tokens; rounded in each of these ways."""
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
        for num_tokens, rounding in itertools.product((1, 65, 256), roundings):
            x = torch.empty(num_tokens, size, dtype=dtype)
            all_reduce.all_reduce_rounded_add_rms_norm(x, x.clone(), weight, 1e-5, rounding, peers)
            rms_norm.rounded_add_rms_norm(x, x.clone(), weight, 1e-5, rounding)


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret, "unset TRITON_INTERPRET"
    arch = int(sys.argv[1])
    # Cards multiply e4m3 from sm_89 on.
    roundings = [InputRounding(torch.int8)]
    if arch >= 89:
        roundings += [InputRounding(torch.float8_e4m3fn), InputRounding(torch.float8_e4m3fn, 128)]
    with (
        mock.patch.object(rms_norm, "uses_triton", lambda x: True),
        mock.patch.object(card, "launches_early", lambda device: arch >= 90),
        compiling_for(arch) as compiled,
    ):
        for each in (torch.bfloat16, torch.float16):
            # The rank is no constant: all ranks share what one has compiled.
            launch_all(each, 0, roundings)
            launch_all(each, 1, roundings)
    for kernel in {id(kernel): kernel for kernel in compiled}.values():
        found = {name: len(re.findall(words, kernel.asm["ptx"], re.DOTALL)) for name, words in _INSTRUCTIONS.items()}
        found["layout_changes"] = kernel.asm["ttgir"].count("convert_layout")
        found["size"] = next((size for size in SIZES if f"<1x{size}xf32" in kernel.asm["ttgir"]), 0)
        found["layout_changes"] -= kernel.asm["ttgir"].count("convert_layout %scale")
        said = {"mean_squares": mean_squares(kernel.asm["ptx"])}
        print(json.dumps(resources(kernel) | found | said))
