"""Token counts of the rows that have penalties.

Owns the counts: a slot of vocabulary size per penalized row, taken at admission and given back at release, in tensors that double when slots run out.
Rows without penalties cost nothing here. The arithmetic on logits is `headrace_kernels.penalties`.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace_backend.step_plan import RowAdmission
from headrace_kernels.penalties import Penalties, apply_penalties

# Bytes per slot and token: a bool for the prompt, an int32 for the output.
BYTES_PER_TOKEN = 5


class PenaltySlots:
    """Which tokens each penalized row's prompt contains, and how often its output contains them."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._prompt_masks = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []
        self._slots: dict[int, int] = {}

    @property
    def num_taken(self) -> int:
        """Rows that hold a slot."""
        return len(self._slots)

    def admit(self, admission: RowAdmission) -> None:
        """Takes a slot for a row and counts its history."""
        assert admission.needs_history and admission.row not in self._slots
        if not self._free:
            self._grow()
        slot = self._slots[admission.row] = self._free.pop()
        self._prompt_masks[slot] = False
        self._output_counts[slot] = 0
        self._prompt_masks[slot, self._ids(admission.prompt_ids)] = True
        output_ids = self._ids(admission.output_ids)
        self._output_counts[slot].index_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))

    def release(self, row: int) -> None:
        """Gives back the row's slot, if it has one."""
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def apply(self, logits: torch.Tensor, rows: list[int], penalties: Penalties) -> torch.Tensor:
        """Penalized logits: float32 [num_rows, vocab_size] from the same shape."""
        slots = self._slots_of(rows)
        return apply_penalties(logits, self._prompt_masks[slots], self._output_counts[slots], penalties)

    def count(self, rows: list[int], tokens: torch.Tensor) -> None:
        """Counts one drawn token of each row, int64 [num_rows]. A row appears once."""
        slots = self._slots_of(rows)
        self._output_counts[slots, tokens] += 1

    def _slots_of(self, rows: list[int]) -> torch.Tensor:
        return torch.tensor([self._slots[row] for row in rows], device=self._device)

    def _ids(self, data: bytes) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(data, np.int32).astype(np.int64)).to(self._device)

    def _grow(self) -> None:
        old = self._prompt_masks.shape[0]
        added = max(4, old)
        self._prompt_masks = torch.cat(
            (self._prompt_masks, self._prompt_masks.new_zeros(added, self._prompt_masks.shape[1]))
        )
        self._output_counts = torch.cat(
            (self._output_counts, self._output_counts.new_zeros(added, self._output_counts.shape[1]))
        )
        self._free += range(old, old + added)
