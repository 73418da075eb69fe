"""Elementwise kernels are compiled for a model, not for a step.

Once few and many tokens have been seen, no number of tokens and no place of a column compiles
anew.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.kernel_case import Numbers, kernels_on

from headrace_kernels.attention.kv_cache import copy_blocks
from headrace_kernels.attention.rope import rope_rows
from headrace_kernels.attention.rope_frequencies import default_frequencies, rope_table
from headrace_kernels.attention.rope_kv import rope_and_write_kv
from headrace_kernels.embedding import embedding
from headrace_kernels.finite_rows import finite_rows
from headrace_kernels.rms_norm import add_rms_norm, rms_norm
from headrace_kernels.step_inputs import build_step_inputs, scatter_int32, store_last_tokens
from headrace_kernels.swiglu import swiglu
from headrace_kernels.triton_runtime import compilation_count

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 192, 3, 2, 64, 16


class Model:
    """What stays from step to step."""

    def __init__(self) -> None:
        numbers = self.numbers = Numbers("cuda", torch.bfloat16)
        self.weight, self.embeddings = numbers.randn(HIDDEN), numbers.randn(50, HIDDEN)
        self.table = rope_table(default_frequencies(HEAD_DIM, 10_000.0), 64).cuda()
        self.kv_cache = numbers.randn(100, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.block_tables = numbers.integers(0, 100, 300, 4, dtype=torch.int32)
        self.last_tokens = numbers.integers(0, 50, 300, dtype=torch.int32)

    def column(self, size: int, low: int, high: int, offset: int) -> torch.Tensor:
        """Random int32 at an offset of a larger piece."""
        return self.numbers.integers(low, high, offset + size, dtype=torch.int32)[offset:]

    def step(self, size: int, offset: int) -> None:
        """Every operation once, with so many tokens and columns at such an offset."""
        ids, positions, slots = torch.empty(3, size + offset, dtype=torch.int64, device="cuda")[:, offset:]
        columns = [self.column(size, *bounds, offset) for bounds in ((-1, 50), (-1, 7), (0, 64))]
        rows = self.column(7, 0, 300, offset)
        build_step_inputs(
            *columns, rows, self.last_tokens, self.block_tables[None], BLOCK_SIZE, ids, positions, slots[None]
        )
        residual = embedding(ids, self.embeddings)
        normed = add_rms_norm(rms_norm(residual, self.weight, 1e-5), residual, self.weight, 1e-5)
        qkv = self.numbers.randn(size, HEADS + 2 * KV_HEADS, HEAD_DIM)
        rope_and_write_kv(qkv, rope_rows(self.table, positions), self.kv_cache, slots, HEADS)
        swiglu(normed)
        finite_rows(normed[offset:])
        store_last_tokens(self.last_tokens, rows, ids[:7])
        scatter_int32(self.block_tables.view(-1), slots.clamp(max=1199), self.column(size, 0, 100, offset))
        copies = torch.randperm(100, device="cuda")[: min(size, 50)]
        copy_blocks([self.kv_cache], copies, copies.flip(0).contiguous())


@pytest.mark.gpu
def test_no_number_of_tokens_compiles_anew() -> None:
    with kernels_on("cuda"):
        model = Model()
        for size in (7, 100):
            model.step(size, 0)
        compiled = compilation_count()
        for size in (7, 8, 16, 17, 63, 64, 65, 128, 200, 256, 1000):
            for offset in (0, 1, 4):
                model.step(size, offset)
        torch.cuda.synchronize()
        assert compiled > 0 and compilation_count() == compiled
