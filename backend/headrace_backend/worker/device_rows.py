"""What a GPU keeps of each request row between steps: its block table and its last sampled token.

Owns the two tensors and how a plan changes them. The host sends differences only: blocks that a row got since the step before. One row more than the batch has is scratch: padding reads and
writes it.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace_backend.step_plan import ForwardPlan
from headrace_kernels.step_inputs import scatter_int32


class DeviceRows:
    """Block tables int32 [num_rows + 1, max_blocks] and last tokens int32 [num_rows + 1]."""

    def __init__(self, num_rows: int, max_blocks: int, num_blocks: int, device: torch.device) -> None:
        self._num_blocks = num_blocks
        self.scratch_row = num_rows
        self.block_tables = torch.zeros(num_rows + 1, max_blocks, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)

    def update(self, plan: ForwardPlan) -> None:
        """Applies the plan's table updates."""
        if not plan.table_rows.size:
            return
        max_blocks = self.block_tables.shape[1]
        assert int((plan.table_starts + plan.table_counts).max()) <= max_blocks, (
            "a block table is longer than the context"
        )
        assert 0 <= plan.table_blocks.min() and plan.table_blocks.max() < self._num_blocks, "block number out of range"
        starts = plan.table_rows.astype(np.int64) * max_blocks + plan.table_starts
        ends = np.cumsum(plan.table_counts, dtype=np.int64)
        places = np.arange(ends[-1]) + np.repeat(starts - ends + plan.table_counts, plan.table_counts)
        device = self.block_tables.device
        scatter_int32(self.block_tables.view(-1), to_device(places, device), to_device(plan.table_blocks, device))


def to_device(column: np.ndarray[tuple[int], np.dtype[np.integer]], device: torch.device) -> torch.Tensor:
    """A copy on the device, without waiting for it: through pinned memory, which is reused only once the copy is done."""
    if device.type == "cpu":
        return torch.from_numpy(column.copy())
    pinned = torch.empty(column.size, dtype=torch.from_numpy(column[:0].copy()).dtype, pin_memory=True)
    pinned.numpy()[:] = column
    return pinned.to(device, non_blocking=True)
