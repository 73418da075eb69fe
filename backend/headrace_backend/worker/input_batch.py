"""The rows' state that a forward pass needs, and the model's inputs built from it and a plan.

Owns block tables and last sampled tokens, one entry per row. Does not own sampling parameters (`row_parameters`) nor the cache itself (`model_runner`).
A plan's columns become flattened tensors by numpy operations over the whole batch, never by a loop over rows. All that depends on
sampled tokens stays on the device, so that a step can be launched before the step before it was read.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from headrace_backend.step_plan import ForwardPlan, Int32Column
from headrace_kernels.attention import AttentionMetadata

Int64Column = npt.NDArray[np.int64]


@dataclasses.dataclass(slots=True)
class ModelInput:
    """What the model computes in one step."""

    # int64 [num_tokens]
    token_ids: torch.Tensor
    # int64 [num_tokens]
    positions: torch.Tensor
    metadata: AttentionMetadata


class BlockTables:
    """Block numbers per row, on the host, where slots are looked up, and on the device, where attention reads them."""

    def __init__(self, num_rows: int, max_blocks: int, num_blocks: int, device: torch.device) -> None:
        self._num_blocks = num_blocks
        self.host = np.zeros((num_rows, max_blocks), np.int32)
        # On a CPU the same memory.
        self._tensor = torch.from_numpy(self.host).to(device)
        self._is_shared = device.type == "cpu"

    def update(self, plan: ForwardPlan) -> None:
        """Applies the plan's table updates."""
        if not plan.table_rows.size:
            return
        max_blocks = self.host.shape[1]
        assert int((plan.table_starts + plan.table_counts).max()) <= max_blocks, (
            "a block table is longer than the context"
        )
        assert 0 <= plan.table_blocks.min() and plan.table_blocks.max() < self._num_blocks, "block number out of range"
        starts = plan.table_rows.astype(np.int64) * max_blocks + plan.table_starts
        places = _ranges(starts, plan.table_counts)
        self.host.reshape(-1)[places] = plan.table_blocks
        if not self._is_shared:
            device = self._tensor.device
            blocks = torch.from_numpy(plan.table_blocks.copy()).to(device)
            self._tensor.view(-1)[torch.from_numpy(places).to(device)] = blocks

    def gather(self, rows: Int32Column, num_blocks: int) -> torch.Tensor:
        """The first `num_blocks` entries of some rows: int32 [num_rows, num_blocks]. Past a row's own blocks it holds old, valid numbers."""
        if self._is_shared:
            return torch.from_numpy(self.host[rows, :num_blocks])
        return self._tensor[torch.from_numpy(rows.astype(np.int64)).to(self._tensor.device), :num_blocks]


class InputBatch:
    """Turns plans into model inputs."""

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, num_blocks: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._tables = BlockTables(num_rows, -(-max_model_len // block_size), num_blocks, device)
        # The last sampled token per row.
        self._last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def update_tables(self, plan: ForwardPlan) -> None:
        """Applies the plan's block table updates; before `build`, and before blocks are copied."""
        self._tables.update(plan)

    def build(self, plan: ForwardPlan) -> ModelInput:
        """The inputs of a plan with at least one row."""
        ends = np.cumsum(plan.counts, dtype=np.int64)
        positions = _ranges(plan.starts, plan.counts)
        return ModelInput(
            token_ids=self._token_ids(plan, ends),
            positions=torch.from_numpy(positions).to(self._device),
            metadata=self._metadata(plan, ends, positions),
        )

    def remember(self, rows: Int32Column, tokens: torch.Tensor) -> None:
        """Notes the tokens just drawn, int64 [num_samples], as their rows' last."""
        self._last_tokens.index_copy_(0, torch.from_numpy(rows.astype(np.int64)).to(self._device), tokens)

    def _token_ids(self, plan: ForwardPlan, ends: Int64Column) -> torch.Tensor:
        """Ids from the plan, and the last sampled token where the plan does not know it."""
        unknown = np.flatnonzero(plan.known_counts < plan.counts)
        if not unknown.size:
            return torch.from_numpy(plan.token_ids.astype(np.int64)).to(self._device)
        rows = torch.from_numpy(plan.rows[unknown].astype(np.int64)).to(self._device)
        sampled = self._last_tokens[rows]
        if not plan.token_ids.size:
            # Every row decodes.
            return sampled
        places = ends[unknown] - 1
        ids = np.insert(plan.token_ids.astype(np.int64), places - np.arange(places.size), 0)
        return torch.from_numpy(ids).to(self._device).index_copy_(0, torch.from_numpy(places).to(self._device), sampled)

    def _metadata(self, plan: ForwardPlan, ends: Int64Column, positions: Int64Column) -> AttentionMetadata:
        block_size, device = self._block_size, self._device
        query_start_loc = np.zeros(ends.size + 1, np.int32)
        query_start_loc[1:] = ends
        seq_lens = plan.starts + plan.counts
        max_seq_len = int(seq_lens.max())
        token_rows = np.repeat(plan.rows, plan.counts)
        slots = (
            self._tables.host[token_rows, positions // block_size].astype(np.int64) * block_size
            + positions % block_size
        )
        return AttentionMetadata(
            query_start_loc=torch.from_numpy(query_start_loc).to(device),
            seq_lens=torch.from_numpy(seq_lens).to(device),
            block_tables=self._tables.gather(plan.rows, -(-max_seq_len // block_size)),
            slot_mapping=torch.from_numpy(slots).to(device),
            block_size=block_size,
            max_query_len=int(plan.counts.max()),
            max_seq_len=max_seq_len,
            query_lens_cpu=plan.counts,
            seq_lens_cpu=seq_lens,
        )


def _ranges(starts: npt.NDArray[np.integer], counts: Int32Column) -> Int64Column:
    """[starts[0], starts[0] + 1, ... counts[0] of them, then starts[1] ...] as int64 [sum(counts)]."""
    ends = np.cumsum(counts, dtype=np.int64)
    places: Int64Column = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
    return places
