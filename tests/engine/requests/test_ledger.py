"""The ledger's parts don't overlap and leave nothing out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_backend.engine.requests.ledger import Ledger, Phase


def test_ordinary_way() -> None:
    ledger = Ledger(arrival_ns=100, service_ns=7)
    assert not ledger.started
    ledger.computing(110)
    ledger.first_token(130)
    ledger.end(170)
    assert ledger.parts_ns == [17, 20, 40, 0, 0]
    assert (ledger.ttft_ns, ledger.started_at_ns, ledger.ended_at_ns) == (37, 110, 170)


def test_preempted_and_restarting_go_back_to_where_they_were() -> None:
    ledger = Ledger(0, 0)
    ledger.computing(1)
    ledger.preempted(3)
    ledger.computing(6)
    assert ledger.phase is Phase.PREFILL
    ledger.first_token(10)
    ledger.restarting(15)
    ledger.computing(21)
    assert ledger.phase is Phase.DECODE
    ledger.end(28)
    assert ledger.parts_ns == [1, 2 + 4, 5 + 7, 3, 6]


def test_first_token_read_while_preempted_counts_but_changes_no_phase() -> None:
    ledger = Ledger(0, 0)
    ledger.computing(1)
    ledger.preempted(3)
    ledger.first_token(5)
    assert ledger.phase is Phase.PREEMPTED
    ledger.computing(9)
    assert ledger.phase is Phase.DECODE


def test_request_without_a_token_has_no_time_to_first_token() -> None:
    ledger = Ledger(5, 3)
    ledger.end(25)
    assert ledger.ttft_ns == 0
    assert ledger.parts_ns == [23, 0, 0, 0, 0]


def test_nothing_follows_the_end() -> None:
    ledger = Ledger(0, 0)
    ledger.end(1)
    with pytest.raises(AssertionError):
        ledger.computing(2)


@given(
    st.lists(
        st.tuples(st.sampled_from(["computing", "first_token", "preempted", "restarting"]), st.integers(0, 50)),
        max_size=30,
    )
)
def test_parts_add_up_to_the_whole(transitions: list[tuple[str, int]]) -> None:
    now_ns = 1000
    ledger = Ledger(now_ns, service_ns=11)
    for name, elapsed_ns in transitions:
        now_ns += elapsed_ns
        getattr(ledger, name)(now_ns)
    ledger.end(now_ns + 5)
    assert sum(ledger.parts_ns) == 11 + now_ns + 5 - 1000
