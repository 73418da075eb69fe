"""What a GPU keeps of each request row between steps: its block table and its last sampled token.

Owns the two tensors and how a plan changes them. The host sends differences only: blocks that a row
got since the step before. One row more than the batch has is scratch: padding reads and writes it.
On a CPU the same state is `cpu_batch`.
"""

from __future__ import annotations

import torch

from headrace_backend.step.plan import ForwardPlan
from headrace_backend.worker.device_copies import copy_to_device
from headrace_backend.worker.flattening import table_places
from headrace_kernels.step_inputs import scatter_int32


class DeviceRows:
    """Block tables int32 [num_rows + 1, max_blocks] and last tokens int32 [num_rows + 1]."""

    def __init__(self, num_rows: int, max_blocks: int, num_blocks: int, device: torch.device) -> None:
        self._num_blocks = num_blocks
        self._device = device
        self.scratch_row = num_rows
        self.block_tables = torch.zeros(num_rows + 1, max_blocks, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)

    def update_tables(self, plan: ForwardPlan) -> None:
        """Applies the plan's block table updates."""
        if plan.table_rows.size:
            places = table_places(plan, self.block_tables.shape[1], self._num_blocks)
            places_there, blocks = (copy_to_device(column, self._device) for column in (places, plan.table_blocks))
            scatter_int32(self.block_tables.view(-1), places_there, blocks)
