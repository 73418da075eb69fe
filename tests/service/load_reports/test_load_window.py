"""What engines' loads come to: rates, utilization, and the weight that gRPC makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_protos.engine.v1 import engine_pb2
from headrace_protos.orca.orca_load_report_pb2 import OrcaLoadReport
from headrace_service.load_reports.load_window import WINDOW_NS, LoadWindow

_S = 1_000_000_000
_ROWS = 16
_COUNTS = st.integers(0, 1000)


def load(running: int = 0, waiting: int = 0, taken: int = 0, refused: int = 0, **more: float) -> engine_pb2.Load:
    return engine_pb2.Load(
        running_sequences=running,
        waiting_requests=waiting,
        taken_requests=taken,
        refused_requests=refused,
        max_running_sequences=_ROWS,
        kv_blocks=100,
        **more,  # type: ignore[arg-type]
    )


def weight(report: OrcaLoadReport) -> float:
    """The weight of weighted_round_robin: gRFC A58, with its penalty for errors of 1."""
    rps = report.rps_fractional
    return rps / (report.application_utilization + report.eps / rps)


def steady(window: LoadWindow, per_s: int, running: int, waiting: int = 0, engines: int = 1) -> OrcaLoadReport:
    """The report of engines that take requests at a rate and always have as many."""
    for second in range(20):
        loads = {str(engine): load(running, waiting, per_s * second) for engine in range(engines)}
        report = window.add(second * _S, loads)
    return report


def test_rates_are_of_the_engines_over_the_window() -> None:
    report = steady(LoadWindow(), per_s=6, running=4, engines=2)
    assert (report.rps_fractional, report.eps) == (12, 0)
    assert report.application_utilization == report.utilization["batch_rows"] == 4 / _ROWS
    assert report.named_metrics["num_requests_running"] == 8


def test_a_first_look_knows_no_rate() -> None:
    report = LoadWindow().add(5 * _S, {"a": load(running=4, taken=1000)})
    assert (report.rps_fractional, report.application_utilization) == (0, 4 / _ROWS)


def test_engines_that_are_twice_as_fast_weigh_twice_as_much() -> None:
    """Both take as many requests per second, and each takes half the time in the fast one."""
    slow, fast = (steady(LoadWindow(), per_s=4, running=running) for running in (8, 4))
    assert weight(fast) == pytest.approx(2 * weight(slow))
    both = steady(LoadWindow(), per_s=4, running=8, engines=2)
    assert weight(both) == pytest.approx(2 * weight(slow))


def test_the_weight_does_not_depend_on_how_much_is_asked() -> None:
    light, heavy = (steady(LoadWindow(), per_s=rate, running=rate) for rate in (2, 12))
    assert weight(light) == pytest.approx(weight(heavy))


def test_waiting_requests_are_more_than_there_is_room_for() -> None:
    report = steady(LoadWindow(), per_s=4, running=_ROWS, waiting=_ROWS // 2)
    assert report.application_utilization == 1.5
    assert report.utilization["batch_rows"] == 1


def test_the_scarcer_of_rows_and_blocks_counts() -> None:
    report = LoadWindow().add(0, {"a": load(running=4, kv_cache_usage=0.75)})
    assert report.application_utilization == report.utilization["kv_cache"] == 0.75


def test_refusals_are_errors_and_lower_the_weight() -> None:
    window, fine = LoadWindow(), steady(LoadWindow(), per_s=4, running=8)
    for second in range(20):
        report = window.add(second * _S, {"a": load(8, taken=4 * second, refused=2 * second)})
    assert (report.rps_fractional, report.eps) == (6, 2)
    assert weight(report) < weight(fine) * 6 / 4


def test_an_engine_that_begins_anew_or_joins_counts_from_where_it_is() -> None:
    window = LoadWindow()
    window.add(0, {"a": load(taken=500)})
    window.add(_S, {"a": load(taken=0), "b": load(taken=900)})
    report = window.add(2 * _S, {"a": load(taken=3), "b": load(taken=901)})
    assert report.rps_fractional == 4 / 2


@given(st.lists(st.tuples(st.integers(1, WINDOW_NS), _COUNTS, _COUNTS, _COUNTS, _COUNTS), min_size=1, max_size=30))
def test_reports_hold_only_what_their_readers_allow(steps: list[tuple[int, int, int, int, int]]) -> None:
    """No figure is negative, shares are at most 1, and errors are no more than requests."""
    window, at_ns = LoadWindow(), 0
    for pause_ns, running, waiting, taken, refused in steps:
        at_ns += pause_ns
        report = window.add(at_ns, {"a": load(running, waiting, taken, refused)})
        assert 0 <= report.eps <= report.rps_fractional
        assert all(0 <= share <= 1 for share in report.utilization.values())
        assert report.application_utilization >= 0 and report.cpu_utilization == 0
