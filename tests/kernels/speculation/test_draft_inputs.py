"""Columns that were planned by upper bounds, resolved as rows stand."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.support.examples import examples
from tests.support.kernel_case import DEVICES, kernels_on

from headrace_kernels.speculation.draft_inputs import PlannedEntries, lower_bounds, resolve_tokens

NUM_ROWS, NUM_DRAFTS = 6, 3


def int32(values: list[int], device: str = "cpu") -> torch.Tensor:
    # At an odd offset of a larger piece, as columns lie.
    return torch.tensor([-77, *values], dtype=torch.int32, device=device)[1:]


@strategies.composite
def steps(draw: strategies.DrawFn) -> list[tuple[int, int, int, int, int]]:
    """Entries: row, real position, lag, known tokens, drafts (-1: all tokens are known)."""
    rows = draw(strategies.lists(strategies.integers(0, NUM_ROWS - 1), min_size=1, max_size=4, unique=True))
    return [
        (
            row,
            draw(strategies.integers(1, 50)),
            draw(strategies.integers(0, 9)),
            known := draw(strategies.integers(0, 3)),
            draw(strategies.integers(-1 if known else 0, NUM_DRAFTS)),
        )
        for row in rows
    ]


def check(entries: list[tuple[int, int, int, int, int]], device: str) -> None:
    """Compares with what the words say, token by token. Two tokens of padding come last."""
    generator = torch.Generator().manual_seed(0)
    last_tokens = torch.randint(0, 1000, (NUM_ROWS,), generator=generator, dtype=torch.int32).to(device)
    drafts = torch.randint(0, 1000, (NUM_ROWS, NUM_DRAFTS), generator=generator, dtype=torch.int32).to(device)
    next_positions = torch.zeros(NUM_ROWS, dtype=torch.int32, device=device)
    ids, of_entry, planned, bounds, seq_lens = [], [], [], [], []
    expected: list[tuple[int, int]] = []
    expected_lens, firsts = [], []
    for index, (row, position, lag, known, num_drafts) in enumerate(entries):
        is_exact = num_drafts < 0
        lag = 0 if is_exact else lag
        # The last sampled token stands behind the known ones.
        next_positions[row] = position + known
        bounds.append(-1 if is_exact else position + known + lag)
        count = known + (0 if is_exact else 1 + num_drafts)
        firsts.append(len(ids))
        ids += [*range(100, 100 + known), *(-1 - unknown for unknown in range(count - known))]
        of_entry += [index] * count
        planned += range(position + lag, position + lag + count)
        seq_lens.append(position + lag + count)
        expected_lens.append(position + count)
        tokens = [*range(100, 100 + known)]
        if not is_exact:
            tokens += [int(last_tokens[row]), *drafts[row, :num_drafts].tolist()]
        expected += [(token, position + place) for place, token in enumerate(tokens)]
    columns = int32([*ids, 0, 0], device), int32([*of_entry, -1, -1], device), int32([*planned, 0, 0], device)
    planned_entries = PlannedEntries(int32([row for row, *_ in entries], device), int32(bounds, device), next_positions)
    resolve_tokens(*columns, planned_entries, last_tokens, drafts)
    assert list(zip(columns[0].tolist(), columns[2].tolist(), strict=True)) == [*expected, (0, 0), (0, 0)]
    lengths = int32(seq_lens, device)
    lower_bounds(lengths, planned_entries)
    assert lengths.tolist() == expected_lens
    # Places in outputs, of the entries' first tokens and of padding.
    outputs = int32([*seq_lens, 5], device)
    lower_bounds(outputs, planned_entries, int32([*firsts, len(ids)], device), columns[1])
    assert outputs.tolist() == [*expected_lens, 5]


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(steps())
def test_references_do_what_the_columns_say(entries: list[tuple[int, int, int, int, int]]) -> None:
    check(entries, "cpu")


@hypothesis.settings(max_examples=examples(30), deadline=None)
@hypothesis.given(steps())
def test_kernels_do_what_the_columns_say(entries: list[tuple[int, int, int, int, int]]) -> None:
    with kernels_on("cpu"):
        check(entries, "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_columns_of_several_programs(device: str) -> None:
    """Prompts longer than a program's block beside rows with drafts."""
    with kernels_on(device):
        check([(0, 5, 0, 300, -1), (1, 9, 4, 0, 3), (3, 1, 2, 280, 2)], device)
