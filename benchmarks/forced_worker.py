"""A worker whose drafts are right with a set probability: what speculation is worth, by itself.

It drafts what the model answered before, which was recorded, and spoils each token with a set
probability. Everything else is the real worker: verification, settlement, planning. The drafter
looks its tokens up and costs next to nothing, as n-gram drafts do.

    python -m benchmarks.forced_worker ACCEPTANCE ANSWERS.json <the worker's own arguments>
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys

import numpy as np
import torch

from headrace_backend.layers.step_metadata import StepMetadata, StepPieces
from headrace_backend.step.plan import RowAdmission, StepPlan
from headrace_backend.worker.device_copies import copy_to_device
from headrace_backend.worker.lifetime import end_process
from headrace_backend.worker.main import main as worker
from headrace_backend.worker.speculation.drafter import SettledTokens
from headrace_backend.worker.speculation.speculation import RowDrafts
from headrace_backend.worker.start_up import drafters
from headrace_backend.worker.start_up.sizes import WorkerSizes


class ForcedDrafter:
    """Drafts recorded answers, which it finds by the seeds of their requests."""

    wants_hidden = False

    def __init__(
        self,
        num_drafts: int,
        num_rows: int,
        acceptance: float,
        answers: dict[int, np.ndarray],
        device: torch.device,
    ) -> None:
        """Takes the answers.

        Args:
            num_drafts: Tokens that it proposes for each row.
            num_rows: Rows of the batch.
            acceptance: Share of its tokens that are the answer's.
            answers: Token ids of each answer, by seed.
            device: Device that drafts are proposed on.
        """
        self.num_drafts = num_drafts
        self._device = device
        longest = max((answer.size for answer in answers.values()), default=0)
        self._lines = torch.zeros(num_rows, longest + num_drafts + 1, dtype=torch.int32, device=device)
        self._spoiled = {seed: _spoiled(answer, seed, acceptance) for seed, answer in answers.items()}
        self._ahead = torch.arange(num_drafts, device=device)

    def admit(self, admissions: list[RowAdmission]) -> None:
        """Implements `Drafter.admit`."""
        for admission in admissions:
            line = self._spoiled.get(admission.sampling.seed)
            if line is not None:
                self._lines[admission.row, : line.size].copy_(copy_to_device(line, self._device))

    def follow(
        self, plan: StepPlan, token_ids: torch.Tensor, positions: torch.Tensor, metadata: StepMetadata | StepPieces
    ) -> None:
        """Implements `Drafter.follow`: the answers are known."""

    def propose(self, settled: SettledTokens) -> torch.Tensor:
        """Implements `Drafter.propose`."""
        places = settled.output_positions[:, None].long() + self._ahead
        return self._lines[settled.rows.long()[:, None], places.clamp(max=self._lines.shape[1] - 1)]

    def reset(self) -> None:
        """Implements `Drafter.reset`: a line is written anew when its row is taken."""


def _spoiled(answer: np.ndarray, seed: int, acceptance: float) -> np.ndarray:
    """The answer with another token wherever a draft is to be wrong."""
    right = np.random.default_rng(seed).random(answer.size) < acceptance
    return np.where(right, answer, np.where(answer > 0, answer - 1, 1)).astype(np.int32)


def forced_drafter(acceptance: float, file: pathlib.Path, sizes: WorkerSizes, rows: RowDrafts) -> ForcedDrafter:
    """Takes the place of the worker's own choice of a drafter."""
    recorded = json.loads(file.read_text())
    answers = {int(seed): np.array(token_ids, np.int32) for seed, token_ids in recorded.items()}
    return ForcedDrafter(rows.tokens_per_row - 1, sizes.max_num_seqs, acceptance, answers, rows.drafts.device)


if __name__ == "__main__":
    drafters.lookup_drafter = functools.partial(forced_drafter, float(sys.argv[1]), pathlib.Path(sys.argv[2]))
    end_process(worker(sys.argv[3:]))
