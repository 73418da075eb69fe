"""Which drafts are settled, and where rows stand then: the reference, and the kernel against it."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.support.examples import examples
from tests.support.kernel_case import DEVICES, kernels_on

from headrace_kernels.speculation.acceptance import Accepted, Drawn, RowState, accept_drafts

NUM_ROWS, TOKENS_PER_ROW = 7, 4
# The token before the first draft of each row.
LAST = 9


@dataclasses.dataclass
class Sample:
    """A row's draws, each with whether it was finite, and its drafts (one fewer)."""

    row: int
    position: int
    output_position: int
    draws: list[tuple[int, bool]]
    drafts: list[int]
    can_stay: bool = True

    @property
    def settled(self) -> list[int]:
        """What the words say."""
        tokens: list[int] = []
        for (token, is_finite), draft in zip(self.draws, [*self.drafts, -1], strict=True):
            if not is_finite and (tokens or (self.can_stay and self.drafts)):
                break
            tokens.append(token)
            if not is_finite or token != draft:
                break
        return tokens


@strategies.composite
def samples(draw: strategies.DrawFn) -> list[Sample]:
    can_stay = draw(strategies.booleans())
    rows = draw(strategies.lists(strategies.integers(0, NUM_ROWS - 1), min_size=1, max_size=4, unique=True))
    found = []
    for row in rows:
        # Few tokens, so that drafts are often right.
        finite = strategies.sampled_from([True, True, True, False])
        draws = draw(
            strategies.lists(strategies.tuples(strategies.integers(0, 1), finite), min_size=1, max_size=TOKENS_PER_ROW)
        )
        draws = [(token if is_finite else 0, is_finite) for token, is_finite in draws]
        drafts = draw(strategies.lists(strategies.integers(0, 1), min_size=len(draws) - 1, max_size=len(draws) - 1))
        position, output = draw(strategies.tuples(strategies.integers(0, 40), strategies.integers(0, 20)))
        found.append(Sample(row, position, output, draws, drafts, can_stay))
    return found


def accepted(found: list[Sample], device: str, padding: int = 2) -> tuple[Accepted, RowState]:
    """Samples whose entries stand side by side behind a token of another one."""
    ids, positions, hidden, tokens, finite, rows, outputs, firsts = [50], [3], [], [], [], [], [], []
    for sample in found:
        firsts.append(len(tokens))
        for index, (token, is_finite) in enumerate(sample.draws):
            hidden.append(len(ids))
            ids.append([LAST, *sample.drafts][index])
            positions.append(sample.position + index)
            tokens.append(token)
            finite.append(is_finite)
            rows.append(sample.row)
            outputs.append(sample.output_position + index)

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor([-77, *values], dtype=torch.int32, device=device)[1:]

    drawn = Drawn(
        torch.tensor(tokens, device=device),
        torch.tensor(finite, device=device),
        int32(hidden),
        int32(rows),
        int32(outputs),
        torch.tensor(ids, device=device),
        torch.tensor(positions, device=device),
    )
    state = RowState(int32([-5] * NUM_ROWS), int32([-6] * NUM_ROWS))
    counts = [len(sample.draws) for sample in found]
    columns = int32([*firsts, *[0] * padding]), int32([*counts, *[0] * padding])
    return accept_drafts(drawn, *columns, state, TOKENS_PER_ROW, found[0].can_stay), state


def check(found: list[Sample], device: str) -> None:
    result, state = accepted(found, device)
    size = len(found)
    expected = [sample.settled for sample in found]
    assert result.counts.tolist() == [*map(len, expected), 0, 0]
    for tokens, wanted in zip(result.tokens[:size].tolist(), expected, strict=True):
        assert tokens[: len(wanted)] == wanted
    assert result.rows[:size].tolist() == [sample.row for sample in found]
    assert result.positions[:size].tolist() == [sample.position + 1 for sample in found]
    ends = [sample.output_position + len(sample.settled) for sample in found]
    assert result.output_positions[:size].tolist() == ends
    last, places = [-5] * NUM_ROWS, [-6] * NUM_ROWS
    for sample in found:
        last[sample.row] = [LAST, *sample.settled][-1]
        places[sample.row] = sample.position + len(sample.settled)
    assert state.last_tokens.tolist() == last
    assert state.next_positions.tolist() == places


@hypothesis.settings(max_examples=examples(100), deadline=None)
@hypothesis.given(samples())
def test_the_reference_settles_the_longest_run_and_the_draw_behind_it(found: list[Sample]) -> None:
    check(found, "cpu")


@hypothesis.settings(max_examples=examples(40), deadline=None)
@hypothesis.given(samples())
def test_the_kernel_settles_the_same(found: list[Sample]) -> None:
    with kernels_on("cpu"):
        check(found, "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_a_draw_that_is_not_finite_is_not_settled_where_drafts_may_be_to_blame(device: str) -> None:
    bad = [(0, False), (0, False), (0, True)]
    with kernels_on(device):
        check([Sample(2, 7, 1, [(5, True), (0, False), (0, True)], [5, 0]), Sample(3, 7, 1, bad, [0, 0])], device)
        result, state = accepted([Sample(2, 7, 1, bad, [5, 0])], device)
    assert result.counts[0] == 0
    assert (state.last_tokens[2], state.next_positions[2]) == (LAST, 7)


@pytest.mark.parametrize("device", DEVICES)
def test_a_rows_only_draw_is_settled_whatever_it_is_and_all_first_draws_where_rows_cannot_stay(device: str) -> None:
    with kernels_on(device):
        for found in (Sample(2, 7, 1, [(0, False)], []), Sample(2, 7, 1, [(0, False), (0, True)], [0], can_stay=False)):
            result, _ = accepted([found], device)
            assert result.counts[0] == 1
