"""Compiles the kernels of recurrent layers for a card that is not here, as their launchers would.

    python -m tests.support.compiled_recurrence 90

prints one line of JSON per kernel that is different, after steps of many sizes.
"""

from __future__ import annotations

import contextlib
import json
import sys
from unittest import mock

import torch
import triton
from tests.support.compiled_kernels import compiling_for, resources

from headrace_kernels import card, triton_runtime
from headrace_kernels.output_gates import gate_heads, without_gates
from headrace_kernels.recurrence.delta_net import DeltaWeights, ProjectedTokens, delta_net
from headrace_kernels.recurrence.entries import RecurrentEntries
from headrace_kernels.recurrence.gated_delta import DeltaHeads
from headrace_kernels.recurrence.pending import line_elements, states_of

# As Qwen3.5 9B.
HEADS = DeltaHeads(16, 32, 128, 128)
KERNEL, NUM_ROWS = 4, 9
# Heads of the attention beside it: of queries, and of keys and values, and their elements.
QUERIES, KEYS_AND_VALUES, HEAD_DIM = 16, 8, 256


def step(num_tokens: int, num_entries: int, only_decodes: bool, num_drafts: int = 0) -> None:
    """All between a layer's projections once, and the gates of the attention beside it."""
    count, channels = HEADS.num_value_heads, HEADS.num_channels
    states = states_of(torch.zeros(NUM_ROWS, line_elements(HEADS, KERNEL, num_drafts)), HEADS, KERNEL)
    columns = (torch.zeros(size, dtype=torch.int32) for size in (num_entries + 1, num_entries, num_entries))
    sizes = (channels, count * HEADS.value_dim, count, count)
    tokens = ProjectedTokens(*torch.zeros(num_tokens, sum(sizes), dtype=torch.bfloat16).split(sizes, dim=1))
    weights = DeltaWeights(
        torch.zeros(channels, KERNEL, dtype=torch.bfloat16),
        torch.zeros(count),
        torch.zeros(count),
        torch.zeros(HEADS.value_dim, dtype=torch.bfloat16),
        1e-6,
    )
    drafts = torch.zeros(num_entries, dtype=torch.int32)
    delta_net(tokens, weights, states, RecurrentEntries(*columns, only_decodes, drafts), HEADS)
    projected = torch.zeros(num_tokens, (2 * QUERIES + KEYS_AND_VALUES) * HEAD_DIM, dtype=torch.bfloat16)
    qkv, gates = without_gates(projected, QUERIES, HEAD_DIM)
    gate_heads(qkv[:, : QUERIES * HEAD_DIM].contiguous(), gates)


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret, "unset TRITON_INTERPRET"
    arch = int(sys.argv[1])
    with contextlib.ExitStack() as stack:
        # Operations take their kernels for CPU tensors too, which nothing is launched on.
        stack.enter_context(mock.patch.dict(triton_runtime._state, forced=True))
        for ability in ("has_warpgroup_products", "launches_early"):
            stack.enter_context(mock.patch.object(card, ability, lambda device: arch >= 90))
        compiled = stack.enter_context(compiling_for(arch))
        for tokens, rows in ((1, 1), (2, 2), (17, 3), (1024, 16), (16, 16), (40, 40)):
            for only_decodes in (False, True) if tokens == rows else (False,):
                step(tokens, rows, only_decodes)
        for tokens, rows, only_decodes in ((9, 1, True), (32, 8, True), (40, 3, False), (1024, 16, False)):
            step(tokens, rows, only_decodes, num_drafts=8)
    for kernel in {id(kernel): kernel for kernel in compiled}.values():
        print(json.dumps(resources(kernel)))
