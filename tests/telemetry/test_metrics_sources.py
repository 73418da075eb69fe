"""Figures of processes that come, go, restart and tell things twice."""

from __future__ import annotations

import pathlib
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, NumberDataPoint
from tests.support import reported_facts as reported

from headrace_facts import facts
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.metrics.aggregates import Histogram
from headrace_telemetry.metrics.sink import MetricSink
from headrace_telemetry.metrics.snapshot import Snapshots

_OTHER_SERVICE = facts.Hello("service", "service-1", "service-life-2", "0.1.0", 13, 0)


class _Figures:
    """A sink with a clock of the test's, and its figures by name and attributes."""

    def __init__(self, **settings: Any) -> None:
        config = TelemetryConfig(telemetry_socket=pathlib.Path("unused"), **settings)
        self.now_ns = 10**15
        self.counts = ExportCounts()
        self._snapshots = Snapshots({"service.name": "headrace"})
        self.sink = MetricSink(config, self._snapshots.meter(), self.counts, lambda: self.now_ns)

    def pass_time(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
        self.sink.tick(self.now_ns)

    def points(self, name: str) -> list[NumberDataPoint | HistogramDataPoint]:
        self.sink.heed_time()
        data = self._snapshots.take(self.sink.metrics)
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        return [point for metric in metrics if metric.name == name for point in metric.data.data_points]

    def values(self, name: str) -> list[float]:
        return [point.value for point in self.points(name) if isinstance(point, NumberDataPoint)]

    def counted(self, name: str) -> int:
        return sum(point.count for point in self.points(name) if isinstance(point, HistogramDataPoint))


def test_totals_go_on_over_a_backends_restart() -> None:
    figures = _Figures()
    seen = []
    for engine, preemptions in (("a", 3), ("a", 5), ("b", 0), ("b", 2), ("a", 5), ("b", 1), ("b", 4)):
        figures.sink.take(reported.BACKEND, reported.engine_load(engine=engine, preemptions=preemptions))
        seen += figures.values("headrace.preemptions")
    assert seen == [3, 5, 5, 7, 7, 7, 9]


@hypothesis.given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20)), max_size=30))
def test_totals_never_fall_and_reach_the_sum_of_lives(reported_totals: list[tuple[str, int]]) -> None:
    figures = _Figures()
    last, most = 0.0, dict.fromkeys("abc", 0)
    for engine, total in reported_totals:
        figures.sink.take(reported.BACKEND, reported.engine_load(engine=engine, late_work=total))
        most[engine] = max(most[engine], total)
        (now,) = figures.values("headrace.late_work")
        assert now >= last
        last = now
    assert last == sum(most.values())


def test_gauges_of_who_left_disappear() -> None:
    figures = _Figures()
    for source in (reported.SERVICE, reported.BACKEND):
        figures.sink.take(source, source)
    figures.sink.take(reported.BACKEND, reported.engine_load())
    figures.sink.take(reported.SERVICE, facts.ServiceLoad(1, 2, 3))
    assert figures.values("headrace.requests.running") == [3]
    assert figures.values("headrace.kv.usage") == [0.4]
    assert figures.values("headrace.service.open_calls") == [1]
    assert sorted(figures.values("headrace.process.up")) == [1, 1]
    figures.sink.gone(reported.BACKEND)
    assert figures.values("headrace.requests.running") == []
    assert figures.values("headrace.kv.blocks") == []
    assert figures.values("headrace.service.open_calls") == [1]
    assert sorted(figures.values("headrace.process.up")) == [0, 1]
    # Counters stay: what was counted happened.
    assert figures.values("headrace.preemptions") == [1]


def test_a_process_that_left_is_missed_for_a_quarter_of_an_hour() -> None:
    figures = _Figures()
    figures.sink.take(reported.BACKEND, reported.BACKEND)
    figures.pass_time(2000)
    assert figures.values("headrace.process.up") == [1]
    figures.sink.gone(reported.BACKEND)
    figures.pass_time(880)
    assert figures.values("headrace.process.up") == [0]
    figures.pass_time(30)
    assert figures.values("headrace.process.up") == []
    figures.sink.take(reported.BACKEND, reported.BACKEND)
    assert figures.values("headrace.process.up") == [1]


