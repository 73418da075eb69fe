"""A draft model on a GPU: it follows the model's steps, and drafts at the head of the next one.

Owns the draft model's caches, its own columns of a step, and the passes that draft. Its blocks have
the numbers of the model's, and it computes every token that the model computes, so that prefix
hits, copies of blocks and preemption hold for both.

    head of a step      rows as they stand -> (pass over one token a row -> draw) for each draft
    behind the model    all tokens of the step, the last draft among them, for their keys and values

Nothing here waits for the device or reads from it: where a row stands only the device knows. A pass
is the same launch for each draft, which finds its number in `_place`, so one graph for each size of
the batch serves any number of drafts. Drafts are drawn with the row's own parameters and noise, at
the places of the output that they stand for, as the model will draw there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from headrace_backend.step.plan import ForwardPlan, StepPlan
from headrace_backend.weights.progress import Progress
from headrace_backend.worker.device_copies import staging_memory
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.speculation.drafted_rows import DraftedRows
from headrace_backend.worker.step.buffers import Gathers, StepBuffers, StepInputs, StepLimits
from headrace_backend.worker.step.graphs import StepGraphs
from headrace_backend.worker.step.kv_caches import copy_planned_blocks
from headrace_backend.worker.step.runner import CausalModel
from headrace_backend.worker.step.shape import AttentionSizes, StepShape, smallest_holding
from headrace_kernels.attention.plan import decode_sizes, plan_decode
from headrace_kernels.attention.step import DecodeScratch, DecodeWork, PagedAttentionStep
from headrace_kernels.step_inputs import build_step_inputs

_PASS_QUERY_LEN = 1
# Of a pass: rows, drafts of each, planned positions and places in the output.
_NUM_ROW_COLUMNS = 4


class RowsOnDevice(Protocol):
    """What a GPU keeps of rows between steps (`buffers.DeviceRows`)."""

    scratch_row: int
    # int32 [num_rows + 1, max_blocks]
    block_tables: torch.Tensor
    # int32 [num_rows + 1]
    last_tokens: torch.Tensor
    # int32 [num_rows + 1] positions of the last tokens, as rows stand.
    next_positions: torch.Tensor
    # int32 [num_rows + 1, num_drafts]
    drafts: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _PassColumns:
    """One row each of the batch in a pass that drafts, int32 on the device, padding included."""

    rows: torch.Tensor
    counts: torch.Tensor
    bounds: torch.Tensor
    output_positions: torch.Tensor
    # [num_splits * 4]
    splits: torch.Tensor


class DraftPasses:
    """The passes over one token of each drafted row."""

    def __init__(
        self,
        model: CausalModel,
        kv_caches: list[torch.Tensor],
        sampler: Sampler,
        rows: RowsOnDevice,
        sizes: AttentionSizes,
        max_num_seqs: int,
    ) -> None:
        """Allocates what passes share.

        Args:
            model: The draft model.
            kv_caches: Its caches.
            sampler: The rows' parameters, which the model's own draw reads too.
            rows: Where rows stand; their drafts are written there.
            sizes: Sizes of a layer's attention, of the draft model.
            max_num_seqs: Most rows of a step.
        """
        self._model, self._kv_caches, self._sampler, self._rows = model, kv_caches, sampler, rows
        self._sizes = sizes
        self._device = device = kv_caches[0].device
        _, _, num_kv_heads, self._block_size, head_dim = kv_caches[0].shape
        self._scratch = DecodeScratch.allocate(
            sizes.num_heads, num_kv_heads, head_dim, _PASS_QUERY_LEN, device, sizes.programs
        )
        most_splits = self._num_splits(max_num_seqs)
        self._piece = torch.zeros(_NUM_ROW_COLUMNS * max_num_seqs + 4 * most_splits, dtype=torch.int32, device=device)
        self._numbers = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        # int32 [max_num_seqs] what the next pass computes.
        self._tokens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        # int64 [1] drafts that each row has so far.
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._token_ids, self._positions, self._slots = torch.zeros(
            3, max_num_seqs, dtype=torch.int64, device=device
        )

    def _num_splits(self, num_rows: int) -> int:
        return decode_sizes(num_rows, self._sizes.num_kv_heads, self._sizes.programs).num_splits

    def upload(self, drafted: DraftedRows, num_rows: int) -> None:
        """Sends the columns of a batch that is padded to `num_rows`, behind earlier work."""
        num_splits = self._num_splits(num_rows)
        host = staging_memory(_NUM_ROW_COLUMNS * num_rows + 4 * num_splits, torch.int32, self._device)
        columns = host.numpy()[: _NUM_ROW_COLUMNS * num_rows].reshape(_NUM_ROW_COLUMNS, num_rows)
        columns[0], columns[1:] = self._rows.scratch_row, 0
        columns[:, : drafted.rows.size] = drafted
        lengths = np.zeros(num_rows, np.int32)
        lengths[: drafted.rows.size] = drafted.bounds + drafted.counts
        decode = plan_decode(
            (lengths > 0).astype(np.int32),
            lengths,
            self._sizes.num_kv_heads,
            num_rows,
            max_query_len=_PASS_QUERY_LEN,
            programs=self._sizes.programs,
        )
        host.numpy()[_NUM_ROW_COLUMNS * num_rows :] = decode.splits.reshape(-1)
        self._piece[: host.numel()].copy_(host, non_blocking=True)

    def upload_padding(self, num_rows: int) -> None:
        """Sends columns of a pass in which nothing takes part."""
        self._piece.zero_()
        self._piece[:num_rows] = self._rows.scratch_row
        self._piece[_NUM_ROW_COLUMNS * num_rows :] = -1

    def begin(self, num_rows: int) -> None:
        """Launches what the first pass needs: the rows' last tokens."""
        rows = self._columns(num_rows).rows.long()
        self._tokens[:num_rows] = self._rows.last_tokens[rows]
        self._place.zero_()

    def run(self, num_rows: int) -> None:
        """Launches one pass: computes a token of each row, draws the next, and notes it as draft."""
        columns = self._columns(num_rows)
        rows = columns.rows.long()
        first = self._rows.next_positions[rows]
        # Rows with fewer drafts than others stay at their last one, and write nothing.
        is_active = columns.counts > self._place
        positions = first + torch.minimum(self._place, columns.counts - 1).clamp(min=0).int()
        entries = torch.where(is_active, self._numbers[:num_rows], -1)
        token_ids, places, slots = (
            column[:num_rows] for column in (self._token_ids, self._positions, self._slots)
        )
        build_step_inputs(
            self._tokens[:num_rows],
            entries,
            positions,
            columns.rows,
            self._rows.last_tokens,
            self._rows.block_tables,
            self._block_size,
            token_ids,
            places,
            slots,
        )
        step = self._attention_step(columns, positions + 1, slots)
        hidden = self._model(token_ids, places, self._kv_caches, step)
        output_positions = columns.output_positions - (columns.bounds - first) + self._place.int()
        logits = self._model.logits(hidden).float()
        drawn, _ = self._sampler.draw_all(logits, columns.rows, output_positions)
        self._tokens[:num_rows] = drawn.int()
        self._rows.drafts[rows, self._place] = drawn.int()
        self._place.add_(1)

    def _columns(self, num_rows: int) -> _PassColumns:
        ends = [number * num_rows for number in range(_NUM_ROW_COLUMNS + 1)]
        views = [self._piece[start:end] for start, end in zip(ends, ends[1:], strict=False)]
        splits = self._piece[ends[-1] : ends[-1] + 4 * self._num_splits(num_rows)]
        return _PassColumns(*views, splits)

    def _attention_step(self, columns: _PassColumns, seq_lens: torch.Tensor, slots: torch.Tensor) -> PagedAttentionStep:
        return PagedAttentionStep(
            query_start_loc=self._numbers[: slots.numel() + 1],
            seq_lens=seq_lens,
            rows=columns.rows,
            block_tables=self._rows.block_tables,
            slot_mapping=slots,
            block_size=self._block_size,
            decode=DecodeWork(columns.splits.view(-1, 4), _PASS_QUERY_LEN, self._scratch),
            prefill=None,
        )


