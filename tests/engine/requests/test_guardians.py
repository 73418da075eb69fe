"""Detached requests with a guardian, and what an engine takes over from one that was lost."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import Harness, Reader, request

from headrace_backend.engine.errors import RefusalCode, RequestRefused
from headrace_backend.engine.events import EndReason, LogprobColumns, OutputEnd, PromptLogprobs, RequestDone
from headrace_backend.engine.request import Earlier, EngineRequest, RequestState, TenantLimits
from headrace_backend.engine.requests.ledger import Ledger, Phase

ONE_STREAM = TenantLimits(concurrent_streams=1)


def account(**parts: int) -> RequestDone:
    names = [name for name in RequestDone.__struct_fields__ if name != "engine_trace"]
    return RequestDone(**{name: parts.get(name, 0) for name in names})


def taken_over(emitted: list[list[int]], ends: tuple[OutputEnd, ...] = (), **fields: Any) -> EngineRequest:
    columns = tuple(np.array(tokens, np.int32) for tokens in emitted)
    return request(20, max_tokens=12, n=len(emitted), emitted=columns, ends=ends, detached=True, **fields)


def columns_of(count: int, tops: int = 0, top: int = 5) -> LogprobColumns:
    """Log probabilities of so many tokens, each with the same top entries."""
    flat = (array("I", [top]) * (count * tops), array("f", [-1.0]) * (count * tops))
    return LogprobColumns(array("f", [-1.0]) * count, array("I", [1]) * count, array("H", [tops]) * count, *flat)


def first_of(columns: LogprobColumns | None, count: int) -> LogprobColumns:
    """Returns the log probabilities of the first tokens."""
    assert columns is not None
    tops = sum(columns.top_counts[:count])
    per_token = (columns.sampled[:count], columns.ranks[:count], columns.top_counts[:count])
    return LogprobColumns(*per_token, columns.top_token_ids[:tops], columns.top_logprobs[:tops])


def test_a_guardian_takes_no_stream_of_its_tenant_and_may_be_followed_by_another() -> None:
    harness = Harness()
    spec = request(20, max_tokens=12, tenant="t", detached=True, limits=ONE_STREAM)
    guardian = harness.add(spec, stream_id=1)
    harness.step()
    # The first reader has the request's own stream, the second one too many.
    harness.readers[first := harness.subscriber(2)] = Reader()
    harness.engine.attach(first, spec.request_id, "t", None, 0, ONE_STREAM)
    with pytest.raises(RequestRefused) as refused:
        harness.engine.attach(harness.subscriber(2), spec.request_id, "t", None, 0, ONE_STREAM)
    assert refused.value.code is RefusalCode.RESOURCE_EXHAUSTED
    with pytest.raises(RequestRefused) as refused:
        harness.engine.guard(harness.subscriber(1), spec.request_id, "t")
    assert refused.value.code is RefusalCode.ALREADY_EXISTS
    # Its service is gone: the request goes on, and another service guards it.
    harness.engine.stream_lost(1)
    harness.engine.check_integrity()
    harness.readers[second := harness.subscriber(3)] = Reader()
    snapshot = harness.engine.guard(second, spec.request_id, "t")
    harness.run()
    whole = expected_tokens(spec, 0)
    assert [*snapshot.outputs[0].token_ids, *harness.readers[second].tokens[0]] == whole
    assert len(guardian.tokens.get(0, [])) < len(whole)


def test_two_services_guard_a_request_and_who_is_left_is_the_first() -> None:
    harness = Harness()
    spec = request(20, max_tokens=12, tenant="t", detached=True, limits=ONE_STREAM)
    harness.add(spec, stream_id=1)
    assert [(lack.request.request_id, lack.guardian) for lack in harness.engine.unguarded()] == [(spec.request_id, 1)]
    harness.step()
    harness.readers[second := harness.subscriber(2)] = Reader()
    snapshot = harness.engine.guard(second, spec.request_id, "t")
    assert snapshot.handover is not None and snapshot.handover.is_second and not harness.engine.unguarded()
    with pytest.raises(RequestRefused) as refused:
        harness.engine.guard(harness.subscriber(3), spec.request_id, "t")
    assert refused.value.code is RefusalCode.ALREADY_EXISTS
    # Neither copy takes a stream of the tenant's.
    harness.readers[reader := harness.subscriber(4)] = Reader()
    harness.engine.attach(reader, spec.request_id, "t", None, 0, ONE_STREAM)
    harness.engine.stream_lost(1)
    harness.engine.check_integrity()
    assert [lack.guardian for lack in harness.engine.unguarded()] == [2]
    harness.readers[third := harness.subscriber(3)] = Reader()
    later = harness.engine.guard(third, spec.request_id, "t")
    assert later.handover is not None and later.handover.is_second
    # One that gives its copy up leaves the other as it is, whichever comes first.
    harness.engine.detach(third)
    assert [lack.guardian for lack in harness.engine.unguarded()] == [2]
    harness.run()
    whole = expected_tokens(spec, 0)
    assert [*snapshot.outputs[0].token_ids, *harness.readers[second].tokens[0]] == whole
    assert not harness.engine.unguarded(), "what has ended is guarded by copies alone"
    harness.engine.check_integrity()


def test_only_detached_requests_that_exist_are_guarded() -> None:
    harness = Harness()
    attached = request(20, max_tokens=12)
    harness.add(attached)
    for request_id, tenant, code in (
        (attached.request_id, "", RefusalCode.INVALID_ARGUMENT),
        (attached.request_id, "another", RefusalCode.NOT_FOUND),
        ("none", "", RefusalCode.NOT_FOUND),
    ):
        with pytest.raises(RequestRefused) as refused:
            harness.engine.guard(harness.subscriber(), request_id, tenant)
        assert refused.value.code is code


def test_the_log_of_what_ended_elsewhere_is_kept_and_nothing_is_computed() -> None:
    harness = Harness()
    tokens = [[5, 6, 7], [8, 9]]
    ends = tuple(OutputEnd(index, EndReason.STOP, stop_token_id=7) for index in range(2))
    done = account(output_tokens=5, decode_ns=70, queued_ns=20, ttft_ns=30, step_count=3)
    key = {"idempotency_key": "k", "spec_digest": b"d" * 32}
    spec = taken_over(tokens, ends, earlier=Earlier(done, 500), **key)
    assert not harness.engine.add(spec, None).existing
    assert not harness.engine.has_work and not harness.plan()
    harness.engine.check_integrity()
    snapshot = harness.engine.attach(harness.subscriber(), spec.request_id, "", None, 0)
    assert [list(output.token_ids) for output in snapshot.outputs] == tokens
    assert tuple(output.end for output in snapshot.outputs) == ends
    assert snapshot.done is not None and snapshot.started
    assert (snapshot.done.decode_ns, snapshot.done.step_count) == (70, 3)
    assert snapshot.done.ended_at_ns == harness.now_ns - 500
    [row] = harness.engine.list_requests("", RequestState.FINISHED, 10, 0).rows
    assert (row.request_id, row.output_tokens) == (spec.request_id, 5)
    # Its key is known here, and to be asked for.
    again = request(20, max_tokens=12, n=2, detached=True, **key)
    assert harness.engine.add(again, None).request_id == spec.request_id
    found = harness.engine.find_key("", "k", b"d" * 32)
    assert found is not None and found.request_id == spec.request_id
    assert harness.engine.find_key("another", "k", b"d" * 32) is None
    with pytest.raises(RequestRefused) as refused:
        harness.engine.find_key("", "k", b"e" * 32)
    assert refused.value.code is RefusalCode.ALREADY_EXISTS
    # It expires like any other.
    harness.now_ns += int(harness.config.log_ttl_s * 1e9) + 1
    harness.engine.expire()
    assert harness.engine.find_key("", "k", b"d" * 32) is None


def test_an_account_goes_on_where_the_lost_engine_left_it() -> None:
    harness = Harness()
    earlier = account(prefill_ns=100, decode_ns=400, engine_restart_ns=200, ttft_ns=250)
    whole = expected_tokens(request(20, max_tokens=12), 0)
    spec = taken_over([whole[:4]], service_ns=1_000, earlier=Earlier(earlier, 0))
    arrival_ns = harness.now_ns
    reader = harness.add(spec)
    harness.now_ns += 5_000
    harness.run()
    done = reader.done
    assert done is not None and reader.tokens[0] == whole[4:]
    assert (done.queued_ns, done.prefill_ns, done.ttft_ns) == (300, 100, 250)
    assert done.engine_restart_ns == 200 + 5_000
    parts_ns = done.queued_ns + done.prefill_ns + done.decode_ns + done.preempted_ns + done.engine_restart_ns
    assert parts_ns == 1_000 + done.ended_at_ns - arrival_ns


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"detached": False}, "unless detached"),
        ({"service_ns": 699}, "add up to service_ns"),
        ({"ends": (OutputEnd(0, EndReason.STOP),), "detached": False}, "an output that did not end"),
    ],
)
def test_an_earlier_account_that_cannot_be_is_refused(fields: dict[str, Any], rule: str) -> None:
    earlier = account(prefill_ns=100, decode_ns=400, engine_restart_ns=200, ttft_ns=250)
    values = {"service_ns": 1_000, "detached": True, "earlier": Earlier(earlier, 0), **fields}
    spec = request(20, max_tokens=12, emitted=(np.array([5], np.int32),), **values)
    with pytest.raises(RequestRefused) as refused:
        Harness().add(spec)
    assert refused.value.code is RefusalCode.INVALID_ARGUMENT and rule in str(refused.value)


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=3), st.integers(0, 5000), st.data())
def test_parts_of_a_resumed_ledger_add_up(parts_ns: list[int], rest_ns: int, data: st.DataObject) -> None:
    service_ns = sum(parts_ns) + rest_ns
    ledger = Ledger(10_000, service_ns)
    prefill_ns, decode_ns, restart_ns = parts_ns
    ttft_ns = data.draw(st.integers(0, service_ns))
    ledger.resume((0, prefill_ns, decode_ns, 0, restart_ns), ttft_ns)
    assert ledger.ttft_ns == ttft_ns
    now_ns = 10_000
    for change in (ledger.computing, ledger.preempted, ledger.computing, ledger.end):
        now_ns += data.draw(st.integers(0, 1000))
        change(now_ns)
    assert sum(ledger.parts_ns) == service_ns + now_ns - 10_000
    assert ledger.parts_ns[Phase.QUEUED] >= rest_ns


def test_log_probabilities_go_on_where_the_lost_engine_left_them() -> None:
    """Whoever reads the log later sees what one engine alone would have left."""
    asked = {"num_logprobs": 2, "num_prompt_logprobs": 1, "detached": True}
    undisturbed = Harness()
    first = request(20, max_tokens=12, n=2, **asked)
    undisturbed.add(first)
    undisturbed.run()
    whole = undisturbed.engine.attach(undisturbed.subscriber(), first.request_id, "", None, 0)
    for count in (1, 4):
        harness = Harness()
        columns = [first_of(output.logprobs, count) for output in whole.outputs]
        emitted = tuple(np.array(output.token_ids[:count], np.int32) for output in whole.outputs)
        spec = request(
            20,
            max_tokens=12,
            n=2,
            emitted=emitted,
            emitted_logprobs=tuple(columns),
            prompt_logprobs=tuple(whole.prompt_logprobs),
            **asked,
        )
        reader = harness.add(spec)
        harness.run()
        assert not reader.prompt, "nothing is reported twice"
        found = harness.engine.attach(harness.subscriber(), spec.request_id, "", None, 0)
        assert [output.logprobs for output in found.outputs] == [output.logprobs for output in whole.outputs]
        assert found.prompt_logprobs == whole.prompt_logprobs


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"emitted_logprobs": (columns_of(1),)}, "emitted[0].logprobs: must have 2 entries"),
        ({"emitted_logprobs": (columns_of(2, tops=3),)}, "as many top entries as the request asks for"),
        ({"emitted_logprobs": (columns_of(2, tops=1, top=1 << 20),)}, "top entries of tokens below"),
        ({"prompt_logprobs": ()}, "emitted: can't be continued without all log probabilities of the prompt"),
        ({"prompt_logprobs": (PromptLogprobs(2, columns_of(19)),)}, "in order and without gaps"),
        ({"prompt_logprobs": (PromptLogprobs(1, columns_of(20)),)}, "must end where the prompt ends"),
        ({"num_prompt_logprobs": -1}, "must be asked for by a detached request"),
    ],
)
def test_log_probabilities_that_break_a_rule_are_refused(fields: dict[str, Any], rule: str) -> None:
    harness = Harness()
    parts = (PromptLogprobs(1, columns_of(19)),)
    whole = {"num_logprobs": 2, "num_prompt_logprobs": 1, "prompt_logprobs": parts, **fields}
    with pytest.raises(RequestRefused) as refused:
        harness.engine.add(taken_over([[5, 6]], **whole), None)
    assert refused.value.code is RefusalCode.INVALID_ARGUMENT and rule in str(refused.value)
