"""Passes that draft: what each reads of rows and drafts so far, and what it leaves."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.support.examples import examples
from tests.support.kernel_case import DEVICES, kernels_on

from headrace_kernels.speculation.acceptance import RowState
from headrace_kernels.speculation.draft_passes import (
    DraftsSoFar,
    PassColumns,
    PassInputs,
    build_pass_inputs,
    keep_drawn,
)

NUM_ROWS, NUM_DRAFTS, BLOCK_SIZE, MAX_BLOCKS = 9, 3, 4, 8
# The row that padding has.
SCRATCH = NUM_ROWS


@dataclasses.dataclass(frozen=True)
class Drafted:
    """A row's drafts in a step."""

    row: int
    count: int
    # Where its last token stands, and by how much its plan is too large.
    position: int
    lag: int
    output: int

    def read(self, place: int, drawn: list[int]) -> tuple[int, int, int]:
        """Token, position and place in the output of a pass, by the words of the specification."""
        token = 100 + self.row if place == 0 else drawn[place - 1]
        return token, self.position + place, self.output - self.lag + place


@strategies.composite
def batches(draw: strategies.DrawFn) -> list[Drafted]:
    rows = draw(strategies.lists(strategies.integers(0, NUM_ROWS - 1), min_size=1, unique=True))
    most = BLOCK_SIZE * MAX_BLOCKS - 1 - NUM_DRAFTS
    numbers = strategies.tuples(
        strategies.integers(1, NUM_DRAFTS),
        strategies.integers(0, most),
        strategies.integers(0, 4),
        strategies.integers(4, 90),
    )
    return [Drafted(row, *draw(numbers)) for row in rows]


def table(row: int, device: str) -> torch.Tensor:
    """A row's blocks: any numbers that tell rows apart."""
    return torch.arange(MAX_BLOCKS, dtype=torch.int32, device=device) * (NUM_ROWS + 1) + row


def check(batch: list[Drafted], device: str, padding: int = 2) -> None:
    """Runs all passes of a step, and compares what each reads with what it should."""

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor([-77, *values], dtype=torch.int32, device=device)[1:]

    size = len(batch) + padding
    columns = PassColumns(
        int32([each.row for each in batch] + [SCRATCH] * padding),
        int32([each.count for each in batch] + [0] * padding),
        int32([each.position + each.lag for each in batch] + [0] * padding),
        int32([each.output for each in batch] + [0] * padding),
    )
    last, standing = [100 + row for row in range(NUM_ROWS + 1)], [0] * (NUM_ROWS + 1)
    for each in batch:
        standing[each.row] = each.position
    state = RowState(int32(last), int32(standing))
    drafts = torch.full((size + 3, NUM_DRAFTS), -5, dtype=torch.int32, device=device)
    so_far = DraftsSoFar(drafts, torch.zeros(1, dtype=torch.int64, device=device))
    blocks = torch.stack([table(row, device) for row in range(NUM_ROWS + 1)])
    drawn: list[list[int]] = [[] for _ in range(size)]
    for place in range(max(each.count for each in batch)):
        wide = torch.full((3, size), -9, dtype=torch.int64, device=device)
        inputs = PassInputs(*wide, int32([-9] * size), int32([-9] * size))
        build_pass_inputs(columns, state, so_far, blocks, BLOCK_SIZE, inputs)
        read = list(zip(*(column.tolist() for column in inputs), strict=True))
        for index, each in enumerate(batch):
            token_id, position, slot, seq_len, draw_position = read[index]
            if each.count <= place:
                assert (token_id, position, slot) == (0, 0, -1)
                assert seq_len == each.position + each.count
                continue
            assert (token_id, position, draw_position) == each.read(place, drawn[index])
            block = int(table(each.row, "cpu")[position // BLOCK_SIZE])
            assert slot == block * BLOCK_SIZE + position % BLOCK_SIZE and seq_len == position + 1
        assert [each[:4] for each in read[len(batch) :]] == [(0, 0, -1, 1)] * padding
        for index, tokens in enumerate(drawn):
            tokens.append(1000 * (place + 1) + index)
        keep_drawn(torch.tensor([tokens[-1] for tokens in drawn], device=device), so_far)
        assert int(so_far.place) == place + 1
        assert drafts[:size, : place + 1].tolist() == drawn
    assert (drafts[size:] == -5).all()


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(batches())
def test_a_pass_reads_the_token_behind_what_was_computed(batch: list[Drafted]) -> None:
    check(batch, "cpu")


@hypothesis.settings(max_examples=examples(30), deadline=None)
@hypothesis.given(batches())
def test_the_kernels_read_and_keep_the_same(batch: list[Drafted]) -> None:
    with kernels_on("cpu"):
        check(batch, "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_more_rows_than_a_program_has(device: str) -> None:
    batch = [Drafted(row % NUM_ROWS, 1 + row % NUM_DRAFTS, 5 + row % NUM_ROWS, 1, 7) for row in range(300)]
    with kernels_on(device):
        check(batch, device, padding=7)
