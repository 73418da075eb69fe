"""Token counts of the rows that have penalties.

Owns the counts: a slot of vocabulary size per penalized row, taken at admission and given back at
release, in tensors that double when slots run out. Rows without penalties cost nothing here. The
arithmetic on logits is `headrace_kernels.sampling.penalties`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from headrace_backend.step.plan import Int32Column, RowAdmission
from headrace_backend.worker.device_copies import indices_on_device
from headrace_kernels.sampling.penalties import penalize_rows

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
        assert admission.sampling.needs_history and admission.row not in self._slots
        if not self._free:
            self._grow()
        slot = self._slots[admission.row] = self._free.pop()
        prompt_mask = self._prompt_masks[slot].zero_()
        prompt_mask.index_fill_(0, self._ids(admission.prompt_ids), True)
        self._output_counts[slot].zero_()
        self._add(slot, self._ids(admission.output_ids))

    def release(self, row: int) -> None:
        """Gives back the row's slot, if it has one."""
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def apply(
        self,
        logits: torch.Tensor,
        samples: npt.NDArray[np.int64],
        rows: Int32Column,
        parameters: torch.Tensor,
        drafts: torch.Tensor | None = None,
    ) -> None:
        """Penalizes logits in place.

        Args:
            logits: float32 [num_samples, vocab_size] of the whole batch.
            samples: Which of them are penalized.
            rows: The row of each of those.
            parameters: The matrix of all rows.
            drafts: int64 [num_penalized, num_drafts], tokens that count as output too; -1: none.
        """
        columns: npt.NDArray[np.int64] = np.stack((samples, self._slots_of(rows), rows.astype(np.int64)))
        samples_there, slots, rows_there = indices_on_device(columns, self._device)
        history = (self._prompt_masks, self._output_counts)
        penalize_rows(logits, samples_there, slots, rows_there, *history, parameters, drafts)

    def count(self, rows: Int32Column, tokens: torch.Tensor) -> None:
        """Counts one drawn token of each row, int64 [num_rows]. A row appears once."""
        slots = indices_on_device(self._slots_of(rows), self._device)
        self._output_counts[slots, tokens] += 1

    def count_known(self, row: int, ids: Int32Column) -> None:
        """Counts tokens of a row's output, known on the host."""
        self._add(self._slots[row], indices_on_device(ids, self._device))

    def _add(self, slot: int, ids: torch.Tensor) -> None:
        self._output_counts[slot].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def count_settled(self, rows: Int32Column, tokens: torch.Tensor, settled: torch.Tensor) -> None:
        """Counts those of some drawn tokens that are settled, bool [num_draws]; rows may repeat."""
        slots = indices_on_device(self._slots_of(rows), self._device)
        self._output_counts.index_put_((slots, tokens), settled.to(torch.int32), accumulate=True)

    def _slots_of(self, rows: Int32Column) -> npt.NDArray[np.int64]:
        return np.array([self._slots[row] for row in rows.tolist()], np.int64)

    def _ids(self, data: bytes) -> torch.Tensor:
        return indices_on_device(np.frombuffer(data, np.int32), self._device)

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
