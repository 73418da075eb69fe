"""Blocks are free, cached or used, and never two of them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_backend.engine.cache.block_pool import BlockPool


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_allocate_gives_every_block_once_then_none() -> None:
    pool = BlockPool(3)
    assert {pool.allocate() for _ in range(3)} == {0, 1, 2}
    assert pool.allocate() is None
    assert (pool.num_free, pool.num_cached, pool.num_used) == (0, 0, 3)


def test_shared_block_is_freed_by_its_last_holder() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    assert block is not None
    pool.hold(block)
    pool.release([block])
    assert pool.num_used == 1
    pool.release([block])
    assert pool.num_free == 1


def test_release_more_often_than_held_is_caught() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    assert block is not None
    pool.release([block])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([block])


def test_cached_block_is_found_held_again_and_evicted_least_recently_used_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for number, block in enumerate(blocks):
        assert block is not None
        pool.publish(block, key(number))
        pool.release([block])
    assert (pool.num_free, pool.num_cached) == (0, 3)
    oldest = pool.find(key(0))
    assert oldest == blocks[0]
    pool.hold(oldest)
    pool.release([oldest])
    assert pool.allocate() == blocks[1]
    assert pool.find(key(1)) is None
    assert pool.find(key(0)) == blocks[0]


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    assert first is not None and second is not None
    pool.publish(first, key(1))
    pool.release([first])
    pool.release([second])
    assert pool.allocate() == second
    assert pool.find(key(1)) == first


def test_earlier_block_of_a_key_stays_the_one_to_find() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    assert first is not None and second is not None
    pool.publish(first, key(1))
    pool.publish(second, key(1))
    assert pool.find(key(1)) == first
    pool.release([second, first])
    assert (pool.num_free, pool.num_cached) == (1, 1)


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from("ahrp"), st.integers(0, 7)), max_size=60))
def test_free_cached_and_used_add_up_whatever_happens(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(num_blocks)
    held: Counter[int] = Counter()
    for action, number in actions:
        block = sorted(held)[number % len(held)] if held else None
        if action == "a":
            allocated = pool.allocate()
            assert (allocated is None) == (len(held) == num_blocks)
            if allocated is not None:
                assert allocated not in held
                held[allocated] = 1
        elif action == "h":
            known = pool.find(key(number))
            if known is not None:
                pool.hold(known)
                held[known] += 1
        elif action == "r" and block is not None:
            pool.release([block])
            held -= Counter([block])
        elif action == "p" and block is not None:
            pool.publish(block, key(number))
        pool.check_integrity(dict(held))
