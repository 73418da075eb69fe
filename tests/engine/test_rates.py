"""What the engine measures of itself."""

from __future__ import annotations

import pytest

from headrace_backend.engine.rates import Rates

SECOND = 1_000_000_000


def test_slow_first_step_does_not_stand_for_what_full_steps_reach() -> None:
    rates = Rates(0)
    rates.note_step(0, 2 * SECOND, 10, 1)
    assert rates.prefill_tokens_per_s == 5
    rates.note_step(0, SECOND, 2000, 1)
    assert rates.prefill_tokens_per_s == 2000
    for _ in range(1000):
        rates.note_step(0, SECOND, 100, 1)
    assert rates.prefill_tokens_per_s == 100


def test_output_rate_is_that_of_the_last_window_and_fades_when_idle() -> None:
    rates = Rates(0)
    for step in range(1, 41):
        rates.note_step(step * SECOND // 10, 1, 0, 7)
    assert rates.output_tokens_per_s(4 * SECOND) == pytest.approx(70, rel=0.1)
    assert rates.output_tokens_per_s(20 * SECOND) < 10
    assert rates.output_tokens_per_s(40 * SECOND) == 0


def test_row_time_is_an_average() -> None:
    rates = Rates(0)
    rates.note_request(100)
    assert rates.row_time_ns == 100
    for _ in range(500):
        rates.note_request(200)
    assert rates.row_time_ns == pytest.approx(200, rel=0.01)
