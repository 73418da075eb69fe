"""The table of tiles of sorted pairs, against its reference, and the reference against pairs."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.kernel_case import DEVICES, Numbers, kernels_on, poisoned_memory
from tests.support.kernels_ahead import KernelsAhead

from headrace_kernels.experts import tile_table as room
from headrace_kernels.experts.routing import SortedPairs, sort_pairs_reference
from headrace_kernels.experts.tile_table import most_tiles, tile_table, tile_table_reference


def sorted_pairs(counts: list[int], elsewhere: int = 0, device: str = "cpu") -> SortedPairs:
    """Pairs of experts that have so many each, and of experts that are elsewhere."""
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
    return SortedPairs(torch.arange(sum(counts) + elsewhere, dtype=torch.int32, device=device), starts)


def check(pairs: SortedPairs, block_m: int, device: str) -> None:
    """Behind the last tile the table may say anything."""
    with kernels_on(device), poisoned_memory(device):
        found = tile_table(pairs, block_m)
    expected = tile_table_reference(pairs, block_m)
    assert torch.equal(found.num_tiles, expected.num_tiles)
    count = int(found.num_tiles)
    for column, reference in zip(found[1:], expected[1:], strict=True):
        assert column.dtype == torch.int32 and column.shape == reference.shape
        assert torch.equal(column[:count], reference[:count])


# Experts without pairs at both ends and between others, of which some have a tile exactly or a pair
# more; one that has all; numbers of experts that are no power of two.
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_m", [16, 128])
@pytest.mark.parametrize(
    "counts",
    [[0, 5, 0, 0, 33, 128, 129, 16, 17, 0], [1, 1, 1], [0, 0, 300, 0], [300], [0, 0]],
    ids=["some", "few", "one of four", "one of one", "none"],
)
def test_the_table_has_each_expert_s_tiles_in_turn(counts: list[int], block_m: int, device: str) -> None:
    for elsewhere in (0, 7):
        check(sorted_pairs(counts, elsewhere, device), block_m, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_m", [16, 128])
def test_an_expert_may_have_more_tiles_than_are_written_at_a_time(block_m: int, device: str) -> None:
    for tiles in (room._WRITTEN, room._WRITTEN + 1, 2 * room._WRITTEN + 3):
        check(sorted_pairs([3, tiles * block_m - 1, 0, 5], device=device), block_m, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "per_token"), [(128, 8), (8, 2), (60, 4)])
def test_tables_of_models_equal_their_reference(num_experts: int, per_token: int) -> None:
    for num_tokens, block_m in itertools.product((5, 256, 8192), (64, 128)):
        logits = Numbers("cuda", torch.float32, num_tokens).randn(num_tokens, num_experts)
        experts = logits.topk(per_token).indices.to(torch.int32)
        check(sort_pairs_reference(experts, num_experts), block_m, "cuda")


def test_the_starts_are_read_behind_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = sorted_pairs([20, 0, 3])
    expected = tile_table_reference(pairs, 16)
    with kernels_on("cpu"), poisoned_memory("cpu"):
        ahead = KernelsAhead(monkeypatch, room, (pairs.starts,))
        found = tile_table(pairs, 16)
    assert all(torch.equal(column[:3], reference[:3]) for column, reference in zip(found, expected, strict=True))
    assert ahead.waits == ahead.released == 3


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.sampled_from([1, 2, 16, 64]), st.integers(0, 40))
def test_tiles_cover_the_pairs_of_each_expert_once(counts: list[int], block_m: int, elsewhere: int) -> None:
    pairs = sorted_pairs(counts, elsewhere)
    table = tile_table_reference(pairs, block_m)
    count, starts = int(table.num_tiles), pairs.starts.tolist()
    assert count <= most_tiles(len(pairs.order), len(counts), block_m) == len(table.experts) == len(table.firsts)
    covered: list[list[int]] = [[] for _ in counts]
    for expert, first in zip(table.experts[:count].tolist(), table.firsts[:count].tolist(), strict=True):
        assert starts[expert] <= first < starts[expert + 1]
        covered[expert] += range(first, min(first + block_m, starts[expert + 1]))
    assert covered == [list(range(begin, end)) for begin, end in itertools.pairwise(starts)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.sampled_from([1, 2, 16, 64]))
def test_no_routing_makes_more_tiles_than_there_is_room_for(counts: list[int], block_m: int) -> None:
    used = sum(-(-count // block_m) for count in counts)
    assert used <= most_tiles(sum(counts), len(counts), block_m) <= sum(counts)