class GpuDraftModel:
    """A small model beside the one that is served."""

    def __init__(
        self,
        model: CausalModel,
        kv_caches: list[torch.Tensor],
        sampler: Sampler,
        rows: RowsOnDevice,
        limits: StepLimits,
        sizes: AttentionSizes,
        shapes: Sequence[StepShape] = (),
        batch_sizes: Sequence[int] = (),
    ) -> None:
        """Allocates what is shared by all steps.

        Args:
            model: The draft model, whole on every rank.
            kv_caches: Per layer [num_blocks, 2, num_kv_heads, block_size, head_dim], with the
                numbers of blocks of the model's.
            sampler: The rows' parameters, which the model's own draw reads too.
            rows: Where rows stand; their drafts are written there.
            limits: Limits of a step.
            sizes: Sizes of a layer's attention, of the draft model.
            shapes: Steps that are followed by replaying graphs, smallest first.
            batch_sizes: Numbers of rows that are drafted for by replaying graphs, ascending.
        """
        self._model, self._kv_caches, self._rows, self._sizes = model, kv_caches, rows, sizes
        self._device = kv_caches[0].device
        about_model = (model.dtype, model.hidden_size, (0, 0))
        self._buffers = StepBuffers(limits, sizes, kv_caches[0], *about_model, gather_bytes=0)
        self._passes = DraftPasses(model, kv_caches, sampler, rows, sizes, limits.max_num_seqs)
        self._shapes, self._batch_sizes = tuple(shapes), tuple(batch_sizes)
        self._graphs = StepGraphs(self._device) if self._device.type == "cuda" else None

    def copy_blocks(self, plan: ForwardPlan) -> None:
        """Copies the plan's blocks in the draft model's caches."""
        copy_planned_blocks(plan, self._kv_caches)

    @torch.inference_mode()
    def draft(self, drafted: DraftedRows) -> None:
        """Launches the drafting of what follows the rows' last tokens; drafts go to the rows."""
        size = drafted.rows.size
        num_rows = next((batch for batch in self._batch_sizes if batch >= size), size)
        self._passes.upload(drafted, num_rows)
        self._launch(("begin", num_rows), functools.partial(self._passes.begin, num_rows))
        for _ in range(int(drafted.counts.max())):
            self._launch(("pass", num_rows), functools.partial(self._passes.run, num_rows))

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """Launches the pass over a step's tokens, for their keys and values.

        The rows stand as they did when the model computed the step.
        """
        needed = StepShape.of(plan, self._sizes)
        shape = smallest_holding(self._shapes, needed) or needed
        gathers = self._buffers.upload(plan, shape, self._rows.scratch_row, is_captured=True)
        assert not any(gathers), "nothing is gathered for a draft model"
        self._launch(shape, functools.partial(self._compute, shape, ()))

    @torch.inference_mode()
    def capture(self, progress: Progress) -> None:
        """Captures graphs of all shapes and batch sizes.

        Args:
            progress: Called with (phase, done, total, unit).
        """
        if self._graphs is None:
            return
        total = len(self._shapes) + len(self._batch_sizes)
        for done, shape in enumerate(reversed(self._shapes)):
            progress("draft graphs", done, total, "shapes")
            self._buffers.upload_padding(shape, self._rows.scratch_row)
            self._graphs.capture(shape, functools.partial(self._compute, shape, ()))
        for done, num_rows in enumerate(reversed(self._batch_sizes), len(self._shapes)):
            progress("draft graphs", done, total, "shapes")
            self._passes.upload_padding(num_rows)
            for name, run in (("begin", self._passes.begin), ("pass", self._passes.run)):
                self._graphs.capture((name, num_rows), functools.partial(run, num_rows))
        progress("draft graphs", total, total, "shapes")

    @property
    def num_captured(self) -> int:
        """Graphs captured so far."""
        return 0 if self._graphs is None else self._graphs.num_captured

    def _compute(self, shape: StepShape, gathers: Gathers) -> None:
        inputs: StepInputs = self._buffers.inputs(shape, self._rows, gathers)
        self._model(inputs.token_ids, inputs.positions, self._kv_caches, inputs.attention)

    def _launch(self, key: Any, run: Callable[[], None]) -> None:
        if self._graphs is not None and key in self._graphs:
            self._graphs.replay(key)
        else:
            run()
