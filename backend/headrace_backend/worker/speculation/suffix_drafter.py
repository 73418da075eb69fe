"""Drafts from the row's own tokens and from earlier answers of the same tenant.

Owns the history that is looked up, a line of tokens for each row, and the memories of tenants,
rings of the answers of their rows, all on the device. An answer joins its tenant's memory when its
row is given back; other tenants' rows never look there, so that nobody can tell from the speed of
an answer what others were answered. Bounded: a memory keeps the latest MEMORY_TOKENS
tokens, and of more than MAX_MEMORIES tenants the one that was idle longest loses its memory. The
lookup is `headrace_kernels.speculation.suffix`. It helps where answers repeat each other: agents,
forms, tests of one prompt, translations of similar pages.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch

from headrace_backend.step.plan import Int32Column, RowAdmission, StepPlan
from headrace_backend.worker.device_copies import copy_to_device
from headrace_backend.worker.speculation.drafter import ComputedTokens, SettledTokens
from headrace_kernels.speculation.ngram import append_tokens
from headrace_kernels.speculation.suffix import SEPARATOR, propose_suffix, remember

# 256 KiB each.
MEMORY_TOKENS = 1 << 16
MAX_MEMORIES = 64


def memory_bytes(num_rows: int, max_model_len: int) -> int:
    """Bytes that histories and memories take on the device."""
    return 4 * num_rows * max_model_len + 4 * (MAX_MEMORIES + 1) * MEMORY_TOKENS


class TenantMemories:
    """Which memory each tenant has."""

    def __init__(self, count: int) -> None:
        """Starts with `count` free memories; one more, with this number, stays empty."""
        self.none = count
        self._free = list(range(count))
        # Idle longest first: the memory, and rows of the tenant that are taken.
        self._taken: OrderedDict[bytes, int] = OrderedDict()
        self._num_rows: dict[bytes, int] = {}

    def enter(self, tenant: bytes) -> tuple[int, bool]:
        """Adds a row of a tenant; gives its memory, and whether that was another tenant's.

        The memory is `none` where all belong to tenants with rows.
        """
        is_new = tenant not in self._taken
        if is_new and not self._free:
            idle = next((other for other in self._taken if not self._num_rows.get(other)), None)
            if idle is None:
                return self.none, False
            self._free.append(self._taken.pop(idle))
        if is_new:
            self._taken[tenant] = self._free.pop()
        self._taken.move_to_end(tenant)
        self._num_rows[tenant] = self._num_rows.get(tenant, 0) + 1
        return self._taken[tenant], is_new

    def leave(self, tenant: bytes) -> None:
        """Takes off a row that `enter` gave a memory."""
        self._num_rows[tenant] -= 1
        if not self._num_rows[tenant]:
            del self._num_rows[tenant]


class SuffixDrafter:
    """Implements `Drafter`."""

    wants_hidden = False

    def __init__(
        self,
        num_drafts: int,
        num_rows: int,
        max_model_len: int,
        device: torch.device,
        memory_tokens: int = MEMORY_TOKENS,
        max_memories: int = MAX_MEMORIES,
    ) -> None:
        """Allocates histories and memories.

        Args:
            num_drafts: Tokens to propose for each row.
            num_rows: Rows of the batch.
            max_model_len: Tokens of the longest sequence.
            device: Device of the drafts.
            memory_tokens: Tokens of a tenant's memory.
            max_memories: Tenants that have one.
        """
        self.num_drafts = num_drafts
        self._device = device
        self._history = torch.zeros(num_rows, max_model_len, dtype=torch.int32, device=device)
        # int64 [num_rows] tokens of each row's history.
        self._lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._memory = torch.full((max_memories + 1, memory_tokens), SEPARATOR, dtype=torch.int32, device=device)
        self._ends = torch.zeros(max_memories + 1, dtype=torch.int64, device=device)
        self._memories = TenantMemories(max_memories)
        # Of the rows that are taken: tenant, memory, and tokens of the prompt.
        self._rows: dict[int, tuple[bytes, int, int]] = {}
        self._slots: Int32Column = np.full(num_rows, max_memories, np.int32)

    def admit(self, admissions: list[RowAdmission]) -> None:
        """Implements `Drafter.admit`; admissions bring all tokens that the engine knows."""
        self._give_back([admission.row for admission in admissions])
        for admission in admissions:
            slot, is_new = self._memories.enter(admission.tenant)
            if is_new:
                self._memory[slot].fill_(SEPARATOR)
                self._ends[slot] = 0
            tokens = np.frombuffer(admission.prompt_ids + admission.output_ids, np.int32)
            self._history[admission.row, : tokens.size].copy_(copy_to_device(tokens, self._device))
            self._lengths[admission.row] = tokens.size
            self._rows[admission.row] = admission.tenant, slot, len(admission.prompt_ids) // 4
            self._slots[admission.row] = slot

    def follow(self, plan: StepPlan, computed: ComputedTokens) -> None:
        """Implements `Drafter.follow`: answers of rows that were given back are remembered.

        What nobody drew joins its row's history.
        """
        for row, first, ids in plan.forward.forced_tokens():
            self._history[row, first : first + ids.size].copy_(copy_to_device(ids, self._device))
        admitted = {admission.row for admission in plan.admissions}
        self._give_back([row for row in plan.released_rows.tolist() if row not in admitted])

    def propose(self, settled: SettledTokens) -> torch.Tensor:
        """Implements `Drafter.propose`."""
        append_tokens(self._history, settled.rows, settled.positions, settled.tokens)
        lengths = settled.positions + settled.counts
        self._lengths[settled.rows.long()] = lengths
        if not settled.num_wanted:
            return torch.zeros(len(settled.rows), self.num_drafts, dtype=torch.int32, device=self._device)
        slots = copy_to_device(self._slots[settled.rows_on_host], self._device)
        return propose_suffix(self._history, settled.rows, lengths, self._memory, slots, self.num_drafts)

    def reset(self) -> None:
        """Implements `Drafter.reset`; what rows had is not remembered: a step of theirs raised."""
        for tenant, slot, _ in self._rows.values():
            if slot != self._memories.none:
                self._memories.leave(tenant)
        self._rows.clear()

    def _give_back(self, rows: list[int]) -> None:
        """Has the answers of those rows that are taken remembered."""
        left = {row: self._rows.pop(row) for row in rows if row in self._rows}
        kept = {row: taken for row, taken in left.items() if taken[1] != self._memories.none}
        for tenant, _, _ in kept.values():
            self._memories.leave(tenant)
        if kept:
            columns = (np.array(list(kept), np.int32), np.array([slot for _, slot, _ in kept.values()], np.int32))
            row_column, slots = (copy_to_device(column, self._device) for column in columns)
            firsts = copy_to_device(np.array([first for _, _, first in kept.values()], np.int64), self._device)
            remember(self._memory, self._ends, slots, self._history, row_column, firsts, self._lengths)
