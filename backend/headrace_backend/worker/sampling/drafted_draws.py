"""Several draws of a row in one step, as the options see them that depend on earlier tokens.

Owns what a draw behind drafts is given in place of a history: the drafts before it, as if they were
output already, and its exact place in the output. Which of the draws are settled is known behind
all of them; only those are noted for later steps. Does not own which drafts are right
(`headrace_kernels.speculation.acceptance`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from headrace_backend.step.plan import Int32Column
from headrace_backend.worker.device_copies import indices_on_device

# Stands for no token.
NO_DRAFT = -1


@dataclasses.dataclass(frozen=True, slots=True)
class DraftedDraws:
    """The draws of a step in a worker that drafts; those of a sample stand side by side."""

    # [num_samples] draws of each sample, and the place of its first one; on the host.
    counts: Int32Column
    firsts: Int32Column
    # Most draws of a sample.
    tokens_per_row: int
    # int64 [num_tokens] all that the step computes, and int32 [num_draws] those whose hidden states
    # are drawn from.
    token_ids: torch.Tensor
    hidden_indices: torch.Tensor
    # int32 [num_draws] the place of each drawn token in its output, exactly.
    output_positions: torch.Tensor

    @property
    def inputs(self) -> torch.Tensor:
        """Token before each draw, int64 [num_draws]: but for a sample's first draw a draft."""
        return self.token_ids[self.hidden_indices.long()]

    def depths(self) -> npt.NDArray[np.int64]:
        """[num_draws] drafts before each draw, on the host."""
        depths: npt.NDArray[np.int64] = np.arange(self.counts.sum()) - np.repeat(self.firsts, self.counts)
        return depths

    def drafts_before(self, draws: npt.NDArray[np.int64]) -> torch.Tensor:
        """The drafts before some draws, in order.

        Args:
            draws: [n] places of the draws, on the host.

        Returns:
            int64 [n, tokens_per_row - 1], NO_DRAFT where there are no more.
        """
        order = np.arange(1, self.tokens_per_row)
        firsts, depths = np.repeat(self.firsts, self.counts)[draws], self.depths()[draws]
        is_before = order <= depths[:, None]
        places = np.where(is_before, firsts[:, None] + order, 0)
        before = indices_on_device(np.stack((places, is_before)), self.token_ids.device)
        return torch.where(before[1] > 0, self.inputs[before[0]], NO_DRAFT)

    def settled(self, draws: npt.NDArray[np.int64], counts: torch.Tensor) -> torch.Tensor:
        """Whether some draws are settled, bool [n].

        Args:
            draws: [n] places of the draws, on the host.
            counts: int32 [num_samples] how many each sample settled, on the device.
        """
        samples = np.repeat(np.arange(self.counts.size), self.counts)[draws]
        columns = indices_on_device(np.stack((samples, self.depths()[draws])), counts.device)
        return counts[columns[0]] > columns[1]
