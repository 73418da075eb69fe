"""Rates are exact to the nanosecond.

What a bucket promises for a moment holds at that moment, and not a nanosecond earlier.
"""

from __future__ import annotations

from fractions import Fraction

import hypothesis
from hypothesis import strategies as st

from headrace_backend.engine.limits.sharing.pools import MINUTE_NS, RateBucket

limits = st.integers(1, 10) | st.integers(1, 10**6) | st.just(2**64 - 1)
pauses = st.integers(0, 10**9) | st.integers(0, 2 * MINUTE_NS)


def fraction(limit: int, share: float) -> int:
    return int(limit * Fraction(share))


@hypothesis.given(limits, st.lists(st.tuples(st.floats(0, 1.2), pauses, st.booleans()), max_size=20))
def test_bucket_is_a_level_that_rises_evenly_to_its_limit(limit: int, actions: list[tuple[float, int, bool]]) -> None:
    bucket, now_ns = RateBucket(limit, 5), 5
    level = Fraction(limit)
    for share, pause_ns, gives_back in actions:
        now_ns += pause_ns
        level = min(Fraction(limit), level + Fraction(limit * pause_ns, MINUTE_NS))
        amount = fraction(limit, share) if share <= 1 else limit + 1
        if gives_back:
            bucket.give_back(amount, now_ns)
            level = min(Fraction(limit), level + amount)
            continue
        wait_ns = bucket.wait_ns(amount, now_ns)
        assert (wait_ns is None) == (amount > limit)
        assert (wait_ns == 0) == (amount <= level)
        if wait_ns == 0:
            bucket.take(amount, now_ns)
            level -= amount
    assert bucket.is_full(now_ns) == (level == limit)


@hypothesis.given(limits, st.floats(0.01, 1), st.floats(0.01, 1))
def test_promised_moment_is_exact(limit: int, first: float, second: float) -> None:
    bucket = RateBucket(limit, 0)
    bucket.take(max(1, fraction(limit, first)), 0)
    amount = max(1, fraction(limit, second))
    wait_ns = bucket.wait_ns(amount, 0)
    assert wait_ns is not None
    if wait_ns:
        assert bucket.wait_ns(amount, wait_ns - 1) == 1
    assert bucket.wait_ns(amount, wait_ns) == 0
    bucket.take(amount, wait_ns)


@hypothesis.given(limits, limits, st.floats(0, 1), pauses)
def test_new_limit_is_met_within_a_minute_whatever_was_taken(
    before: int, after: int, taken: float, pause_ns: int
) -> None:
    bucket = RateBucket(before, 0)
    bucket.take(fraction(before, taken), 0)
    bucket.change_limit(after, pause_ns)
    wait_ns = bucket.wait_ns(after, pause_ns)
    assert wait_ns is not None and wait_ns <= MINUTE_NS
    assert bucket.is_full(pause_ns + MINUTE_NS)


def test_what_time_gave_back_is_not_given_twice() -> None:
    bucket = RateBucket(60, 0)
    bucket.take(60, 0)
    half_ns = MINUTE_NS // 2
    bucket.give_back(60, half_ns)
    bucket.take(60, half_ns)
    assert bucket.wait_ns(1, half_ns) == MINUTE_NS // 60