def test_gauges_of_who_says_nothing_disappear_and_come_back() -> None:
    figures = _Figures()
    figures.sink.take(reported.BACKEND, reported.engine_load())
    figures.pass_time(9)
    assert figures.values("headrace.requests.waiting") == [2]
    figures.pass_time(2)
    assert figures.values("headrace.requests.waiting") == []
    figures.sink.take(reported.BACKEND, reported.engine_load(waiting_requests=7))
    assert figures.values("headrace.requests.waiting") == [7]


def test_backends_of_one_model_are_added_up() -> None:
    figures = _Figures()
    figures.sink.take(reported.BACKEND, reported.engine_load(engine="a", used_blocks=100, num_blocks=100))
    figures.sink.take(reported.BACKEND, reported.engine_load(engine="b", used_blocks=0, num_blocks=300))
    assert figures.values("headrace.requests.running") == [6]
    assert figures.values("headrace.kv.usage") == [0.25]


def test_refusals_are_counted_by_reason_from_zero() -> None:
    figures = _Figures()
    figures.sink.take(reported.BACKEND, reported.engine_load())
    assert figures.values("headrace.refusals") == [0] * 5
    figures.sink.take(reported.BACKEND, reported.engine_load(refusals={"queue_full": 4, "new_reason": 1}))
    by_reason = {
        dict(point.attributes or {})["headrace.refusal.reason"]: point.value
        for point in figures.points("headrace.refusals")
        if isinstance(point, NumberDataPoint)
    }
    assert by_reason == {"queue_full": 4, "deadline": 0, "quota": 0, "invalid": 0, "other": 0, "new_reason": 1}


def test_lost_lines_of_logs_are_reported_from_the_beginning() -> None:
    figures = _Figures()
    figures.sink.take(reported.BACKEND, reported.BACKEND)
    assert figures.values("headrace.log.lost_lines") == [0]
    figures.sink.take(reported.BACKEND, facts.LinesLost(3))
    figures.sink.take(reported.BACKEND, facts.LinesLost(4))
    assert figures.values("headrace.log.lost_lines") == [7]


def test_telemetrys_own_counts_are_reported() -> None:
    figures = _Figures()
    figures.counts.exported["traces"], figures.counts.dropped["traces"], figures.counts.failures["metrics"] = 7, 2, 3
    figures.sink.take(reported.SERVICE, reported.SERVICE)
    assert figures.values("headrace.telemetry.dropped_facts") == [0]
    figures.sink.take(reported.SERVICE, facts.Dropped(5, 100))
    figures.sink.take(reported.SERVICE, facts.Dropped(6, 100))
    assert figures.values("headrace.telemetry.dropped_facts") == [11]
    assert figures.values("headrace.telemetry.exported_spans") == [7]
    assert figures.values("headrace.telemetry.dropped_spans") == [2, 0]
    assert figures.values("headrace.telemetry.export_failures") == [0, 3]


def test_steps_that_backend_and_services_tell_count_once() -> None:
    figures = _Figures()
    for source in (reported.SERVICE, reported.BACKEND, _OTHER_SERVICE):
        figures.sink.take(source, reported.steps(reported.records(1, 50)))
    assert figures.counted("headrace.step.duration") == 50
    assert figures.counted("headrace.step.interval") == 49


def test_steps_of_services_count_while_no_backend_tells_them() -> None:
    figures = _Figures()
    figures.sink.take(reported.SERVICE, reported.steps(reported.records(1, 30)))
    figures.sink.take(_OTHER_SERVICE, reported.steps(reported.records(20, 30)))
    assert figures.counted("headrace.step.duration") == 49
    figures.sink.take(reported.BACKEND, reported.steps(reported.records(50, 10)))
    figures.sink.take(reported.SERVICE, reported.steps(reported.records(1000, 10)))
    assert figures.counted("headrace.step.duration") == 59
    figures.pass_time(11)
    figures.sink.take(reported.SERVICE, reported.steps(reported.records(1000, 10)))
    assert figures.counted("headrace.step.duration") == 69


@hypothesis.given(st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=20), max_size=12))
def test_each_step_counts_once_however_it_is_reported(batches: list[list[int]]) -> None:
    figures = _Figures()
    for number, ids in enumerate(batches):
        made = reported.records(1, len(ids), step_id=sorted(ids))
        figures.sink.take((reported.SERVICE, _OTHER_SERVICE)[number % 2], reported.steps(made))
    assert figures.counted("headrace.step.sequences") == len({step for ids in batches for step in ids})


