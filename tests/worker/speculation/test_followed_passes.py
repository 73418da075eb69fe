"""Passes over followed tokens are padded to few sizes, and lose no token for it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples

from headrace_backend.worker.plan_columns import Entries
from headrace_backend.worker.speculation.followed_passes import (
    FollowedHeads,
    FollowedPasses,
    FollowedTokens,
    followed_sizes,
)
from headrace_kernels.attention.step import ShareScratch

NUM_ROWS, BLOCK_SIZE, TILE_TOKENS, SIZES = 6, 16, 8, (4, 16, 64)
CPU = torch.device("cpu")


def passes(sizes: tuple[int, ...] = SIZES) -> FollowedPasses:
    scratch = ShareScratch.allocate(4, [(2, 32)], torch.float32, CPU, TILE_TOKENS)
    heads = FollowedHeads(4, 2, TILE_TOKENS, scratch)
    return FollowedPasses(sizes, heads, NUM_ROWS, torch.zeros(NUM_ROWS + 1, 8, dtype=torch.int32), BLOCK_SIZE)


def numbered(count: int, num_padding: int = 0) -> FollowedTokens:
    """Tokens whose ids, positions and slots tell them apart."""
    numbers, padding = torch.arange(count), torch.full((num_padding,), -1)
    return FollowedTokens(*(torch.cat((numbers + 100 * column, padding)) for column in range(3)))


@settings(max_examples=examples(60), deadline=None)
@given(
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=NUM_ROWS),
    starts=st.lists(st.integers(0, 90), min_size=NUM_ROWS, max_size=NUM_ROWS),
    num_padding=st.integers(0, 80),
)
def test_each_token_is_in_one_tile_of_its_row(counts: list[int], starts: list[int], num_padding: int) -> None:
    """The pass before it was longer, so that what it left must not be taken for tokens."""
    made = passes()
    size = made.size_of(sum(counts))
    if size is None:
        return
    longest = np.full(NUM_ROWS, size // NUM_ROWS + 1, np.int32)
    made.fill(size, Entries(np.arange(NUM_ROWS, dtype=np.int32), longest, longest).cut(size)[0], numbered(size))
    entries = Entries(*(np.array(column, np.int32) for column in (range(len(counts)), starts[: len(counts)], counts)))
    made.fill(size, entries, numbered(sum(counts), num_padding))
    token_ids, positions, step = made.inputs(size)
    assert (len(token_ids), len(positions)) == (size, size)
    tokens = numbered(sum(counts))
    for found, given_ones in zip((token_ids, positions, step.slot_mapping), tokens, strict=True):
        assert found[: sum(counts)].tolist() == given_ones.tolist()
    assert step.slot_mapping[sum(counts) :].eq(-1).all()
    assert step.prefill is not None and step.prefill.shares is not None and step.decode is None
    begins, seen = step.query_start_loc.tolist(), list[int]()
    for (entry, first), (number, *_) in zip(step.prefill.tiles.tolist(), step.prefill.shares.tolist(), strict=True):
        # Other shares of a tile's keys are of the same tokens.
        if entry >= 0 and number == 0:
            last = min(begins[entry] + first + TILE_TOKENS, begins[entry + 1])
            seen += range(begins[entry] + first, last)
    assert sorted(seen) == list(range(sum(counts)))
    assert step.seq_lens[: len(counts)].tolist() == entries.seq_lens.tolist()
    assert step.rows.tolist() == [*range(len(counts)), *[NUM_ROWS] * (len(step.rows) - len(counts))]


def test_lengths_are_those_that_the_device_knows() -> None:
    """A row may be behind its plan, whose starts are bounds then."""
    made, one = passes(), np.ones(1, np.int32)
    made.fill(4, Entries(one, 9 * one, 3 * one), numbered(3), torch.tensor([10, 99], dtype=torch.int32))
    assert made.inputs(4)[2].seq_lens.tolist() == [10, 0, 0, 0]


def test_the_smallest_size_is_taken_that_holds_the_tokens() -> None:
    made = passes()
    assert [made.size_of(count) for count in (1, 4, 5, 64, 65)] == [4, 4, 16, 64, None]
    assert passes(()).size_of(1) is None


def test_few_sizes_are_captured_and_none_is_longer_than_a_step() -> None:
    assert followed_sizes(8192)[-1] == 1024 and len(followed_sizes(8192)) <= 6
    assert followed_sizes(300)[-1] == 256
    assert followed_sizes(16) == ()
