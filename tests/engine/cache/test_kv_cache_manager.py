"""Sharing, copying and publishing of one sequence's blocks."""

from __future__ import annotations

import numpy as np
from tests.engine.harness import request

from headrace_backend.engine.cache.kv_cache_manager import KVCacheManager
from headrace_backend.engine.cache.prefix_keys import PrefixKeys
from headrace_backend.engine.limits.tenant_account import TenantAccount
from headrace_backend.engine.request import EngineRequest
from headrace_backend.engine.requests.ledger import Ledger
from headrace_backend.engine.requests.sequence import LiveRequest, Sequence
from headrace_backend.engine.requests.token_log import OutputLog


def sequences(spec: EngineRequest) -> list[Sequence]:
    live = LiveRequest(spec, 1, 0, 0, Ledger(0, 0), len(spec.prompt_ids), None, TenantAccount(""))
    return [Sequence(live, OutputLog(index, False), 0, None) for index in range(spec.asked.n)]


def computed(kv: KVCacheManager, sequence: Sequence) -> None:
    """Marks the sequence as if a step had computed the whole prompt and sampled."""
    kv.take_prefix(sequence, kv.no_prefix())
    kv.grow(sequence, sequence.num_tokens)
    sequence.num_computed = sequence.num_tokens
    sequence.num_tokens += 1


def forked(kv: KVCacheManager, n: int) -> list[Sequence]:
    leader, *siblings = sequences(request(20, n=n))
    computed(kv, leader)
    for sibling in siblings:
        kv.fork(leader, sibling)
        sibling.num_tokens += 1
    return [leader, *siblings]


def test_source_of_a_copy_is_not_given_away_before_the_plan_is_complete() -> None:
    kv = KVCacheManager(4, 16, enable_prefix_cache=True, keys=PrefixKeys())
    leader, sibling = forked(kv, 2)
    [copy] = kv.copy_on_write(leader)
    kv.release(sibling)
    sibling.tables = []
    available = [kv.pool.allocate() for _ in range(kv.pool.num_available)]
    assert copy.source not in available
    kv.pool.release([block for block in available if block is not None])
    kv.end_step()
    assert kv.pool.ref_counts[copy.source] == 0
    kv.check_integrity([leader])


def test_last_holder_writes_in_place() -> None:
    kv = KVCacheManager(8, 16, enable_prefix_cache=True, keys=PrefixKeys())
    first, second, third = forked(kv, 3)
    assert kv.num_missing(first, 21) == 1
    assert len(kv.copy_on_write(first)) == 1
    assert len(kv.copy_on_write(second)) == 1
    assert kv.num_missing(third, 21) == 0
    assert kv.copy_on_write(third) == []
    assert len({first.tables[0][1], second.tables[0][1], third.tables[0][1]}) == 3
    assert first.tables[0][0] == second.tables[0][0] == third.tables[0][0]
    kv.end_step()
    kv.check_integrity([first, second, third])


def test_copy_is_made_once() -> None:
    kv = KVCacheManager(8, 16, enable_prefix_cache=True, keys=PrefixKeys())
    first, second = forked(kv, 2)
    assert len(kv.copy_on_write(first)) == 1
    first.num_computed += 1
    assert kv.copy_on_write(first) == []
    kv.end_step()
    kv.check_integrity([first, second])


def test_disabled_prefix_cache_publishes_nothing() -> None:
    kv = KVCacheManager(8, 16, enable_prefix_cache=False, keys=PrefixKeys())
    (sequence,) = sequences(request(40))
    computed(kv, sequence)
    sequence.num_settled = 40
    kv.publish(sequence)
    (same,) = sequences(request(40))
    assert kv.find_prefix(same) == [[]]
    kv.release(sequence)
    assert kv.pool.num_free == 8


def test_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    kv = KVCacheManager(3, 16, enable_prefix_cache=True, keys=PrefixKeys())
    (sequence,) = sequences(request(48))
    computed(kv, sequence)
    sequence.num_settled = 48
    kv.publish(sequence)
    kv.release(sequence)
    (same,) = sequences(request(49))
    prompts = sequence.request.spec.prompt_ids, same.request.spec.prompt_ids[48:]
    same.request.spec.prompt_ids = np.concatenate(prompts)
    assert len(kv.find_prefix(same)[0]) == 3
    kv.pool.allocate()
    assert len(kv.find_prefix(same)[0]) == 2
