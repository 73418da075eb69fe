"""A drafting model on a GPU: it follows the model's steps, and drafts at the head of the next one.

Owns when its passes are launched (`draft_passes`), and from which graphs. Its blocks have the
numbers of the model's, and it computes every token that the model computes before it drafts behind
it, so that prefix hits, copies of blocks and preemption hold for both.

    head of a step      what rows are behind -> their keys and values; then rows as they stand ->
                        (pass over one token a row -> draw) for each draft
    behind the model    all tokens of the step, the last draft among them, for their keys and
                        values; or they are noted until somebody drafts (`deferred_steps`)

Nothing here waits for the device or reads from it: where a row stands only the device knows. Steps
of decodes that the model replays from a graph have one here too: launched kernel by kernel, that
took three quarters of the hosts' time for an 8B draft of four ranks (docs/experiments.md, "a draft
of 8B beside 70B on four"). What catches up has graphs of its own sizes (`followed_passes`), which
steps with prompts are padded to as well. Drafts are drawn with the row's own parameters and noise,
at the places of the output that they stand for, as the model will draw there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import torch

from headrace_backend.layers.step_metadata import StepMetadata, StepPieces
from headrace_backend.parallel.collectives import Collectives
from headrace_backend.step.plan import Int32Column, StepPlan
from headrace_backend.weights.progress import Progress
from headrace_backend.worker.device_copies import copy_to_device, staging_memory
from headrace_backend.worker.plan_columns import Entries
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.speculation.deferred_steps import DeferredSteps
from headrace_backend.worker.speculation.drafted_rows import DraftedRows
from headrace_backend.worker.speculation.drafter import ComputedTokens
from headrace_backend.worker.speculation.followed_passes import FollowedHeads, FollowedPasses, FollowedTokens
from headrace_backend.worker.speculation.noted_tokens import NotedTokens
from headrace_backend.worker.speculation.speculation import RowDrafts
from headrace_backend.worker.step.draft_passes import BlockTables, DraftPasses
from headrace_backend.worker.step.drafting_model import DraftingModel
from headrace_backend.worker.step.graphs import StepGraphs
from headrace_backend.worker.step.shape import AttentionSizes
from headrace_kernels.attention.plan import (
    MAX_DECODE_QUERY_LEN,
    QUERY_LEN_CLASSES,
    decode_sizes,
    drafted_query_len,
    plan_decode,
    plan_prefill,
)
from headrace_kernels.attention.step import (
    DecodeScratch,
    DecodeWork,
    PagedAttentionStep,
    PrefillWork,
    ShareScratch,
)


def _query_len_of(step: ComputedTokens) -> int:
    """Query tokens of an entry that the decode kernel takes in a graph's step of decodes."""
    assert isinstance(step.metadata, PagedAttentionStep) and step.metadata.decode is not None, "a GPU's decodes"
    return step.metadata.decode.max_query_len