def test_steps_count_again_in_another_life_of_the_backend() -> None:
    figures = _Figures()
    for engine in ("a", "b"):
        figures.sink.take(reported.BACKEND, reported.engine_facts(engine=engine))
        figures.sink.take(reported.BACKEND, reported.steps(reported.records(1, 20), engine))
    assert figures.counted("headrace.step.duration") == 40
    assert len(figures.points("headrace.step.sequences")) == 1


def test_a_backend_that_speaks_is_remembered_whatever_lives_come_and_go() -> None:
    figures = _Figures()
    for number in range(200):
        figures.sink.take(reported.BACKEND, reported.steps(reported.records(1, 10), "stays"))
        figures.sink.take(reported.BACKEND, reported.steps(reported.records(1, 1), f"life-{number}"))
    assert figures.counted("headrace.step.duration") == 10 + 200


def test_an_interval_needs_a_step_that_decodes_and_the_one_right_before_it() -> None:
    figures = _Figures()
    made = reported.records(1, 10)
    made["num_decodes"][4] = 0
    figures.sink.take(reported.BACKEND, reported.steps(made[[0, 1, 2, 4, 5, 8, 9]]))
    # 2, 3, 6 and 10: the fifth does not decode, nothing is known of the fourth and the eighth.
    (point,) = figures.points("headrace.step.interval")
    assert isinstance(point, HistogramDataPoint)
    assert (point.count, point.sum) == (4, pytest.approx(4 * 0.005))


def test_steps_are_reported_by_what_was_in_them() -> None:
    figures = _Figures()
    made = reported.records(1, 6, num_prefill_tokens=[0, 0, 0, 64, 64, 512])
    made["num_decodes"][5] = 0
    figures.sink.take(reported.BACKEND, reported.steps(made))
    kinds = {
        dict(point.attributes or {})["headrace.step.kind"]: point.count
        for point in figures.points("headrace.step.duration")
        if isinstance(point, HistogramDataPoint)
    }
    assert kinds == {"decode": 3, "mixed": 2, "prefill": 1}
    tokens = {
        dict(point.attributes or {})["headrace.token.kind"]: (point.count, point.sum)
        for point in figures.points("headrace.step.tokens")
        if isinstance(point, HistogramDataPoint)
    }
    assert tokens == {"prefill": (3, 640), "decode": (5, 160)}


def test_shares_are_bytes_and_operations_over_the_devices_rates() -> None:
    figures = _Figures()
    figures.sink.take(reported.BACKEND, reported.engine_facts())
    made = reported.records(1, 1, num_prefill_tokens=100, attention_pairs=5000)
    figures.sink.take(reported.BACKEND, reported.steps(made))
    (bandwidth,) = figures.points("headrace.step.bandwidth_share")
    (flops,) = figures.points("headrace.step.flops_share")
    assert isinstance(bandwidth, HistogramDataPoint) and isinstance(flops, HistogramDataPoint)
    # A step of 4 ms: 1 GB of weights, 16,000 tokens of context read and 132 written at 1,000 bytes;
    # the device copies 4 GB meanwhile.
    assert bandwidth.sum == pytest.approx((1e9 + (16_000 + 132) * 1000) / 4e9)
    # 132 tokens, 5,000 + 16,000 pairs, 32 samples; the device does 4e11 meanwhile.
    assert flops.sum == pytest.approx((132 * 1e9 + 21_000 * 1e4 + 32 * 1e8) / 4e11)


def test_a_step_of_a_mixture_moves_the_experts_that_its_tokens_hit() -> None:
    figures = _Figures()
    figures.sink.take(reported.BACKEND, reported.engine_facts(expert_bytes=2_000_000_000, expert_share=1 / 64))
    figures.sink.take(reported.BACKEND, reported.steps(reported.records(1, 1)))
    (bandwidth,) = figures.points("headrace.step.bandwidth_share")
    assert isinstance(bandwidth, HistogramDataPoint)
    # 32 tokens of 1 of 64 experts each miss one by (63/64)^32, 60%.
    hit = 2e9 * (1 - (63 / 64) ** 32)
    assert bandwidth.sum == pytest.approx((1e9 + hit + (16_000 + 32) * 1000) / 4e9)


