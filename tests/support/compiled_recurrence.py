"""Compiles the kernels of recurrent layers for a card that is not here, as their launchers would.

    python -m tests.support.compiled_recurrence 90

prints one line of JSON per kernel that is different, after steps of many sizes.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch
import triton
from tests.support.compiled_kernels import compiling_for, resources

from headrace_kernels import triton_runtime
from headrace_kernels.recurrence.convolution import causal_convolution
from headrace_kernels.recurrence.entries import RecurrentEntries
from headrace_kernels.recurrence.gated_delta import DeltaGates, DeltaHeads, gated_delta

# As Qwen3.5 9B.
HEADS = DeltaHeads(16, 32, 128, 128)
KERNEL, NUM_ROWS = 4, 9


def step(num_tokens: int, num_entries: int) -> None:
    """Every operation once."""
    count, channels = HEADS.num_value_heads, HEADS.num_channels
    states = torch.zeros(NUM_ROWS, count * HEADS.key_dim * HEADS.value_dim + (KERNEL - 1) * channels)
    matrices, tails = states.tensor_split((count * HEADS.key_dim * HEADS.value_dim,), dim=1)
    columns = (num_entries + 1, num_entries, num_entries)
    entries = RecurrentEntries(*(torch.zeros(size, dtype=torch.int32) for size in columns))
    x, weight = torch.zeros(num_tokens, channels, dtype=torch.bfloat16), torch.zeros(channels, KERNEL)
    mixed = causal_convolution(x, weight.bfloat16(), tails.unflatten(1, (KERNEL - 1, channels)), entries)
    correction, decay = torch.zeros(num_tokens, 2 * count, dtype=torch.bfloat16).tensor_split(2, dim=1)
    gates = DeltaGates(correction, decay, torch.zeros(count), torch.zeros(count))
    gated_delta(mixed, gates, matrices.unflatten(1, (count, HEADS.key_dim, HEADS.value_dim)), entries, HEADS)


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret, "unset TRITON_INTERPRET"
    # Operations take their kernels for CPU tensors too, which nothing is launched on.
    with mock.patch.dict(triton_runtime._state, forced=True), compiling_for(int(sys.argv[1])) as compiled:
        for tokens, rows in ((1, 1), (2, 2), (17, 3), (1024, 16), (16, 16)):
            step(tokens, rows)
    for kernel in {id(kernel): kernel for kernel in compiled}.values():
        print(json.dumps(resources(kernel)))
