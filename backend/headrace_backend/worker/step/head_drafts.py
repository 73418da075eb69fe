"""A head over what its target computed, with what it keeps from one step to the next.

Owns the states beside the keys: slot i of the cache holds token i with the state of i - 1, and the
state of i for the token behind it. So a prompt that goes on behind a prefix hit, a fork and a row
that was preempted find the state before their first token as they find keys, and copies of blocks
copy it.

    behind the target   states of the step's tokens -> their keys and values
    head of a step      state before the row's last token -> pass -> its own state -> next pass

A pass needs the state that the one before it left, by row; the first one needs the target's.
"""

from __future__ import annotations

import torch

from headrace_backend.layers.step_metadata import GroupMetadata
from headrace_backend.models.draft_head import DraftHead
from headrace_backend.step.plan import ForwardPlan
from headrace_backend.worker.step.kv_caches import allocate_states, cache_bytes, copy_planned_blocks
from headrace_kernels.attention.step import PagedAttentionStep
from headrace_kernels.speculation.kept_states import TokenBlocks, gather_states_before


class HeadDrafts:
    """Implements `DraftingModel`."""

    attends_in_follow = False

    def __init__(self, head: DraftHead, kv_cache: torch.Tensor, num_rows: int) -> None:
        """Allocates the states.

        Args:
            head: The head, joined to its target.
            kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], with the numbers of the
                target's blocks.
            num_rows: Rows of the batch.
        """
        self._head = head
        self.kv_caches = [kv_cache]
        self.num_heads, self.dtype = head.num_heads, head.dtype
        device, num_blocks, block_size = kv_cache.device, kv_cache.shape[0], kv_cache.shape[3]
        # [num_blocks + 1, block_size, hidden_size]: the last block is scratch, for padding.
        self._states = allocate_states(num_blocks + 1, block_size, head.hidden_size, head.dtype, device)
        self._scratch_slot = num_blocks * block_size
        # [num_rows + 1, hidden_size] state before the token that the next pass computes.
        self._carried = torch.zeros(num_rows + 1, head.hidden_size, dtype=head.dtype, device=device)

    @property
    def cache_bytes(self) -> int:
        """Implements `DraftingModel.cache_bytes`."""
        return cache_bytes(self.kv_caches) + self._states.nbytes

    def copy_blocks(self, plan: ForwardPlan) -> None:
        """Implements `DraftingModel.copy_blocks`: states too."""
        copy_planned_blocks(plan, self.kv_caches)
        copy_planned_blocks(plan, [self._states])

    def begin(self, rows: torch.Tensor, positions: torch.Tensor, step: GroupMetadata) -> None:
        """Implements `DraftingModel.begin`."""
        gather_states_before(self._states, positions, _token_blocks(step), self._carried, rows)

    def compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: GroupMetadata
    ) -> torch.Tensor:
        """Implements `DraftingModel.compute`."""
        rows = rows.long()
        hidden: torch.Tensor
        hidden, states = self._head(token_ids, positions, self._carried[rows], self.kv_caches[0], step)
        self._carried.index_copy_(0, rows, states)
        return hidden

    def follow(self, token_ids: torch.Tensor, positions: torch.Tensor, step: GroupMetadata, first: int) -> None:
        """Implements `DraftingModel.follow`: a layer's keys and values need no attention."""
        slots = step.slot_mapping
        kept = slots.masked_fill(slots < 0, self._scratch_slot)
        self._lines.index_copy_(0, kept, self._head.states(first, len(slots)))
        states = self._states.new_empty(len(slots), self._states.shape[2])
        gather_states_before(self._states, positions, _token_blocks(step), states)
        self._head.write_kv(token_ids, positions, states, self.kv_caches[0], slots)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Implements `DraftingModel.logits`."""
        return self._head.logits(hidden)

    def most_likely(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Implements `DraftingModel.most_likely`."""
        return self._head.most_likely(hidden)

    @property
    def _lines(self) -> torch.Tensor:
        """[num_slots, hidden_size]."""
        return self._states.flatten(0, 1)


def _token_blocks(step: GroupMetadata) -> TokenBlocks:
    """Says which blocks a step's tokens have: on a GPU by row, on a CPU by entry."""
    rows = step.rows if isinstance(step, PagedAttentionStep) else None
    return TokenBlocks(step.query_start_loc, rows, step.block_tables)
