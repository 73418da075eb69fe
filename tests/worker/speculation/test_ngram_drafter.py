"""What is settled while nobody wants drafts is looked up later all the same."""

from __future__ import annotations

import numpy as np
import torch

from headrace_backend.step.plan import RowAdmission
from headrace_backend.worker.speculation.drafter import SettledTokens
from headrace_backend.worker.speculation.ngram_drafter import NgramDrafter
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
