"""What a tenant may take: charged once, given back exactly, whoever asks and however it ends."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.harness import Harness, Reader, request

from headrace_backend.engine.errors import RefusalCode, RequestRefused
from headrace_backend.engine.limits.sharing.pools import MINUTE_NS
from headrace_backend.engine.limits.tenant_account import TenantAccount
from headrace_backend.engine.request import AbortCause, EngineRequest, Subscriber, TenantLimits

SECOND_NS = 1_000_000_000
OTHER_STREAM = 2


def limited(prompt: Any, max_tokens: int = 8, tenant: str = "key", **changes: Any) -> EngineRequest:
    """A request of a tenant whose limits are among `changes`, by their names."""
    limits = {name: changes.pop(name) for name in TenantLimits._fields if name in changes}
    return request(prompt, max_tokens, tenant=tenant, limits=TenantLimits(**limits), **changes)


def refusal(harness: Harness, spec: EngineRequest, stream_id: int = 1) -> RequestRefused:
    with pytest.raises(RequestRefused) as refused:
        harness.add(spec, stream_id)
    assert refused.value.code is RefusalCode.RESOURCE_EXHAUSTED
    harness.engine.check_integrity()
    return refused.value


def account(harness: Harness, tenant: str = "key") -> TenantAccount | None:
    return harness.engine._quotas.find(tenant)


# --- requests a minute


def test_request_passes_exactly_when_the_refusal_said() -> None:
    harness = Harness()
    for index in range(3):
        harness.add(limited(5, requests_per_minute=3), 1 + index % 2)
    refused = refusal(harness, limited(5, requests_per_minute=3), OTHER_STREAM)
    assert "requests_per_minute" in refused.message and "3" in refused.message
    assert refused.retry_after_ns == MINUTE_NS // 3
    harness.now_ns += refused.retry_after_ns - 1
    assert refusal(harness, limited(5, requests_per_minute=3)).retry_after_ns == 1
    harness.now_ns += 1
    harness.add(limited(5, requests_per_minute=3))
    harness.run()


def test_tenants_do_not_share_a_rate_and_no_limit_means_none() -> None:
    harness = Harness()
    harness.add(limited(5, requests_per_minute=1))
    refusal(harness, limited(5, requests_per_minute=1))
    harness.add(limited(5, tenant="other", requests_per_minute=1))
    for _ in range(20):
        harness.add(request(5))
    harness.run()


def test_refused_and_repeated_requests_cost_nothing() -> None:
    harness = Harness(num_blocks=4)
    with pytest.raises(RequestRefused):
        harness.add(limited(60, 60, requests_per_minute=2))
    with pytest.raises(RequestRefused):
        harness.add(limited([], requests_per_minute=2))
    first = limited(
        5, requests_per_minute=2, tokens_per_minute=26, idempotency_key="k", spec_digest=b"d", detached=True
    )
    harness.add(first)
    for _ in range(5):
        again = limited(
            5, requests_per_minute=2, tokens_per_minute=26, idempotency_key="k", spec_digest=b"d", detached=True
        )
        assert harness.engine.add(again, None).existing
    harness.add(limited(5, requests_per_minute=2, tokens_per_minute=26))
    assert "requests_per_minute" in refusal(harness, limited(5, requests_per_minute=2, tokens_per_minute=26)).message
    harness.run()


# --- tokens a minute


def tokens_left(harness: Harness, limit: int) -> int:
    """Tokens that the tenant could take now, found by asking."""
    kept = account(harness)
    if kept is None or kept.shares.tokens is None:
        return limit
    return next(n for n in range(limit, -1, -1) if kept.shares.tokens.pool.wait_ns(n, harness.now_ns) == 0)


def test_tokens_are_charged_for_all_outputs_and_given_back_when_stopped_early() -> None:
    harness = Harness()
    spec = limited(10, 40, n=2, tokens_per_minute=1000, token_ids=frozenset(range(1, 24)))
    reader = harness.add(spec)
    assert tokens_left(harness, 1000) == 1000 - 10 - 2 * 40
    harness.run()
    num_used = 10 + sum(len(tokens) for tokens in reader.tokens.values())
    assert num_used < 90
    # A few microseconds passed: less than a token.
    assert tokens_left(harness, 1000) == 1000 - num_used
    assert reader.done is not None and reader.done.output_tokens == num_used - 10


def abort(harness: Harness, spec: EngineRequest) -> None:
    harness.engine.abort(spec.request_id, spec.tenant, AbortCause.CANCELLED)


def pass_deadline(harness: Harness, spec: EngineRequest) -> None:
    harness.now_ns += 10_000_000
    harness.engine.expire()


def lose_stream(harness: Harness, _spec: EngineRequest) -> None:
    harness.engine.stream_lost(1)
    harness.readers.clear()


def go_wrong(harness: Harness, _spec: EngineRequest) -> None:
    harness.worker.non_finite_rows = set(range(8))
    harness.step()
    harness.step()


@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize("end", [abort, pass_deadline, lose_stream, go_wrong])
def test_whatever_ends_a_request_gives_back_what_it_did_not_use(steps: int, end: Any) -> None:
    harness = Harness()
    spec = limited(10, 40, tokens_per_minute=100, deadline_ns=harness.now_ns + 5_000_000, request_id="r")
    harness.add(spec)
    for _ in range(steps):
        harness.step()
    if steps > 1:
        harness.replace_worker()
        harness.step()
    tokens_before = harness.engine.list_requests("key", 0, 10, 0).rows[0].output_tokens
    started = steps > 0 or end is go_wrong
    end(harness, spec)
    harness.read()
    assert not harness.engine.has_work
    row = harness.engine.list_requests("key", 0, 10, 0).rows[0]
    num_used = 10 + row.output_tokens if started else 0
    assert row.output_tokens >= tokens_before
    assert tokens_left(harness, 100) == 100 - num_used
    kept = account(harness)
    assert kept is None or (kept.num_charged_tokens, kept.num_streams) == (0, 0)
    harness.engine.check_integrity()


def test_request_that_can_never_pass_is_refused_for_good() -> None:
    harness = Harness()
    refused = refusal(harness, limited(10, 40, n=3, tokens_per_minute=129))
    assert refused.retry_after_ns is None
    assert "10" in refused.message and "3 * 40" in refused.message and "129" in refused.message
    assert "never" in refused.message
    harness.add(limited(10, 40, n=3, tokens_per_minute=130))
    later = refusal(harness, limited(10, 40, n=3, tokens_per_minute=130))
    assert later.retry_after_ns == MINUTE_NS
    harness.run()


def test_the_load_counts_what_was_taken_and_what_found_no_room() -> None:
    harness = Harness(max_waiting_requests=2, num_blocks=4)
    for _ in range(2):
        harness.add(request(5))
    for _ in range(3):
        assert "the queue is full" in refusal(harness, request(5)).message
    # Those that could never be taken, and those over their quota, are not refused for its load.
    refusal(harness, request(60, 60))
    harness.run()
    harness.add(limited(5, requests_per_minute=1))
    assert "requests_per_minute" in refusal(harness, limited(5, requests_per_minute=1)).message
    load = harness.engine.load()
    assert (load.taken_requests, load.refused_requests) == (3, 3)


def test_slowest_limit_says_when_and_all_are_named() -> None:
    harness = Harness()
    limits = {"requests_per_minute": 60, "tokens_per_minute": 60, "concurrent_streams": 1}
    harness.add(limited(10, 50, **limits))
    refused = refusal(harness, limited(10, 20, **limits))
    assert refused.retry_after_ns == 30 * SECOND_NS
    assert "concurrent_streams" in refused.message and "tokens_per_minute" in refused.message
    assert "requests_per_minute" not in refused.message
    harness.run()


def test_charges_of_a_lifted_limit_do_not_come_back_to_a_new_one() -> None:
    harness = Harness()
    harness.add(limited(10, 90, tokens_per_minute=100))
    harness.add(limited(5))
    harness.add(limited(10, 50, tokens_per_minute=60))
    harness.engine.stream_lost(1)
    harness.readers.clear()
    # All three ended unstarted. What the first was charged belonged to a bucket that is gone.
    assert account(harness) is None
    harness.add(limited(10, 50, tokens_per_minute=60, request_id="again"))
    refusal(harness, limited(10, 40, tokens_per_minute=60))
    harness.run()


def test_unlimited_requests_give_nothing_back_to_a_later_limit() -> None:
    harness = Harness()
    spec = limited(10, 90)
    harness.add(spec)
    harness.add(limited(10, 50, tokens_per_minute=60))
    abort(harness, spec)
    assert tokens_left(harness, 60) == 0
    harness.run()


# --- streams


def test_streams_count_over_services_while_requests_wait_or_run() -> None:
    harness = Harness(max_num_seqs=1)
    specs = [limited(5, 4, concurrent_streams=2) for _ in range(3)]
    harness.add(specs[0], 1)
    harness.add(specs[1], OTHER_STREAM)
    refused = refusal(harness, specs[2], OTHER_STREAM)
    assert refused.retry_after_ns == SECOND_NS
    assert "concurrent_streams" in refused.message and "2" in refused.message
    abort(harness, specs[1])
    harness.add(specs[2])
    harness.run()
    harness.add(limited(5, 4, concurrent_streams=2))
    harness.add(limited(5, 4, concurrent_streams=2))
    harness.run()


def attach(harness: Harness, spec: EngineRequest, stream_id: int, limits: TenantLimits) -> Subscriber:
    subscriber = harness.subscriber(stream_id)
    harness.readers[subscriber] = Reader()
    harness.engine.attach(subscriber, spec.request_id, spec.tenant, None, 0, limits)
    return subscriber


def test_first_reader_is_the_requests_own_and_each_further_one_counts() -> None:
    harness = Harness()
    limits = TenantLimits(concurrent_streams=2)
    spec = request(5, 400, tenant="key", limits=limits, detached=True)
    harness.engine.add(spec, None)
    first = attach(harness, spec, 1, limits)
    second = attach(harness, spec, OTHER_STREAM, limits)
    with pytest.raises(RequestRefused) as refused:
        attach(harness, spec, 3, limits)
    assert refused.value.code is RefusalCode.RESOURCE_EXHAUSTED and refused.value.retry_after_ns == SECOND_NS
    refusal(harness, request(5, tenant="key", limits=limits))
    harness.engine.detach(first)
    third = attach(harness, spec, 3, limits)
    harness.engine.check_integrity()
    harness.engine.detach(second)
    harness.engine.detach(third)
    harness.add(request(5, tenant="key", limits=limits))
    harness.engine.check_integrity()
    harness.run()


def test_reader_of_an_ended_request_needs_a_free_stream_and_keeps_none() -> None:
    harness = Harness()
    limits = TenantLimits(concurrent_streams=1)
    ended = request(5, 4, tenant="key", limits=limits)
    harness.add(ended)
    harness.run()
    for _ in range(3):
        attach(harness, ended, 1, limits)
    harness.add(request(5, 4, tenant="key", limits=limits))
    with pytest.raises(RequestRefused):
        attach(harness, ended, 1, limits)
    attach(harness, ended, 1, TenantLimits(concurrent_streams=2))
    harness.run()


# --- limits and accounts


def test_newest_limits_hold_for_requests_that_came_before_them() -> None:
    harness = Harness()
    for _ in range(4):
        harness.add(limited(5))
    refusal(harness, limited(5, concurrent_streams=4))
    harness.add(limited(5, concurrent_streams=5))
    refusal(harness, limited(5, concurrent_streams=5))
    harness.add(limited(5))
    harness.run()


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        (TenantLimits(requests_per_minute=-1), "limits.requests_per_minute"),
        (TenantLimits(concurrent_streams=-1), "limits.concurrent_streams"),
        (TenantLimits(tokens_per_minute=-1), "limits.tokens_per_minute"),
        (TenantLimits(kv_cache_share=-0.1), "limits.kv_cache_share"),
        (TenantLimits(kv_cache_share=1.01), "limits.kv_cache_share"),
        (TenantLimits(kv_cache_share=float("nan")), "limits.kv_cache_share"),
        (TenantLimits(kv_cache_share=float("inf")), "limits.kv_cache_share"),
    ],
)
def test_bad_limits_are_refused_by_field_and_do_not_hold(limits: TenantLimits, field: str) -> None:
    harness = Harness()
    harness.add(limited(5, concurrent_streams=2, request_id="there"))
    calls = (
        lambda: harness.add(request(5, tenant="key", limits=limits)),
        lambda: harness.engine.attach(harness.subscriber(), "there", "key", None, 0, limits),
    )
    for call in calls:
        with pytest.raises(RequestRefused) as refused:
            call()
        assert refused.value.code is RefusalCode.INVALID_ARGUMENT
        assert [violation.field for violation in refused.value.violations] == [field]
    kept = account(harness)
    assert kept is not None and kept.limits == TenantLimits(concurrent_streams=2)
    harness.run()


def test_accounts_are_forgotten_when_they_are_as_if_new() -> None:
    harness = Harness()
    for index in range(50):
        harness.add(limited(5, 4, tenant=f"key{index}", requests_per_minute=60 if index % 2 else 0))
    harness.run()
    assert len(harness.engine._quotas) == 25, "nothing is to be remembered of unlimited tenants"
    harness.now_ns += MINUTE_NS
    harness.engine.expire()
    assert len(harness.engine._quotas) == 0
    harness.engine.check_integrity()


def test_idle_account_is_remembered_while_its_limit_is_lowered() -> None:
    harness = Harness()
    spec = limited(5, 4, requests_per_minute=1000)
    harness.add(spec)
    harness.run()
    harness.now_ns += 30_000
    harness.engine.attach(Subscriber(9, 1), spec.request_id, "key", None, 0, TenantLimits(requests_per_minute=1))
    expiry_ns = harness.engine._quotas.next_expiry_ns()
    assert expiry_ns == harness.now_ns + MINUTE_NS
    wait_ns = refusal(harness, limited(5, requests_per_minute=1)).retry_after_ns
    assert wait_ns is not None and 59 * SECOND_NS < wait_ns < MINUTE_NS, "a few microseconds at the old rate count"
    harness.now_ns += wait_ns
    harness.add(limited(5, requests_per_minute=1))
    harness.run()


def test_account_that_is_remembered_longer_keeps_no_other() -> None:
    harness = Harness()
    specs = [limited(5, 4, tenant=f"key{index}", requests_per_minute=1000) for index in range(2)]
    for spec in specs:
        harness.add(spec)
    harness.run()
    idle_ns = harness.now_ns
    harness.now_ns += 30_000
    harness.engine.attach(Subscriber(9, 1), specs[0].request_id, "key0", None, 0, TenantLimits(requests_per_minute=1))
    harness.now_ns = idle_ns + MINUTE_NS
    harness.engine.expire()
    assert account(harness, "key0") is not None and account(harness, "key1") is None


def test_quotas_outlive_a_worker() -> None:
    harness = Harness()
    harness.add(limited(5, 20, requests_per_minute=1, tokens_per_minute=50))
    harness.step()
    harness.replace_worker()
    assert "requests_per_minute" in refusal(harness, limited(5, requests_per_minute=1, tokens_per_minute=50)).message
    harness.run()
    assert tokens_left(harness, 50) == 25


def test_load_says_how_many_sequences_the_batch_holds() -> None:
    assert Harness(max_num_seqs=8, max_num_batched_tokens=64).engine.load().max_running_sequences == 8
