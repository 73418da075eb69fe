"""How many entries each column of a step has.

Exactly as many as its plan needs, or as many as a graph was captured for.

Owns the sizes, nothing else; the columns are `columns`. A plan *fits* a larger shape: what is left
over is padding, for which nothing is computed that anybody reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

import torch

from headrace_backend.step.plan import StepPlan
from headrace_backend.worker.plan_columns import Entries
from headrace_backend.worker.speculation.draws import num_drafts
from headrace_kernels.attention.plan import (
    FEW_DECODES,
    MAX_DECODE_QUERY_LEN,
    TARGET_PROGRAMS,
    decode_programs,
    decode_sizes,
    drafted_query_len,
    few_decode_programs,
    filling_query_len,
    gathered_tokens,
    gathering_pays,
    max_prefill_tiles,
    prefill_tile_tokens,
    query_part,
)
from headrace_kernels.attention.prefill_sm90.launch import takes_blocks_sm90
from headrace_kernels.attention.quantized_kv import is_quantized

# Keys that a prompt's token sees on average from which gathering them is worth leaving the graphs,
# where nothing is gathered and threads read blocks: at 8,192, 512 tokens win 3.3 of about 20 ms in
# 32 layers. Derived, not measured.
_GATHER_FROM_KEYS = 8192
# The same of steps of so many tokens and more, of whose time attention is a larger part: a prompt
# of 2,048 tokens takes 68 ms either way on one of four ranks of a 70B Llama in FP8, one of 4,096
# takes 144 from a graph and 126 gathered (H200, 2026-11-22).
_LONG_STEP_TOKENS, _GATHER_LONG_FROM_KEYS = 1024, 1536
# Tokens of steps in which rows have some of their drafts: with 32 rows, 2 to 5 drafts each were
# padded to 144 or 288 tokens, and a fixed number of 4 was 1.2 times as fast (H200, 2026-11-23).
# With 64 rows, four drafts each would be padded from 320 tokens (8.6 ms) to 384 (9.7; 2026-11-24).
_DRAFTED_TOTALS = (*range(16, 257, 16), 320, 384, 512, 640, 768, 1024)
# Larger steps with drafts take so long that launching their kernels hides behind them (1,024 tokens
# of an 8B Llama 24.7 ms, H200, 2026-11-24); those of the kernel for the longest rows, which many
# rows hardly ever have all their drafts for, already from here on.
_MOST_DRAFTED_TOKENS, _MOST_LONGEST_TOKENS = 1024, 512
# Of a full step that is captured at most one token in so many is padding.
_FULL_PADDING = 32
# Rows of the second graph of a mixed step, which most steps have fewer than. A graph of all rows
# draws a token for each, and computes the last layer for each, whoever is there: with 512 rows 512
# tokens of an 8B model take an H200 12.7 ms, and with 128 12.1 (2026-11-30).
_FEW_ROWS, _MOST_TOKENS_OF_FEW_ROWS = 128, 768


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What attention's division of work depends on.

    Layers with other heads than these cut prefill tiles further for themselves.
    """

    num_heads: int
    # Of the layers with the fewest.
    num_kv_heads: int
    # Query tokens of a prefill tile, of the layers with the most.
    tile_tokens: int
    # Of the decode kernel, that fill a card, and in steps of up to `FEW_DECODES` decodes.
    programs: int = TARGET_PROGRAMS
    few_programs: int = TARGET_PROGRAMS
    # Most tokens that a row computes which decodes: its last one, and drafts behind it.
    tokens_per_row: int = 1
    # Whether any layer's cache is.
    is_quantized: bool = False
    # Whether the copy engine brings every layer's blocks to chunks: gathering wins too little then
    # to leave a graph.
    copies_blocks: bool = False

    def part_len(self, query_len: int, num_tokens: int) -> int:
        """Query tokens that a program of the decode kernel takes, in a step of so many tokens."""
        return query_part(query_len, self.num_heads // self.num_kv_heads, num_tokens, self.is_quantized)

    def programs_of(self, query_len: int, num_tokens: int) -> int:
        """Programs of the decode kernel for so many query tokens, in a step of so many tokens."""
        return self.few_programs if query_len == 1 and num_tokens <= FEW_DECODES else self.programs

    @property
    def drafted_query_len(self) -> int:
        """Query tokens of an entry that the decode kernel takes in steps with drafts.

        Entries with more are the prefill kernel's.
        """
        return drafted_query_len(self.tokens_per_row, self.num_heads // self.num_kv_heads)

    def drafted_query_lens(self, num_tokens: int) -> tuple[int, ...]:
        """Query tokens of the decode kernels for steps with drafts of so many tokens, ascending.

        A kernel for twice as many computes twice as much per key. So steps in which no row has more
        than half of its drafts have one of their own, and so have those in which no row has more
        tokens than fill a tile, unless longer rows are dealt out in such parts anyway.
        """
        longest = self.drafted_query_len
        if longest <= MAX_DECODE_QUERY_LEN:
            return (longest,)
        half, few = longest // 2, filling_query_len(self.num_heads // self.num_kv_heads)
        is_whole = self.part_len(half, num_tokens) == half
        return (few, half, longest) if is_whole and 1 < few < half else (half, longest)

    def query_len_of(self, longest: int, num_tokens: int) -> int:
        """Query tokens that the decode kernel takes for rows of at most `longest` tokens each.

        The step has `num_tokens` in all.
        """
        if longest == 1:
            return 1
        sizes = self.drafted_query_lens(num_tokens)
        return next((size for size in sizes if size >= longest), self.drafted_query_len)

    @classmethod
    def of(
        cls,
        num_heads: int,
        kv_cache: torch.Tensor,
        dtype: torch.dtype | None = None,
        tokens_per_row: int = 1,
        norms_heads: bool = False,
    ) -> Self:
        """Makes the sizes of a layer.

        Args:
            num_heads: Query heads.
            kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim].
            dtype: Type of queries; None: the cache's, which must not be quantized then.
            tokens_per_row: Most tokens that a row computes which decodes.
            norms_heads: Whether attention norms each head.
        """
        num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
        group = num_heads // num_kv_heads
        item_bytes = (dtype or kv_cache.dtype).itemsize
        assert item_bytes > 1, "a quantized cache does not tell the type of queries"
        tile_tokens = prefill_tile_tokens(num_heads, num_kv_heads, head_dim, item_bytes)
        # Those of steps without drafts, where more may be needed than there are with them.
        programs = decode_programs(is_quantized(kv_cache), group)
        few = few_decode_programs(programs, group, norms_heads)
        copies_blocks = takes_blocks_sm90(num_heads, dtype or kv_cache.dtype, kv_cache)
        has_scales = is_quantized(kv_cache)
        return cls(num_heads, num_kv_heads, tile_tokens, programs, few, tokens_per_row, has_scales, copies_blocks)

    @classmethod
    def of_layers(
        cls,
        num_heads: int,
        kv_caches: Iterable[torch.Tensor],
        dtype: torch.dtype,
        tokens_per_row: int = 1,
        norms_heads: bool = False,
    ) -> Self:
        """Makes the sizes by which work is divided for layers over all of these caches together."""
        found = [cls.of(num_heads, cache, dtype, tokens_per_row, norms_heads) for cache in kv_caches]
        return cls(
            num_heads,
            min(sizes.num_kv_heads for sizes in found),
            max(sizes.tile_tokens for sizes in found),
            max(sizes.programs for sizes in found),
            max(sizes.few_programs for sizes in found),
            tokens_per_row,
            any(sizes.is_quantized for sizes in found),
            all(sizes.copies_blocks for sizes in found),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of one step's columns."""

    num_tokens: int
    # Rows that take part.
    num_entries: int
    # Hidden states that are sampled from, and those that are only checked to be finite.
    num_samples: int
    # Work of the decode kernel, which takes entries of up to `query_len` query tokens; 0 if there
    # are no such entries.
    num_splits: int
    # Work of the prefill kernel.
    num_tiles: int
    # Whether its contexts are worth leaving the graphs for, which gather none.
    gathers: bool = False
    # Of a step that is computed in two pieces of its tokens, what attention needs of each.
    pieces: tuple[StepShape, ...] = ()
    # Query tokens of an entry that the decode kernel takes. With more than one it computes two to
    # four times as much per key, which pays for drafts only.
    query_len: int = 1
    # Whether rows may be behind their plan, and draws be several of a row: in workers that draft.
    drafts: bool = False
    # Tokens below which a step is not padded to it.
    fewest_tokens: int = 0

    @property
    def parts(self) -> tuple[StepShape, ...]:
        """What attention takes one after the other."""
        return self.pieces or (self,)

    @property
    def is_drafted(self) -> bool:
        """Whether rows that decode have drafts in it, and nobody a prompt."""
        return self.query_len > 1 and not self.num_tiles

    @classmethod
    def of(cls, plan: StepPlan, sizes: AttentionSizes, gather_capacity: int = 0) -> Self:
        """The sizes that a plan needs; `gather_capacity`: context tokens that may be gathered."""
        entries = Entries.of(plan.forward)
        most_drafts = int(num_drafts(plan.forward).max(initial=0)) if sizes.tokens_per_row > 1 else 0
        query_len = sizes.query_len_of(1 + most_drafts, entries.num_tokens)
        needed = cls._of_entries(entries, plan.wanted_indices.size, query_len, sizes)
        is_chunk = entries.counts > query_len
        chunks, seq_lens = entries.counts[is_chunk], entries.seq_lens[is_chunk]
        group = sizes.num_heads // sizes.num_kv_heads
        fits = 0 < gathered_tokens(seq_lens) <= gather_capacity and not sizes.copies_blocks
        from_keys = _GATHER_FROM_KEYS if needed.num_tokens < _LONG_STEP_TOKENS else _GATHER_LONG_FROM_KEYS
        gathers = fits and gathering_pays(chunks, seq_lens, group, from_keys)
        return dataclasses.replace(needed, gathers=gathers)

    @classmethod
    def decode(cls, num_rows: int, sizes: AttentionSizes) -> Self:
        """A step in which up to `num_rows` rows compute one token each."""
        return cls._sized(num_rows, num_rows, num_rows, True, 0, 1, sizes)

    @classmethod
    def drafted(cls, num_tokens: int, max_rows: int, sizes: AttentionSizes, query_len: int) -> Self:
        """A step of up to `num_tokens` last tokens and drafts of rows that decode.

        A row has up to `query_len` of them.
        """
        rows = min(num_tokens, max_rows)
        return cls._sized(num_tokens, rows, num_tokens, True, 0, query_len, sizes)

    @classmethod
    def mixed(cls, num_tokens: int, max_rows: int, sizes: AttentionSizes, first_piece: int | None = None) -> Self:
        """A step of up to `num_tokens` tokens of any rows.

        In two pieces, if the first is to have so many tokens.
        """
        rows = min(num_tokens, max_rows)
        num_tiles = max_prefill_tiles(num_tokens, rows, sizes.tile_tokens)
        num_samples = min(num_tokens, max_rows * sizes.tokens_per_row)
        whole = cls._sized(num_tokens, rows, num_samples, True, num_tiles, sizes.drafted_query_len, sizes)
        if first_piece is None:
            return whole
        pieces = tuple(cls.mixed(count, max_rows, sizes) for count in (first_piece, num_tokens - first_piece))
        return dataclasses.replace(whole, pieces=pieces)

    def cut(self, plan: StepPlan, first_piece: int, sizes: AttentionSizes) -> Self:
        """The shape that a plan needs in two pieces, the first of so many tokens."""
        pieces = Entries.of(plan.forward).cut(first_piece)
        return dataclasses.replace(
            self, pieces=tuple(self._of_entries(piece, 0, self.query_len, sizes) for piece in pieces)
        )

    @classmethod
    def _of_entries(cls, entries: Entries, num_samples: int, query_len: int, sizes: AttentionSizes) -> Self:
        chunks = entries.counts[entries.counts > query_len]
        num_tiles = int((-(-chunks // sizes.tile_tokens)).sum())
        decodes = chunks.size < entries.counts.size
        return cls._sized(entries.num_tokens, entries.counts.size, num_samples, decodes, num_tiles, query_len, sizes)

    @classmethod
    def _sized(
        cls,
        num_tokens: int,
        num_entries: int,
        num_samples: int,
        decodes: bool,
        num_tiles: int,
        query_len: int,
        sizes: AttentionSizes,
    ) -> Self:
        programs = sizes.programs_of(query_len, num_tokens)
        num_splits = decode_sizes(num_entries, sizes.num_kv_heads, programs).num_splits if decodes else 0
        return cls(
            num_tokens,
            num_entries,
            num_samples,
            num_splits,
            num_tiles,
            query_len=query_len,
            drafts=sizes.tokens_per_row > 1,
        )

    def holds(self, other: StepShape) -> bool:
        """Whether a step of the other shape can be padded to this one."""
        return (
            self.gathers >= other.gathers
            # A step of decodes alone keeps the kernel that is made for one token an entry.
            and (self.query_len == other.query_len or self.query_len > other.query_len and other.num_tiles > 0)
            and self.num_tokens >= other.num_tokens >= self.fewest_tokens
            and self.num_entries >= other.num_entries
            and self.num_samples >= other.num_samples
            and self.num_splits >= other.num_splits
            and self.num_tiles >= other.num_tiles
        )


def smallest_holding(shapes: Iterable[StepShape], needed: StepShape) -> StepShape | None:
    """The first of the shapes, given smallest first, that holds what is needed."""
    return next((shape for shape in shapes if shape.holds(needed)), None)


def drafted_totals(batch_sizes: Sequence[int], tokens_per_row: int) -> list[int]:
    """Tokens of the graphs of decodes with drafts, ascending, where rows have so many at most."""
    totals = {size * count for size in batch_sizes for count in (1, tokens_per_row)}
    totals |= {total for total in _DRAFTED_TOTALS if total <= max(totals, default=0)}
    return sorted(total for total in totals if 1 < total <= _MOST_DRAFTED_TOKENS)


def captured_shapes(
    batch_sizes: Iterable[int],
    mixed_sizes: Iterable[int],
    max_num_seqs: int,
    sizes: AttentionSizes,
    first_piece: Callable[[int], int | None] = lambda _: None,
    full_sizes: Iterable[int] = (),
) -> list[StepShape]:
    """Shapes of the graphs to capture, smallest first: decode steps, short mixed steps, full ones.

    A worker that drafts has decode steps with drafts besides, of as many tokens, of as many rows
    whose drafts are all there, and of numbers of tokens between them. The mixed steps are those
    too short to hide the launches of their kernels, some of them twice (`has_few_rows`).

    Args:
        batch_sizes: Rows of decode steps.
        mixed_sizes: Tokens of mixed steps.
        max_num_seqs: Most rows of a step.
        sizes: Sizes of a layer's attention.
        first_piece: Tokens of the first of two pieces of a mixed step of so many; None: it is
            whole.
        full_sizes: Tokens of mixed steps to which nothing is padded that does not nearly fill them.
    """
    batch_sizes = list(batch_sizes)
    decode = [StepShape.decode(size, sizes) for size in batch_sizes]
    # Entries with more tokens than the decode kernel takes are in steps like those with prompts.
    if 1 < sizes.tokens_per_row <= sizes.drafted_query_len:
        for total in drafted_totals(batch_sizes, sizes.tokens_per_row):
            for query_len in sizes.drafted_query_lens(total):
                if query_len <= MAX_DECODE_QUERY_LEN or total <= _MOST_LONGEST_TOKENS:
                    decode.append(StepShape.drafted(total, max_num_seqs, sizes, query_len))

    def mixed(size: int, fewest_tokens: int = 0) -> list[StepShape]:
        made = [StepShape.mixed(size, max_num_seqs, sizes, first_piece(size))]
        if has_few_rows(size, max_num_seqs, is_full=fewest_tokens > 0):
            made.insert(0, StepShape.mixed(size, _FEW_ROWS, sizes, first_piece(size)))
        return [dataclasses.replace(shape, fewest_tokens=fewest_tokens) for shape in made]

    shapes = decode + [shape for size in mixed_sizes for shape in mixed(size)]
    shapes += [shape for size in full_sizes for shape in mixed(size, size - size // _FULL_PADDING)]
    return sorted(shapes, key=lambda shape: (shape.num_tokens, shape.query_len, shape.num_tiles))


def has_few_rows(num_tokens: int, max_num_seqs: int, is_full: bool = False) -> bool:
    """Whether a captured mixed step has a second shape, for few of the `max_num_seqs` rows.

    It has one if all rows are at least twice as many. Of long steps only full ones do, as others
    would be many.
    """
    return 2 * _FEW_ROWS <= min(num_tokens, max_num_seqs) and (is_full or num_tokens <= _MOST_TOKENS_OF_FEW_ROWS)


def widest(shapes: Sequence[StepShape]) -> list[StepShape]:
    """The shapes without those for few rows: of each number of tokens the one that holds most."""

    def is_held(shape: StepShape) -> bool:
        alike = (other for other in shapes if other.num_tokens == shape.num_tokens and other.num_tiles)
        return any(other.holds(shape) for other in alike if other != shape)

    return [shape for shape in shapes if not shape.num_tiles or not is_held(shape)]


def undominated(shapes: Sequence[StepShape], times_ms: Mapping[StepShape, float]) -> list[StepShape]:
    """The shapes that a step should be padded to, in their order.

    Shapes that take no less time than a larger one of their kind are left out, with those for few
    rows of as many tokens, which are not measured.

    Products are not always slower for more rows (cuBLAS takes 13.1 ms for those of 448 tokens of an
    8B model on an H200, and 9.7 for 512), so a step may be done sooner if it is padded further.

    Args:
        shapes: With or without tiles, and with or without drafts, which are the kinds: their
            attention takes different kernels.
        times_ms: Times of some shapes, full of tokens, in milliseconds. The other shapes are kept.
    """

    def pays(shape: StepShape) -> bool:
        larger = (
            other
            for other in times_ms
            if other.num_tokens > shape.num_tokens
            and (other.query_len, bool(other.num_tiles)) == (shape.query_len, bool(shape.num_tiles))
        )
        return all(times_ms[other] > times_ms[shape] for other in larger if other.holds(shape))

    def dropped_with(shape: StepShape) -> bool:
        return any(other.num_tokens == shape.num_tokens and other.holds(shape) for other in dropped if other.num_tiles)

    dropped = [shape for shape in times_ms if not pays(shape)]
    return [shape for shape in shapes if shape not in dropped and not (shape.num_tiles and dropped_with(shape))]
