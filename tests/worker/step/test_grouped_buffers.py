"""Tables and slots that a captured step reads of each cache group, and where they lie."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from headrace_backend.layers.step_metadata import GroupedStep
from headrace_backend.pp_rules import WHOLE
from headrace_backend.step.plan import ForwardPlan, StepPlan
from headrace_backend.worker.start_up.synthetic_steps import BlockPool, Chunk, SamplingKind, make_step
from headrace_backend.worker.step.buffers import DeviceRows, StepBuffers, StepInputs, StepLimits
from headrace_backend.worker.step.shape import AttentionSizes, StepShape
from headrace_kernels.attention.step import PagedAttentionStep

NUM_ROWS, MAX_BLOCKS, NUM_BLOCKS, BLOCK_SIZE, NUM_GROUPS = 5, 4, 500, 16, 3
LIMITS = StepLimits(NUM_ROWS, 32, MAX_BLOCKS * BLOCK_SIZE, num_groups=NUM_GROUPS)
CPU = torch.device("cpu")
CACHE = torch.zeros(NUM_BLOCKS, 2, 2, BLOCK_SIZE, 16)
SIZES = AttentionSizes.of(4, CACHE)


def step_of(starts: list[int]) -> StepPlan:
    """A token of each row behind so many others.

    Block p of row r in group g has the number 100 g + 10 r + p.
    """
    plan = make_step([Chunk(start, 1) for start in starts], BlockPool(NUM_BLOCKS, BLOCK_SIZE), SamplingKind.GREEDY)
    rows, counts = plan.forward.rows, plan.forward.table_counts
    blocks = [
        100 * group + 10 * row + place
        for group in range(NUM_GROUPS)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True)
        for place in range(count)
    ]
    forward: ForwardPlan = dataclasses.replace(
        plan.forward,
        table_rows=np.concatenate([group * NUM_ROWS + rows for group in range(NUM_GROUPS)], dtype=np.int32),
        table_starts=np.zeros(NUM_GROUPS * rows.size, np.int32),
        table_counts=np.tile(counts, NUM_GROUPS),
        table_blocks=np.array(blocks, np.int32),
    )
    return dataclasses.replace(plan, forward=forward)


def steps_of_groups(inputs: StepInputs) -> list[PagedAttentionStep]:
    assert isinstance(inputs.attention, GroupedStep)
    steps = [step for step in inputs.attention.groups if isinstance(step, PagedAttentionStep)]
    assert len(steps) == NUM_GROUPS
    return steps


def addresses(inputs: StepInputs) -> list[tuple[int, int]]:
    """Returns where each group's tables and slots begin."""
    return [(step.block_tables.data_ptr(), step.slot_mapping.data_ptr()) for step in steps_of_groups(inputs)]


def made() -> tuple[DeviceRows, StepBuffers]:
    rows = DeviceRows(NUM_ROWS, MAX_BLOCKS, NUM_BLOCKS, CPU, NUM_GROUPS)
    return rows, StepBuffers(LIMITS, SIZES, [CACHE], torch.float32, 64, (100, 100), 0, WHOLE)


def test_a_padded_step_has_the_slots_of_each_group_and_none_for_padding() -> None:
    rows, buffers = made()
    plan, starts = step_of([3, 16, 40]), [3, 16, 40]
    shape = StepShape.of(step_of([3] * NUM_ROWS), SIZES, 0)
    rows.update_tables(plan.forward)
    buffers.upload(plan, shape, rows.scratch_row, True)
    for group, step in enumerate(steps_of_groups(buffers.inputs(shape, rows, ()))):
        expected = [
            (100 * group + 10 * row + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
            for row, start in enumerate(starts)
        ]
        assert step.slot_mapping.tolist() == expected + [-1] * (NUM_ROWS - len(starts))
        assert step.block_tables[2, :3].tolist() == [100 * group + 20 + place for place in range(3)]
        # Padding is of the scratch row, which has block 0 alone.
        assert step.rows[len(starts) :].tolist() == [rows.scratch_row] * (NUM_ROWS - len(starts))
        assert not step.block_tables[rows.scratch_row].any()


def test_what_a_graph_reads_lies_at_the_same_aligned_addresses_in_every_step() -> None:
    rows, buffers = made()
    shape = StepShape.of(step_of([3] * NUM_ROWS), SIZES, 0)
    buffers.upload_padding(shape, rows.scratch_row)
    captured = buffers.inputs(shape, rows, ())
    for starts in ([5], [20, 1], [47, 3, 16, 16, 9]):
        plan = step_of(starts)
        rows.update_tables(plan.forward)
        buffers.upload(plan, shape, rows.scratch_row, True)
        replayed = buffers.inputs(shape, rows, ())
        assert addresses(replayed) == addresses(captured)
        # What was captured shows the step that is computed now.
        assert [step.slot_mapping.tolist() for step in steps_of_groups(captured)] == [
            step.slot_mapping.tolist() for step in steps_of_groups(replayed)
        ]
    begins = [address for pair in addresses(captured) for address in pair]
    assert len(set(begins)) == 2 * NUM_GROUPS
    assert all(address % 16 == 0 for address in begins)
