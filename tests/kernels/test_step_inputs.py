"""A step's inputs from its columns: the reference, and the kernel against it."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.support.examples import examples
from tests.support.kernel_case import DEVICES, Numbers, kernels_on

from headrace_kernels.step_inputs import build_step_inputs, scatter_int32, store_last_tokens

BLOCK_SIZE, MAX_BLOCKS, NUM_ROWS = 16, 5, 9
POISON = -77


def int32(values: list[int], device: str) -> torch.Tensor:
    # At an odd offset of a larger piece, as columns lie.
    return torch.tensor([POISON, *values], dtype=torch.int32, device=device)[1:]


@dataclasses.dataclass
class Columns:
    """A step's columns as lists."""

    rows: list[int]
    # (id or -1, entry or -1, position)
    tokens: list[tuple[int, int, int]]
    num_groups: int = 1

    def run(self, device: str) -> None:
        """Runs the operation and compares it with what the words say, token by token."""
        numbers = Numbers(device, torch.float32)
        last_tokens = numbers.integers(0, 1000, NUM_ROWS, dtype=torch.int32)
        tables = numbers.integers(0, 2**27, self.num_groups, NUM_ROWS, MAX_BLOCKS, dtype=torch.int32)
        # More room than tokens, as in a step that is no larger than others.
        outputs = torch.full((2 + self.num_groups, len(self.tokens) + 3), POISON, device=device)
        ids, positions = outputs[:2, : len(self.tokens)]
        slots = outputs[2:]
        columns = (int32([token[i] for token in self.tokens], device) for i in range(3))
        state = (int32(self.rows, device), last_tokens, tables, BLOCK_SIZE)
        build_step_inputs(*columns, *state, ids, positions, slots)
        for table, of_group in zip(tables, slots[:, : len(self.tokens)], strict=True):
            found = (ids.tolist(), positions.tolist(), of_group.tolist())
            assert [list(values) for values in zip(*found, strict=True)] == [
                self._expected(token, last_tokens, table) for token in self.tokens
            ]
        assert (outputs[:, len(self.tokens) :] == POISON).all()

    def _expected(self, token: tuple[int, int, int], last_tokens: torch.Tensor, tables: torch.Tensor) -> list[int]:
        token_id, entry, position = token
        if entry < 0:
            return [0, 0, -1]
        row = self.rows[entry]
        block = int(tables[row, position // BLOCK_SIZE])
        token_id = int(last_tokens[row]) if token_id < 0 else token_id
        return [token_id, position, block * BLOCK_SIZE + position % BLOCK_SIZE]


@strategies.composite
def columns(draw: strategies.DrawFn) -> Columns:
    rows = draw(strategies.lists(strategies.integers(0, NUM_ROWS - 1), min_size=1, max_size=NUM_ROWS, unique=True))
    token = strategies.tuples(
        strategies.integers(-1, 128_255),
        strategies.integers(-1, len(rows) - 1),
        strategies.integers(0, BLOCK_SIZE * MAX_BLOCKS - 1),
    )
    return Columns(rows, draw(strategies.lists(token, max_size=12)), draw(strategies.integers(1, 3)))


@hypothesis.settings(max_examples=examples(50), deadline=None)
@hypothesis.given(columns())
def test_the_reference_does_what_the_columns_say(step: Columns) -> None:
    step.run("cpu")


@hypothesis.settings(max_examples=examples(30), deadline=None)
@hypothesis.given(columns())
def test_the_kernel_does_what_the_columns_say(step: Columns) -> None:
    with kernels_on("cpu"):
        step.run("cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 1000])
def test_steps_of_several_programs(num_tokens: int, device: str) -> None:
    tokens = [
        (-1 if i % 3 == 0 else i, -1 if i % 7 == 6 else i % 4, i % (BLOCK_SIZE * MAX_BLOCKS)) for i in range(num_tokens)
    ]
    with kernels_on(device):
        Columns([8, 0, 3, 5], tokens).run(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_values", [0, 1, 300])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_scatter_writes_its_places_only(num_values: int, dtype: torch.dtype, device: str) -> None:
    numbers = Numbers(device, torch.float32)
    target = numbers.integers(0, 1000, 400, dtype=torch.int32)
    places = torch.randperm(400, generator=torch.Generator().manual_seed(1))[:num_values].to(device)
    values = numbers.integers(-(2**31), 2**31 - 1, num_values, dtype=dtype)
    expected = target.clone()
    expected[places[: num_values // 2]] = values[: num_values // 2].int()
    places[num_values // 2 :] = -1
    with kernels_on(device):
        scatter_int32(target, places, values)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("device", [*DEVICES, "reference"])
def test_last_tokens_are_stored_in_their_rows(device: str) -> None:
    place = "cpu" if device == "reference" else device
    last_tokens = torch.full((6,), 9, dtype=torch.int32, device=place)
    # Row 5 is padding's scratch row.
    rows, tokens = int32([4, 5, 0, -1, 5], place), torch.tensor([70_000, 1, 2, 3, 1], device=place)
    if device == "reference":
        store_last_tokens(last_tokens, rows, tokens)
    else:
        with kernels_on(device):
            store_last_tokens(last_tokens, rows, tokens)
    assert last_tokens.tolist() == [2, 9, 9, 9, 70_000, 1]
