"""The state before each token: wherever its block lies, and zeros before a sequence's first."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.support.examples import examples
from tests.support.kernel_case import DEVICES, Numbers, kernels_on

from headrace_kernels.speculation.kept_states import TokenBlocks, gather_states_before

BLOCK_SIZE, MAX_BLOCKS, NUM_ROWS = 4, 5, 6
NUM_BLOCKS = NUM_ROWS * MAX_BLOCKS

# The row, the first position and the number of tokens of an entry.
Entry = tuple[int, int, int]


@strategies.composite
def steps(draw: strategies.DrawFn) -> list[Entry]:
    rows = draw(strategies.lists(strategies.integers(0, NUM_ROWS - 1), min_size=1, unique=True))
    found = []
    for row in rows:
        start = draw(strategies.integers(0, BLOCK_SIZE * MAX_BLOCKS - 1))
        found.append((row, start, draw(strategies.integers(1, BLOCK_SIZE * MAX_BLOCKS - start))))
    return found


def check(step: list[Entry], device: str, size: int = 24, padding: int = 3, dtype: torch.dtype = torch.float32) -> None:
    numbers = Numbers(device, dtype, size)
    states = numbers.randn(NUM_BLOCKS, BLOCK_SIZE, size)
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(len(step)))
    block_table = order.int().view(NUM_ROWS, MAX_BLOCKS).to(device)
    starts = [sum(count for _, _, count in step[:index]) for index in range(len(step) + 1)]
    # Padded entries have no tokens, and padded tokens no entry.
    starts += [starts[-1]] * padding
    rows = torch.tensor([row for row, _, _ in step] + [0] * padding, dtype=torch.int32, device=device)
    positions = [start + index for _, start, count in step for index in range(count)] + [0] * padding
    blocks = TokenBlocks(torch.tensor(starts, dtype=torch.int32, device=device), rows, block_table)
    out = torch.full((len(positions) + 1, size), float("nan"), dtype=dtype, device=device)
    gather_states_before(states, torch.tensor(positions, device=device), blocks, out[:-1])
    expected = [
        states[block_table[row, (position - 1) // BLOCK_SIZE].long(), (position - 1) % BLOCK_SIZE]
        if position
        else torch.zeros_like(states[0, 0])
        for row, start, count in step
        for position in range(start, start + count)
    ]
    assert torch.equal(out[: len(expected)], torch.stack(expected)) and out[-1].isnan().all()
    if not any(count != 1 for _, _, count in step):
        by_row = torch.full((NUM_ROWS + 1, size), float("nan"), dtype=dtype, device=device)
        few = torch.tensor(positions[: len(step)], dtype=torch.int32, device=device)
        alone = TokenBlocks(blocks.query_start_loc[: len(step) + 1], rows[: len(step)], block_table)
        gather_states_before(states, few, alone, by_row, alone.rows)
        for (row, _, _), state in zip(step, expected, strict=True):
            assert torch.equal(by_row[row], state)
        assert by_row[-1].isnan().all()


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(steps())
def test_a_token_has_the_state_of_the_one_before(step: list[Entry]) -> None:
    check(step, "cpu")


@hypothesis.settings(max_examples=examples(20), deadline=None)
@hypothesis.given(steps())
def test_the_kernel_finds_the_same(step: list[Entry]) -> None:
    with kernels_on("cpu"):
        check(step, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [17, 1500])
def test_states_become_lines_by_row_where_entries_have_a_token_each(device: str, size: int) -> None:
    with kernels_on(device):
        check([(3, 7, 1), (0, 0, 1), (5, 4, 1)], device, size, dtype=torch.float16)


def test_a_cpus_entries_have_their_blocks_by_number() -> None:
    states = torch.arange(24.0).view(4, 3, 2)
    blocks = TokenBlocks(torch.tensor([0, 2, 3]), None, torch.tensor([[2], [1]], dtype=torch.int32))
    out = torch.empty(3, 2)
    gather_states_before(states, torch.tensor([1, 2, 0]), blocks, out)
    assert out.tolist() == [states[2, 0].tolist(), states[2, 1].tolist(), [0, 0]]