def test_a_step_reads_and_writes_the_states_of_its_rows() -> None:
    figures = _Figures()
    figures.sink.take(reported.BACKEND, reported.engine_facts(row_state_bytes=10_000_000))
    made = reported.records(1, 1)
    figures.sink.take(reported.BACKEND, reported.steps(made))
    (bandwidth,) = figures.points("headrace.step.bandwidth_share")
    assert isinstance(bandwidth, HistogramDataPoint)
    states = 2 * 10_000_000 * int(made["num_sequences"][0])
    assert states and bandwidth.sum == pytest.approx((1e9 + (16_000 + 32) * 1000 + states) / 4e9)


def test_shares_are_left_out_where_nothing_was_measured() -> None:
    figures = _Figures()
    figures.sink.take(reported.BACKEND, reported.engine_facts(copy_bytes_per_s=0.0, matmul_flops_per_s=0.0))
    figures.sink.take(reported.BACKEND, reported.steps(reported.records(1, 5)))
    assert figures.counted("headrace.step.duration") == 5
    assert not figures.points("headrace.step.bandwidth_share")
    assert not figures.points("headrace.step.flops_share")


def test_steps_cut_short_on_their_way_are_counted_as_far_as_they_are_whole() -> None:
    figures = _Figures()
    figures.sink.take(reported.BACKEND, facts.Steps(reported.ENGINE, 0, reported.records(1, 3).tobytes()[:-1]))
    assert figures.counted("headrace.step.duration") == 2


@hypothesis.given(
    st.lists(st.floats(0, 3, allow_nan=False), min_size=1, max_size=50),
    st.lists(st.floats(0.001, 2), min_size=1, max_size=10, unique=True).map(sorted),
)
def test_values_count_as_the_sdk_counts_them_one_by_one_and_at_once(values: list[float], bounds: list[float]) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    theirs = provider.get_meter("test").create_histogram("h", explicit_bucket_boundaries_advisory=bounds)
    ours, at_once = Histogram(bounds, {}, 0), Histogram(bounds, {}, 0)
    for value in values:
        theirs.record(value)
        ours.observe(value)
    for part in np.array_split(np.asarray(values), 3):
        at_once.observe_all(part)
    data = reader.get_metrics_data()
    assert data is not None
    (expected,) = data.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points
    assert isinstance(expected, HistogramDataPoint)
    for point in (ours.point(0), at_once.point(0)):
        assert list(point.bucket_counts) == list(expected.bucket_counts)
        assert (point.count, point.sum) == (expected.count, pytest.approx(expected.sum))
        assert (point.min, point.max) == (expected.min, expected.max)


def test_cost_is_the_price_of_time_and_of_the_windows_tokens() -> None:
    figures = _Figures(price_per_hour=3.6, price_currency="EUR")
    assert figures.values("headrace.cost.per_million_output_tokens") == []
    figures.sink.generation(reported.SERVICE, reported.generation(output_tokens=4000, prompt_tokens=20_000), None)
    for _ in range(100):
        figures.pass_time(1)
    # 0.001 a second: 100 s cost 0.1, over 4,000 tokens.
    assert figures.values("headrace.cost") == [pytest.approx(0.1)]
    assert figures.values("headrace.cost.per_million_output_tokens") == [pytest.approx(25.0)]
    assert figures.values("headrace.cost.per_million_input_tokens") == [pytest.approx(5.0)]
    (point,) = figures.points("headrace.cost")
    assert dict(point.attributes or {}) == {"headrace.cost.currency": "EUR"}
    for _ in range(400):
        figures.pass_time(1)
    # The tokens are out of the window; time still costs.
    assert figures.values("headrace.cost.per_million_output_tokens") == []
    assert figures.values("headrace.cost") == [pytest.approx(0.5)]
    figures.sink.generation(reported.SERVICE, reported.generation(output_tokens=3000, prompt_tokens=1), None)
    assert figures.values("headrace.cost.per_million_output_tokens") == [pytest.approx(100.0, rel=0.01)]


def test_without_a_price_there_is_no_cost() -> None:
    figures = _Figures()
    figures.sink.generation(reported.SERVICE, reported.generation(), None)
    figures.pass_time(10)
    assert not [name for name in ("headrace.cost", "headrace.cost.per_million_output_tokens") if figures.points(name)]
