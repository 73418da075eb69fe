"""Compiles the kernels of speculation for a card that is not here, as their launchers would.

    python -m tests.support.compiled_speculation 90

prints one line of JSON per kernel that is different, after steps of many sizes whose columns lie at
many addresses.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch
import triton
from tests.support.compiled_kernels import compiling_for, resources

from headrace_kernels import triton_runtime
from headrace_kernels.sampling import parameters as sampling_parameters
from headrace_kernels.sampling.penalties_triton import penalize_rows_triton
from headrace_kernels.speculation.acceptance import Drawn, RowState, accept_drafts
from headrace_kernels.speculation.draft_inputs import PlannedEntries, lower_bounds, resolve_tokens, store_drafts
from headrace_kernels.speculation.draft_passes import (
    DraftsSoFar,
    PassColumns,
    PassInputs,
    build_pass_inputs,
    keep_drawn,
)
from headrace_kernels.speculation.kept_states import TokenBlocks, gather_states_before
from headrace_kernels.speculation.ngram import append_tokens, propose_ngram

NUM_ROWS, TOKENS_PER_ROW, MAX_MODEL_LEN, VOCAB = 513, 5, 8192, 128_256
BLOCK_SIZE, STATE_SIZE = 16, 4096


class Rows:
    """What stays from step to step."""

    def __init__(self) -> None:
        self.last_tokens, self.next_positions = torch.zeros(2, NUM_ROWS, dtype=torch.int32)
        self.drafts = torch.zeros(NUM_ROWS, TOKENS_PER_ROW - 1, dtype=torch.int32)
        self.num_lost = torch.zeros(1, dtype=torch.int32)
        self.history = torch.zeros(NUM_ROWS - 1, MAX_MODEL_LEN, dtype=torch.int32)
        self.matrix = torch.zeros(NUM_ROWS, sampling_parameters.NUM_COLUMNS, dtype=torch.int32)
        self.columns = torch.zeros(20_000, dtype=torch.int32)
        self.so_far = DraftsSoFar(self.drafts, torch.zeros(1, dtype=torch.int64))
        self.block_table = torch.zeros(NUM_ROWS, MAX_MODEL_LEN // BLOCK_SIZE, dtype=torch.int32)
        self.states = torch.empty(4, BLOCK_SIZE, STATE_SIZE, dtype=torch.bfloat16)
        self.carried = torch.empty(NUM_ROWS, STATE_SIZE, dtype=torch.bfloat16)

    def step(self, num_rows: int, first: int) -> None:
        """Every operation once; columns start anywhere in a larger one."""
        num_tokens = num_rows * TOKENS_PER_ROW
        of_tokens = [self.columns[first + 3000 * i :][:num_tokens] for i in range(5)]
        of_rows = [self.columns[first + 700 * i + 1 :][:num_rows] for i in range(4)]
        entries = PlannedEntries(of_rows[0], of_rows[1], self.next_positions)
        resolve_tokens(of_tokens[0], of_tokens[1], of_tokens[2], entries, self.last_tokens, self.drafts)
        lower_bounds(of_rows[2], entries)
        lower_bounds(of_tokens[3], entries, of_tokens[4], of_tokens[1])
        ids, positions = torch.zeros(2, 8192, dtype=torch.int64)[:, :num_tokens]
        finite = torch.ones(num_tokens, dtype=torch.bool)
        drawn = Drawn(torch.zeros(num_tokens, dtype=torch.int64), finite, *of_tokens[2:], ids, positions)
        state = RowState(self.last_tokens, self.next_positions)
        accepted = accept_drafts(drawn, of_rows[0], of_rows[3], state, TOKENS_PER_ROW, can_stay=True)
        append_tokens(self.history, accepted.rows, accepted.positions, accepted.tokens)
        lengths = accepted.positions + accepted.counts
        proposed = propose_ngram(self.history, accepted.rows, lengths, TOKENS_PER_ROW - 1)
        store_drafts(self.drafts, accepted.rows, proposed, VOCAB, self.num_lost)
        wide = torch.zeros(3, num_tokens + first, dtype=torch.int64)[:, first:]
        slots = torch.zeros(20, VOCAB, dtype=torch.bool), torch.zeros(20, VOCAB, dtype=torch.int32)
        before = torch.zeros(num_tokens, TOKENS_PER_ROW - 1, dtype=torch.int64)
        penalize_rows_triton(torch.empty(num_tokens, VOCAB), *wide, *slots, self.matrix, before)

    def draft(self, num_rows: int, first: int) -> None:
        """A pass that drafts, and a head's states before it and behind a step."""
        columns = PassColumns(*(self.columns[first + 700 * i :][:num_rows] for i in range(4)))
        wide, narrow = torch.zeros(3, 8192, dtype=torch.int64), torch.zeros(2, 8192, dtype=torch.int32)
        inputs = PassInputs(*wide[:, first:][:, :num_rows], *narrow[:, first:][:, :num_rows])
        state = RowState(self.last_tokens, self.next_positions)
        build_pass_inputs(columns, state, self.so_far, self.block_table, BLOCK_SIZE, inputs)
        keep_drawn(torch.zeros(num_rows, dtype=torch.int64), self.so_far)
        blocks = TokenBlocks(self.columns[first : first + num_rows + 1], columns.rows, self.block_table)
        gather_states_before(self.states, columns.bounds, blocks, self.carried, columns.rows)
        gather_states_before(self.states, inputs.positions, blocks, self.carried)


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret, "unset TRITON_INTERPRET"
    # Operations take their kernels for CPU tensors too, which nothing is launched on.
    with mock.patch.dict(triton_runtime._state, forced=True), compiling_for(int(sys.argv[1])) as compiled:
        rows = Rows()
        for size, offset in ((1, 0), (2, 1), (16, 4), (17, 3)):
            rows.step(size, offset)
            rows.draft(size, offset)
    for kernel in {id(kernel): kernel for kernel in compiled}.values():
        print(json.dumps(resources(kernel)))
