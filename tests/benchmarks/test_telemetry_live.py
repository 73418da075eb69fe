"""The benchmark of one server whose telemetry is switched while it runs.

Silence is silence, and differences are between turns of one round.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator

import pytest
from benchmarks import telemetry_live
from benchmarks.instant_backend import switched_step_log
from benchmarks.telemetry_serving import Load


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("tells", [False, True])
def test_a_backend_is_silenced_and_tells_again_as_before(tells: bool) -> None:
    steps = switched_step_log(itertools.count().__next__)
    steps.tells, steps.keeps_records = tells, True
    for number, now in ((signal.SIGUSR1, False), (signal.SIGUSR1, False), (signal.SIGUSR2, True)):
        os.kill(os.getpid(), number)
        assert (steps.tells, steps.keeps_records) == (now and tells, now)


def test_every_kind_is_compared_with_silence_turn_by_turn() -> None:
    turn = dict.fromkeys(telemetry_live.COMPARED, 100.0)
    turns = {
        name: [{figure: value * share * factor for figure, value in turn.items()} for factor in (1.0, 3.0, 0.5)]
        for name, share in (("silent", 1.0), ("array", 0.99))
    }
    result = telemetry_live.compared(turns)
    assert result["silent"]["tokens_per_s"] == 100 and result["turns"]["array"]["itl_p99_ms"] == [99, 297, 49.5]
    for change in result["array / silent - 1"].values():
        assert change == pytest.approx({"median": -0.01, "low": -0.01, "high": -0.01})


@pytest.mark.slow
def test_one_server_is_measured_in_all_its_states() -> None:
    load = Load(step_ms=5.0, streams=8, clients=1)
    result = telemetry_live.run(2, 0.5, ("silent", "unsampled", "array", "span"), load)
    for name in ("silent", "unsampled", "array", "span"):
        # 8 streams, a token every 5 ms; a slow machine makes fewer, none makes more.
        assert 50 < result[name]["tokens_per_s"] < 1.1 * 8 / 0.005
        assert len(result["turns"][name]["tokens_per_s"]) == 2
    assert result["dropped_facts"] == result["dropped_spans"] == 0
    # Token spans of three turns of half a second and more.
    assert result["spans_collected"] > 3 * 0.5 * result["span"]["tokens_per_s"]
