"""Drafts from the row's own tokens: what followed its last ones where they stood before.

Owns the history that is looked up, a line of tokens for each row, on the device: prompt and output
as the row's admission brings them, and what is settled while the row stays. The lookup is
`headrace_kernels.speculation.ngram`. It costs three launches a step and no pass of any model,
and helps where an answer repeats its prompt or itself: summaries, edits, code, tables.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace_backend.step.plan import RowAdmission, StepPlan
from headrace_backend.worker.device_copies import copy_to_device
from headrace_backend.worker.speculation.drafter import ComputedTokens, SettledTokens
from headrace_kernels.speculation.ngram import append_tokens, propose_ngram


class NgramDrafter:
    """Implements `Drafter`."""

    wants_hidden = False

    def __init__(self, num_drafts: int, num_rows: int, max_model_len: int, device: torch.device) -> None:
        """Allocates the history: 4 bytes for each token of each row's longest sequence."""
        self.num_drafts = num_drafts
        self._device = device
        self._history = torch.zeros(num_rows, max_model_len, dtype=torch.int32, device=device)

    def admit(self, admissions: list[RowAdmission]) -> None:
        """Implements `Drafter.admit`; admissions bring all tokens that the engine knows."""
        for admission in admissions:
            tokens = np.frombuffer(admission.prompt_ids + admission.output_ids, np.int32)
            self._history[admission.row, : tokens.size].copy_(copy_to_device(tokens, self._device))

    def follow(self, plan: StepPlan, computed: ComputedTokens) -> None:
        """Implements `Drafter.follow`: what nobody drew joins the history.

        All else that a step computes was there before.
        """
        for row, first, ids in plan.forward.forced_tokens():
            self._history[row, first : first + ids.size].copy_(copy_to_device(ids, self._device))

    def propose(self, settled: SettledTokens) -> torch.Tensor:
        """Implements `Drafter.propose`."""
        append_tokens(self._history, settled.rows, settled.positions, settled.tokens)
        if not settled.num_wanted:
            return torch.zeros(len(settled.rows), self.num_drafts, dtype=torch.int32, device=self._device)
        lengths = settled.positions + settled.counts
        return propose_ngram(self._history, settled.rows, lengths, self.num_drafts)

    def reset(self) -> None:
        """Implements `Drafter.reset`: a row's line is written anew when it is taken."""
