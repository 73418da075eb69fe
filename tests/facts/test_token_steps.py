"""Runs of steps give each token's step, and nonsense is refused, not allocated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_facts import token_steps
from headrace_facts.token_steps import MOST_TOKENS, TokenSteps


@st.composite
def outputs(draw: st.DrawFn) -> tuple[list[int], int]:
    """The step of each token, in order, and how many an earlier attempt emitted before them."""
    gaps = draw(st.lists(st.sampled_from([1, 1, 1, 2, 50]), max_size=40))
    first = draw(st.integers(1, 1 << 40))
    return [first + sum(gaps[:index]) for index in range(len(gaps))], draw(st.integers(0, 3))


@given(outputs())
def test_runs_tell_the_step_of_each_token(output: tuple[list[int], int]) -> None:
    steps, num_earlier = output
    runs = [
        (num_earlier + index, step) for index, step in enumerate(steps) if index == 0 or step != steps[index - 1] + 1
    ]
    packed = token_steps.of_runs(runs, num_earlier + len(steps))
    assert len(packed.runs) == 16 * len(runs)
    assert token_steps.step_ids(packed).tolist() == [0] * num_earlier + steps


def test_a_run_that_no_token_followed_is_left_out() -> None:
    packed = token_steps.of_runs([(0, 7), (2, 12)], 2)
    assert packed == token_steps.of_runs([(0, 7)], 2)
    assert token_steps.step_ids(token_steps.of_runs([(0, 7)], 0)).tolist() == []


def test_of_runs_at_one_token_the_last_holds() -> None:
    assert token_steps.step_ids(token_steps.of_runs([(0, 7), (1, 9), (1, 12)], 3)).tolist() == [7, 12, 13]


@pytest.mark.parametrize(
    "steps",
    [
        TokenSteps(-1, b""),
        TokenSteps(MOST_TOKENS + 1, b""),
        TokenSteps(3, bytes(8)),
        TokenSteps(3, bytes(15)),
        TokenSteps(3, np.array([2, 5, 1, 6], "<u8").tobytes()),
        TokenSteps(3, np.array([0, 5, 3, 6], "<u8").tobytes()),
        TokenSteps(3, np.array([1 << 63, 5], "<u8").tobytes()),
    ],
)
def test_nonsense_is_refused(steps: TokenSteps) -> None:
    with pytest.raises(ValueError, match="tokens of one output|runs of steps|reshape|buffer size"):
        token_steps.step_ids(steps)


def test_ids_wrap_as_they_are_counted() -> None:
    packed = TokenSteps(2, np.array([0, (1 << 64) - 1], "<u8").tobytes())
    assert token_steps.step_ids(packed).tolist() == [(1 << 64) - 1, 0]