class GpuDraftModel:
    """Implements `HeadDrafter` with a small model or a head beside the model that is served."""

    def __init__(
        self,
        model: DraftingModel,
        sampler: Sampler,
        rows: RowDrafts,
        tables: BlockTables,
        sizes: AttentionSizes,
        batch_sizes: Sequence[int] = (),
        together: Collectives | None = None,
        deferred: DeferredSteps | None = None,
        followed_sizes: tuple[int, ...] = (),
    ) -> None:
        """Allocates what is shared by all steps.

        Args:
            model: The drafting model over caches with the numbers of blocks of the model's.
            sampler: The rows' parameters, which the model's own draw reads too.
            rows: Last tokens of rows and their positions.
            tables: The rows' blocks.
            sizes: Sizes of a layer's attention, of the drafting model.
            batch_sizes: Numbers of rows that are drafted for by replaying graphs, ascending.
            together: The ranks' collectives, by which all take rank 0's drafts; None: one rank.
            deferred: Which steps need not be followed yet, of a model that needs no more of them
                than their tokens; None: all are followed at once.
            followed_sizes: Tokens of passes that catch up, and of those behind steps with prompts,
                that are replayed from graphs, ascending; none if no step is deferred.
        """
        self.num_drafts = rows.tokens_per_row - 1
        self._model, self._sizes = model, sizes
        kv_cache = model.kv_caches[0]
        self._device = kv_cache.device
        # Of the longest entries that the decode kernel takes: a row's last token and its drafts. In
        # graphs it takes those of the model's step, up to so many query tokens.
        self._query_len = next(
            size for size in QUERY_LEN_CLASSES if size >= min(rows.tokens_per_row, MAX_DECODE_QUERY_LEN)
        )
        num_heads, num_kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, kv_cache.shape[4]
        self._longest = max(self._query_len, drafted_query_len(rows.tokens_per_row, num_heads // num_kv_heads))
        scratch = DecodeScratch.allocate(num_heads, num_kv_heads, head_dim, self._longest, self._device, sizes.programs)
        self._scratch = scratch
        self._passes = DraftPasses(model, sampler, rows, tables, sizes, scratch)
        self._batch_sizes, self._together = tuple(batch_sizes), together
        self._graphs = StepGraphs(self._device) if self._device.type == "cuda" else None
        # Splits of a step that is followed from a graph, for the most rows.
        most_splits = decode_sizes(tables.scratch_row, num_kv_heads, sizes.programs).num_splits
        self._splits = torch.full((most_splits, 4), -1, dtype=torch.int32, device=self._device)
        self._deferred = deferred
        self._noted = None if deferred is None else NotedTokens(deferred, tables, kv_cache.shape[3])
        shares = (sizes.num_heads, [(num_kv_heads, head_dim)], model.dtype, self._device, sizes.tile_tokens)
        self._share_scratch = ShareScratch.allocate(*shares)
        heads = FollowedHeads(num_heads, num_kv_heads, sizes.tile_tokens, self._share_scratch, sizes.copies_blocks)
        where = (tables.scratch_row, tables.group_tables[0], kv_cache.shape[3])
        self._followed = FollowedPasses(followed_sizes, heads, *where)

    def begin(self, plan: StepPlan) -> None:
        """Implements `HeadDrafter.begin`: the plan's blocks are copied."""
        if self._deferred is not None:
            self._deferred.begin(plan)
        self._model.copy_blocks(plan.forward)

    def draft(self, drafted: DraftedRows) -> torch.Tensor:
        """Implements `HeadDrafter.draft`: rows that are behind catch up first."""
        if self._deferred is not None:
            self._catch_up(self._deferred.drafted(drafted))
        size = drafted.rows.size
        num_rows = next((batch for batch in self._batch_sizes if batch >= size), size)
        self._passes.upload(drafted, num_rows)
        self._launch(("begin", num_rows), functools.partial(self._passes.begin, num_rows))
        for _ in range(int(drafted.counts.max())):
            self._launch(("pass", num_rows), functools.partial(self._passes.run, num_rows))
        drafts = self._passes.drafts[:size]
        return drafts if self._together is None else self._together.all_gather(drafts)[0]

    def follow(self, plan: StepPlan, computed: ComputedTokens) -> None:
        """Implements `HeadDrafter.follow`: launches keys and values of the same tokens.

        A step that may be deferred has its tokens noted alone.
        """
        if self._deferred is not None and self._defer(self._deferred, plan, computed.token_ids):
            return
        whole, (token_ids, positions, metadata, _) = Entries.of(plan.forward), computed
        if isinstance(metadata, StepPieces):
            first = metadata.first
            tokens = (token_ids[:first], positions[:first]), (token_ids[first:], positions[first:])
            for entries, columns, part in zip(whole.cut(first), tokens, metadata.metadata, strict=True):
                self._compute(entries, *columns, part, 0 if part is metadata.metadata[0] else first)
        elif self._graphs is not None and computed.graph is not None and ("follow", computed.graph) in self._graphs:
            if self._model.attends_in_follow:
                self._upload_splits(whole, computed)
            self._graphs.replay(("follow", computed.graph))
        else:
            self._follow_padded(whole, computed)

    def _follow_padded(self, whole: Entries, computed: ComputedTokens) -> None:
        """Follows a step that has no graph of its own: in a larger one, or kernel by kernel."""
        token_ids, positions, step, _ = computed
        assert isinstance(step, PagedAttentionStep), "a GPU's step, whole"
        size = self._captured_size(whole)
        if size is None:
            self._compute(whole, token_ids, positions, step, 0)
        else:
            self._followed.fill(size, whole, FollowedTokens(token_ids, positions, step.slot_mapping), step.seq_lens)
            self._launch(("followed", size), functools.partial(self._run_followed, size))

    def _defer(self, deferred: DeferredSteps, plan: StepPlan, token_ids: torch.Tensor) -> bool:
        """Notes tokens of rows that are behind or get so; whether the step needs nothing more."""
        assert self._noted is not None, "made together"
        self._catch_up(deferred.overdue(plan))
        noted = deferred.noted(plan)
        if noted is not None:
            self._noted.note(noted, token_ids)
        return deferred.defers

    def _catch_up(self, pieces: Iterator[Entries]) -> None:
        """Launches keys and values of noted tokens, a pass for each piece."""
        assert self._noted is not None, "made together"
        for entries in pieces:
            size = self._captured_size(entries)
            if size is None:
                self._compute(entries, *self._noted.step_of(entries), 0)
            else:
                self._followed.fill(size, entries, self._noted.tokens_of(entries, size))
                self._launch(("followed", size), functools.partial(self._run_followed, size))

    def _captured_size(self, entries: Entries) -> int | None:
        """Tokens of the captured pass that the entries are padded to; None: there is none."""
        size = self._followed.size_of(entries.num_tokens)
        return size if self._graphs is not None and ("followed", size) in self._graphs else None

    def _run_followed(self, size: int) -> None:
        """Launches keys and values of the tokens that a pass of a captured size was filled with."""
        self._model.follow(*self._followed.inputs(size), 0)

    def _upload_splits(self, entries: Entries, computed: ComputedTokens) -> None:
        """Sends the splits of a step that is followed from a graph, behind earlier work."""
        assert isinstance(computed.metadata, PagedAttentionStep), "a GPU's step"
        splits = self._planned_splits(entries, computed.metadata, _query_len_of(computed))
        host = staging_memory(splits.shape, torch.int32, self._device)
        host.numpy()[...] = splits
        self._splits[: len(splits)].copy_(host, non_blocking=True)

    @torch.inference_mode()
    def capture(
        self, progress: Progress, steps: Mapping[Hashable, ComputedTokens], pad: Callable[[Hashable], None]
    ) -> None:
        """Captures the passes of all sizes, and what follows decodes that have a graph.

        Arguments are those of `CapturesPasses.capture`.
        """
        if self._graphs is None:
            return
        taken = {key: step for key, step in steps.items() if self._takes(step)}
        num_followed = len(self._followed.sizes)
        total = num_followed + len(self._batch_sizes) + len(taken)
        # The largest comes first, in whose memory the others find room.
        for done, size in enumerate(reversed(self._followed.sizes)):
            progress("draft graphs", done, total, "sizes")
            self._followed.fill_padding(size)
            self._capture(self._graphs, ("followed", size), functools.partial(self._run_followed, size))
        for done, num_rows in enumerate(reversed(self._batch_sizes), num_followed):
            progress("draft graphs", done, total, "sizes")
            self._passes.upload_padding(num_rows)
            for name, run in (("begin", self._passes.begin), ("pass", self._passes.run)):
                self._capture(self._graphs, (name, num_rows), functools.partial(run, num_rows))
        by_size = sorted(taken.items(), key=lambda step: -len(step[1].token_ids))
        for done, (key, computed) in enumerate(by_size, num_followed + len(self._batch_sizes)):
            progress("draft graphs", done, total, "sizes")
            pad(key)
            self._capture(self._graphs, ("follow", key), functools.partial(self._follow_captured, computed))
        progress("draft graphs", total, total, "sizes")

    def _takes(self, step: ComputedTokens) -> bool:
        """Whether the decode kernel takes all entries of a step of decodes."""
        return not self._model.attends_in_follow or _query_len_of(step) <= self._longest

    def _capture(self, graphs: StepGraphs, key: Hashable, run: Callable[[], None]) -> None:
        graphs.prepare(run)
        graphs.capture(key, run)

    def _follow_captured(self, computed: ComputedTokens) -> None:
        """Launches keys and values of a step whose splits are uploaded."""
        step = computed.metadata
        assert isinstance(step, PagedAttentionStep), "a GPU's step, whole"
        if self._model.attends_in_follow:
            num_splits = decode_sizes(step.rows.shape[0], self._sizes.num_kv_heads, self._sizes.programs).num_splits
            decode = DecodeWork(self._splits[:num_splits], _query_len_of(computed), self._scratch)
            step = dataclasses.replace(step, decode=decode, prefill=None)
        self._model.follow(computed.token_ids, computed.positions, step, 0)

    @property
    def num_captured(self) -> int:
        """Graphs captured so far."""
        return 0 if self._graphs is None else self._graphs.num_captured

    def _compute(
        self, entries: Entries, token_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata, first: int
    ) -> None:
        """Computes keys and values of some entries, whose slots are those of the model's step."""
        assert isinstance(step, PagedAttentionStep), "a GPU's step"
        if not entries.rows.size:
            return
        if self._model.attends_in_follow:
            decode, prefill = self._decode_work(entries, step), self._prefill_work(entries)
            step = dataclasses.replace(step, decode=decode, prefill=prefill)
        self._model.follow(token_ids, positions, step, first)

    def _decode_work(self, entries: Entries, step: PagedAttentionStep) -> DecodeWork | None:
        if (entries.counts > self._query_len).all():
            return None
        splits = copy_to_device(self._planned_splits(entries, step, self._query_len), self._device)
        return DecodeWork(splits, self._query_len, self._scratch)

    def _planned_splits(self, entries: Entries, step: PagedAttentionStep, query_len: int) -> Int32Column:
        """The splits of entries of up to `query_len` tokens, as `DecodeColumns` has them."""
        return plan_decode(
            entries.counts,
            entries.seq_lens,
            self._sizes.num_kv_heads,
            step.rows.shape[0],
            max_query_len=query_len,
            programs=self._sizes.programs,
        ).splits

    def _prefill_work(self, entries: Entries) -> PrefillWork | None:
        if (entries.counts <= self._query_len).all():
            return None
        sizes = self._sizes
        heads = (sizes.num_heads, sizes.num_kv_heads, sizes.tile_tokens)
        columns = plan_prefill(
            entries.counts,
            entries.seq_lens,
            *heads,
            max_query_len=self._query_len,
            persistent=sizes.copies_blocks,
        )
        tiles, shares = (copy_to_device(column, self._device) for column in (columns.tiles, columns.shares))
        # As in graphs, so that nothing else is compiled for what is launched outside of them.
        return PrefillWork(tiles, None, sizes.tile_tokens, shares, self._share_scratch)

    def _launch(self, key: Hashable, run: Callable[[], None]) -> None:
        if self._graphs is not None and key in self._graphs:
            self._graphs.replay(key)
        else:
            run()
