"""The benchmark of telemetry's cost runs engines that do what it says they do."""

from __future__ import annotations

from benchmarks import telemetry_engine


def test_all_modes_compute_the_same_and_only_those_that_tell_tell() -> None:
    turns = [telemetry_engine.Turns(mode, rows=4) for mode in telemetry_engine.MODES]
    for engine in turns:
        assert engine.turn(50) > 0
    assert len({engine.num_tokens for engine in turns}) == 1
    assert len({engine.engine.load().step_count for engine in turns}) == 1
    off, on, recorded = (engine.num_fact_bytes for engine in turns)
    assert off == 0 < on == recorded


def test_figures_come_with_their_intervals() -> None:
    result = telemetry_engine.measure(rows=2, num_turns=3)
    assert result["rows"] == 2 and result["off_us"] > 0
    for name in ("on_beyond_off_us", "recorded_beyond_on_us"):
        median, low, high = result[name]
        assert low <= median <= high
