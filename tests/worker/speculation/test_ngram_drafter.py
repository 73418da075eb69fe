"""What is settled while nobody wants drafts is looked up later all the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.worker.driver import step

from headrace_backend.step.plan import Int32Column, RowAdmission, StepPlan
from headrace_backend.worker.speculation.drafter import ComputedTokens, SettledTokens
from headrace_backend.worker.speculation.ngram_drafter import NgramDrafter
from headrace_backend.worker.speculation.suffix_drafter import SuffixDrafter
from headrace_request.sampling import Sampling

PATTERN = [5, 6, 7, 8, 9]


def settled(position: int, token: int, num_wanted: int) -> SettledTokens:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    tokens[0, 0] = token
    return SettledTokens(
        rows=torch.zeros(1, dtype=torch.int32),
        rows_on_host=np.zeros(1, np.int32),
        positions=torch.tensor([position]),
        tokens=tokens,
        counts=torch.ones(1, dtype=torch.int32),
        output_positions=torch.tensor([position], dtype=torch.int32),
        num_wanted=num_wanted,
    )


def test_a_step_whose_next_one_verifies_nothing_looks_nothing_up_and_remembers_its_token() -> None:
    drafter = NgramDrafter(3, 1, 64, torch.device("cpu"))
    prompt = np.array([*PATTERN, 3], np.int32).tobytes()
    drafter.admit([RowAdmission(0, Sampling(), prompt_ids=prompt)])
    for index, token in enumerate([5, 6]):
        drafts = drafter.propose(settled(6 + index, token, num_wanted=0))
        assert drafts.shape == (1, 3) and not drafts.any()
    drafts = drafter.propose(settled(8, 7, num_wanted=3))
    assert drafts.tolist() == [[8, 9, 3]]


def forced_step(position: int, tokens: list[int]) -> StepPlan:
    """A step that computes row 0's last token, before `position`, and tokens that nobody draws."""

    def column(*values: int) -> Int32Column:
        return np.array(values, np.int32)

    plan = step([])
    plan.forward = dataclasses.replace(
        plan.forward,
        rows=column(0),
        starts=column(position - 1),
        counts=column(1 + len(tokens)),
        known_counts=column(1 + len(tokens)),
        token_ids=column(3, *tokens),
        forced_entries=column(0),
        forced_counts=column(len(tokens)),
    )
    return plan


@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
def test_what_nobody_drew_is_looked_up_as_what_was_drawn(make: type[NgramDrafter | SuffixDrafter]) -> None:
    """A row's place may hold another tenant's tokens of before: none of them may be drafted."""
    drafter = make(3, 1, 64, torch.device("cpu"))
    for prompt in ([*PATTERN, 40, 41, 42, 43, 44], [*PATTERN, 3]):
        drafter.admit([RowAdmission(0, Sampling(), prompt_ids=np.array(prompt, np.int32).tobytes())])
    nothing = torch.empty(0, dtype=torch.int64)
    drafter.follow(forced_step(6, [5, 6]), ComputedTokens(nothing, nothing, None))  # type: ignore[arg-type]  # not looked at
    assert drafter.propose(settled(8, 7, num_wanted=3)).tolist() == [[8, 9, 3]]
