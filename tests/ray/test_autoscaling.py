"""How many engines are wanted, by what waits: bounds, delays, and no swinging to and fro."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples

from headrace_ray.autoscaling import Autoscaler, Load, Policy

ROWS = 8
POLICY = Policy(least=1, most=8, waiting_tokens=100, up_after_s=10, down_after_s=60)

policies = st.builds(
    lambda least, more, tokens, up, down: Policy(least, least + more, tokens, up, down),
    st.integers(1, 5),
    st.integers(0, 20),
    st.integers(1, 10_000),
    st.floats(0, 100),
    st.floats(0, 1000),
)
loads = st.builds(Load, st.integers(0, 100_000), st.integers(0, ROWS), st.just(ROWS))
# Seconds that pass, and what each engine says then.
looks = st.lists(st.tuples(st.floats(0.1, 50), st.lists(loads, max_size=30)), max_size=40)


def spread(engines: int, waiting: int, running: int) -> list[Load]:
    """Loads of so many engines that share this work evenly."""
    return [
        Load(waiting // engines + (index < waiting % engines), min(ROWS, running // engines), ROWS)
        for index in range(engines)
    ]


@settings(max_examples=examples(200))
@given(policies, looks)
def test_the_number_stays_within_its_bounds_and_changes_as_slowly_as_promised(
    policy: Policy, looks: list[tuple[float, list[Load]]]
) -> None:
    scaler = Autoscaler(policy)
    now_s = changed_s = 0.0
    before = scaler.wanted
    for passed_s, said in looks:
        now_s += passed_s
        wanted = scaler.decide(now_s, said)
        assert policy.least <= wanted <= policy.most
        if wanted > before:
            assert wanted <= 2 * before
            assert now_s - changed_s >= policy.up_after_s
            assert sum(load.waiting_tokens for load in said) > policy.waiting_tokens * before
        elif wanted < before:
            assert wanted == before - 1
            assert now_s - changed_s >= policy.down_after_s
        if wanted != before:
            changed_s, before = now_s, wanted


@settings(max_examples=examples(200))
@given(policies, st.integers(0, 200_000), st.integers(0, 300))
def test_under_the_same_work_the_number_comes_to_rest(policy: Policy, waiting: int, running: int) -> None:
    scaler = Autoscaler(policy)
    step_s = max(policy.up_after_s, policy.down_after_s, 1.0)
    numbers = [scaler.decide(look * step_s, spread(scaler.wanted, waiting, running)) for look in range(80)]
    assert len(set(numbers[-20:])) == 1
    # It never went both ways.
    steps = [after - one for one, after in zip(numbers, numbers[1:], strict=False)]
    assert not (any(step > 0 for step in steps) and any(step < 0 for step in steps))


def test_a_burst_that_is_over_soon_adds_nothing() -> None:
    scaler = Autoscaler(POLICY)
    for second in range(100):
        waiting = 10_000 if second % 9 else 0
        assert scaler.decide(second, spread(1, waiting, ROWS)) == 1


def test_engines_are_added_by_the_fewest_tokens_that_waited_all_the_time_and_at_most_doubled() -> None:
    scaler = Autoscaler(POLICY)
    assert scaler.decide(0, spread(1, 5_000, ROWS)) == 1
    assert scaler.decide(5, spread(1, 150, ROWS)) == 1
    assert scaler.decide(10, spread(1, 5_000, ROWS)) == 2
    for second in (11, 20):
        assert scaler.decide(second, spread(2, 5_000, 2 * ROWS)) == 2
    assert scaler.decide(21, spread(2, 5_000, 2 * ROWS)) == 4


def test_nothing_changes_while_an_engine_that_is_wanted_does_not_serve() -> None:
    scaler = Autoscaler(POLICY, wanted=2)
    for second in range(0, 1000, 10):
        assert scaler.decide(second, spread(1, 50_000, ROWS)) == 2
        assert scaler.decide(second, []) == 2
    # And the wait begins once it serves.
    assert scaler.decide(1000, spread(2, 50_000, ROWS)) == 2
    assert scaler.decide(1010, spread(2, 50_000, ROWS)) == 4


@pytest.mark.parametrize(("waiting", "running", "wanted"), [(0, 12, 2), (0, 13, 3), (50, 0, 2), (51, 0, 3)])
def test_an_engine_is_given_up_when_the_others_have_room_to_spare(waiting: int, running: int, wanted: int) -> None:
    scaler = Autoscaler(POLICY, wanted=3)
    said = [Load(waiting, running, ROWS), Load(0, 0, ROWS), Load(0, 0, ROWS)]
    assert scaler.decide(0, said) == 3
    assert scaler.decide(59, said) == 3
    assert scaler.decide(60, said) == wanted


def test_other_bounds_hold_at_once() -> None:
    scaler = Autoscaler(POLICY, wanted=5)
    assert scaler.wanted == 5
    assert Autoscaler(POLICY._replace(most=3), wanted=5).wanted == 3
    assert Autoscaler(POLICY._replace(least=6), wanted=5).wanted == 6
