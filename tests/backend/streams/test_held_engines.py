"""Whether an engine stands in for others, by what services say that they hold."""

from __future__ import annotations

import pytest

from headrace_backend.engine.errors import RefusalCode, RequestRefused
from headrace_backend.server.streams.held_engines import QUIET_NS, HeldEngines

ONE, OTHER = 1, 2
LOST, ALIVE = 7, 8


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def held(clock: Clock) -> HeldEngines:
    """An engine that has been there for long."""
    engines = HeldEngines(clock)
    clock.now_ns += 100 * QUIET_NS
    return engines


def takes(held: HeldEngines, clock: Clock, *numbers: int, stands_in: bool = True) -> bool:
    try:
        held.check_unheld(numbers, stands_in, clock.now_ns)
    except RequestRefused as refused:
        assert refused.code is RefusalCode.UNAVAILABLE and refused.retry_after_ns
        return False
    return True


def test_one_that_has_just_begun_knows_of_no_service_yet(clock: Clock) -> None:
    held = HeldEngines(clock)
    assert not takes(held, clock, LOST) and takes(held, clock, LOST, stands_in=False)
    clock.now_ns += QUIET_NS
    assert takes(held, clock, LOST)


def test_what_a_service_reaches_is_refused_whoever_asks(held: HeldEngines, clock: Clock) -> None:
    held.report(ONE, [LOST, ALIVE], [])
    held.report(OTHER, [ALIVE], [])
    for stands_in in (False, True):
        assert not takes(held, clock, LOST, stands_in=stands_in)
        assert not takes(held, clock, 9, ALIVE, stands_in=stands_in)
        assert takes(held, clock, 9, stands_in=stands_in)


def test_what_is_on_its_way_is_refused_until_it_has_been_there_for_a_while(held: HeldEngines, clock: Clock) -> None:
    held.report(ONE, [LOST, ALIVE], [])
    held.report(ONE, [ALIVE], [LOST])
    clock.now_ns += 50 * QUIET_NS
    assert not takes(held, clock, LOST)
    # The key's own engine is asked: it would have had the request.
    assert takes(held, clock, LOST, stands_in=False)
    held.report(ONE, [ALIVE], [])
    clock.now_ns += QUIET_NS - 1
    assert not takes(held, clock, LOST)
    clock.now_ns += 1
    assert takes(held, clock, LOST)


def test_a_request_that_waited_here_counts_from_when_it_came(held: HeldEngines, clock: Clock) -> None:
    came_ns = clock.now_ns
    held.report(ONE, [ALIVE], [LOST])
    held.report(ONE, [ALIVE], [])
    clock.now_ns += 3 * QUIET_NS
    # Others were asked before it came, when what they have now may not have been there.
    with pytest.raises(RequestRefused):
        held.check_unheld([LOST], True, came_ns)
    assert takes(held, clock, LOST)


def test_a_service_that_is_gone_holds_on_for_a_while(held: HeldEngines, clock: Clock) -> None:
    held.report(ONE, [LOST], [])
    held.stream_lost(ONE)
    held.stream_lost(OTHER)
    assert takes(held, clock, LOST, stands_in=False) and not takes(held, clock, LOST)
    clock.now_ns += QUIET_NS
    assert takes(held, clock, LOST)


def test_one_service_that_lets_go_leaves_the_other(held: HeldEngines, clock: Clock) -> None:
    for stream_id in (ONE, OTHER):
        held.report(stream_id, [LOST], [])
    held.report(ONE, [], [])
    clock.now_ns += 10 * QUIET_NS
    assert not takes(held, clock, LOST)
    held.report(OTHER, [], [])
    assert not takes(held, clock, LOST)
