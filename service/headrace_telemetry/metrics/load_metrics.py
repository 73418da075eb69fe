"""Metrics of how busy backends and services are, and of telemetry itself.

Owns two things that processes don't keep: totals that go on over restarts (a backend counts from 0
in each life; its model's counters don't), and forgetting: figures of who has left, or has said
nothing for 10 s, are no longer reported. That a process was there and is gone is reported for a
quarter of an hour: long enough for an alert, not for ever where it was stopped on purpose.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar

from opentelemetry.metrics import CallbackOptions, Counter, Meter, Observation

from headrace_facts import facts
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.metrics import catalogue

_Load = TypeVar("_Load")

_SILENT_NS: Final = 10_000_000_000
_GONE_NS: Final = 900_000_000_000
# Lives of backends whose last totals are remembered.
_MOST_ENGINES: Final = 256
_SIGNALS: Final = ("traces", "metrics")
_REASONS: Final = ("queue_full", "deadline", "quota", "invalid", "other")
# A counter, further attributes of it, and a total of a life.
_Total = tuple[catalogue.Metric, dict[str, str], int]


@dataclasses.dataclass(slots=True)
class _Heard(Generic[_Load]):
    """The last word of a source."""

    load: _Load
    at_ns: int


class LoadMetrics:
    """Gauges and totals of all processes.

    Args:
        meter: makes the instruments.
        counts: what this process counts of its own work.
    """

    def __init__(self, meter: Meter, counts: ExportCounts) -> None:
        self.now_ns = 0
        self._counts = counts
        self._engines: dict[str, _Heard[tuple[str, facts.EngineLoad]]] = {}
        self._services: dict[str, _Heard[tuple[str, facts.ServiceLoad]]] = {}
        # By kind and name: how many are connected, and when the last one left.
        self._connected: collections.Counter[tuple[str, str]] = collections.Counter()
        self._left_at_ns: dict[tuple[str, str], int] = {}
        self._last_totals: collections.OrderedDict[str, dict[tuple[str, str], int]] = collections.OrderedDict()
        self._counters: dict[str, Counter] = {}
        self._meter = meter
        self._create_gauges()
        self._create_own()

    def joined(self, source: facts.Hello) -> None:
        """Notes that a process has connected."""
        self._connected[source.kind, source.name] += 1
        for metric in (catalogue.DROPPED_FACTS, catalogue.LOST_LINES):
            self._counter(metric).add(0, _named(source))

    def gone(self, source: facts.Hello) -> None:
        """A connection has ended: its source's figures end with it."""
        self._connected[source.kind, source.name] -= 1
        self._left_at_ns[source.kind, source.name] = self.now_ns
        self._services.pop(source.instance, None)
        for engine in [engine for engine, heard in self._engines.items() if heard.load[0] == source.instance]:
            del self._engines[engine]

    def dropped(self, source: facts.Hello, dropped: facts.Dropped) -> None:
        """A process could not tell everything."""
        self._counter(catalogue.DROPPED_FACTS).add(dropped.facts, _named(source))

    def lines_lost(self, source: facts.Hello, lost: facts.LinesLost) -> None:
        """A process could not write all of its log."""
        self._counter(catalogue.LOST_LINES).add(lost.lines, _named(source))

    def service(self, source: facts.Hello, load: facts.ServiceLoad) -> None:
        """Takes how busy a service is."""
        self._services[source.instance] = _Heard((source.name, load), self.now_ns)

    def engine(self, source: facts.Hello, load: facts.EngineLoad) -> None:
        """Takes how busy a backend is, and its totals."""
        self._engines[load.engine] = _Heard((source.instance, load), self.now_ns)
        last = self._last_totals.setdefault(load.engine, {})
        self._last_totals.move_to_end(load.engine)
        if len(self._last_totals) > _MOST_ENGINES:
            self._last_totals.popitem(last=False)
        for metric, attributes, total in _totals(load):
            key = (metric.name, "".join(attributes.values()))
            # A life's totals only grow; a smaller one is old news, which came by another way.
            increase = max(total - last.get(key, 0), 0)
            last[key] = last.get(key, 0) + increase
            self._counter(metric).add(increase, {catalogue.MODEL: load.model, **attributes})

    def _counter(self, metric: catalogue.Metric) -> Counter:
        counter = self._counters.get(metric.name)
        if counter is None:
            counter = self._meter.create_counter(metric.name, metric.unit, metric.description)
            self._counters[metric.name] = counter
        return counter

    def _fresh_engines(self) -> Iterator[facts.EngineLoad]:
        return (heard.load[1] for heard in self._engines.values() if self.now_ns - heard.at_ns < _SILENT_NS)

    def _fresh_services(self) -> Iterator[tuple[str, facts.ServiceLoad]]:
        return (heard.load for heard in self._services.values() if self.now_ns - heard.at_ns < _SILENT_NS)

    def _create_gauges(self) -> None:
        for metric, field in (
            (catalogue.RUNNING, "running_sequences"),
            (catalogue.MAX_RUNNING, "max_running_sequences"),
            (catalogue.WAITING, "waiting_requests"),
            (catalogue.WAITING_TOKENS, "waiting_tokens"),
        ):
            self._gauge(metric, functools.partial(self._by_model, field))
        for metric, field in (
            (catalogue.OPEN_CALLS, "open_calls"),
            (catalogue.OPEN_GENERATIONS, "open_generations"),
            (catalogue.PENDING_BYTES, "pending_bytes"),
        ):
            self._gauge(metric, functools.partial(self._by_service, field))
        self._gauge(catalogue.KV_BLOCKS, self._blocks)
        self._gauge(catalogue.KV_USAGE, self._usage)
        self._gauge(catalogue.PROCESS_UP, self._up)

    def _create_own(self) -> None:
        """Counters of telemetry itself, which are observed because others count them."""
        counts = self._counts
        spans = {catalogue.SIGNAL: "traces"}
        self._observed(catalogue.EXPORTED_SPANS, lambda: [Observation(counts.exported.get("traces", 0), spans)])
        self._observed(
            catalogue.DROPPED_SPANS,
            lambda: [
                Observation(counts.dropped.get("traces", 0), spans),
                Observation(counts.file_dropped, {catalogue.SIGNAL: "file"}),
            ],
        )
        self._observed(
            catalogue.EXPORT_FAILURES,
            lambda: [Observation(counts.failures.get(name, 0), {catalogue.SIGNAL: name}) for name in _SIGNALS],
        )
        self._observed(catalogue.INCOMPLETE_TRACES, lambda: [Observation(counts.incomplete)])
        self._observed(catalogue.BAD_FRAMES, lambda: [Observation(counts.bad_frames)])
        self._gauge(catalogue.QUEUED_BYTES, lambda: [Observation(counts.queued_bytes)])
        self._gauge(catalogue.RING_BYTES, lambda: [Observation(counts.ring_bytes)])

    def _gauge(self, metric: catalogue.Metric, observe: Callable[[], Iterable[Observation]]) -> None:
        self._meter.create_observable_gauge(metric.name, [_callback(observe)], metric.unit, metric.description)

    def _observed(self, metric: catalogue.Metric, observe: Callable[[], Iterable[Observation]]) -> None:
        self._meter.create_observable_counter(metric.name, [_callback(observe)], metric.unit, metric.description)

    def _by_model(self, field: str) -> Iterator[Observation]:
        return _observations(({catalogue.MODEL: load.model}, getattr(load, field)) for load in self._fresh_engines())

    def _by_service(self, field: str) -> Iterator[Observation]:
        return _observations(
            ({catalogue.PROCESS_NAME: name}, getattr(load, field)) for name, load in self._fresh_services()
        )

    def _blocks(self) -> Iterator[Observation]:
        return _observations(
            ({catalogue.MODEL: load.model, catalogue.BLOCK_STATE: state}, blocks)
            for load in self._fresh_engines()
            for state, blocks in (
                ("free", load.free_blocks),
                ("cached", load.cached_blocks),
                ("used", load.used_blocks),
            )
        )

    def _usage(self) -> Iterator[Observation]:
        used: collections.Counter[str] = collections.Counter()
        blocks: collections.Counter[str] = collections.Counter()
        for load in self._fresh_engines():
            used[load.model] += load.used_blocks
            blocks[load.model] += load.num_blocks
        return (Observation(used[model] / all_, {catalogue.MODEL: model}) for model, all_ in blocks.items() if all_)

    def _up(self) -> Iterator[Observation]:
        return (
            Observation(count, {catalogue.PROCESS_KIND: kind, catalogue.PROCESS_NAME: name})
            for (kind, name), count in self._connected.items()
            if count or self.now_ns - self._left_at_ns[kind, name] < _GONE_NS
        )


def _totals(load: facts.EngineLoad) -> Iterator[_Total]:
    """The counters that a backend's word moves.

    All reasons for refusals are told from the beginning, so that a first one is an increase.
    """
    yield catalogue.STEPS, {}, load.step_count
    yield catalogue.PREEMPTIONS, {}, load.preemptions
    yield catalogue.PREFIX_QUERY_TOKENS, {}, load.prefix_query_tokens
    yield catalogue.PREFIX_HIT_TOKENS, {}, load.prefix_hit_tokens
    yield catalogue.LATE_WORK, {}, load.late_work
    yield catalogue.ENGINE_RESTARTS, {}, load.restarts
    for reason in _REASONS:
        yield catalogue.REFUSALS, {catalogue.REFUSAL_REASON: reason}, load.refusals.get(reason, 0)
    for reason in sorted(set(load.refusals) - set(_REASONS)):
        yield catalogue.REFUSALS, {catalogue.REFUSAL_REASON: reason}, load.refusals[reason]


def _observations(parts: Iterable[tuple[dict[str, str], int]]) -> Iterator[Observation]:
    """Sums what has the same attributes: several backends may serve one model."""
    sums: collections.Counter[tuple[tuple[str, str], ...]] = collections.Counter()
    for attributes, value in parts:
        sums[tuple(attributes.items())] += value
    return (Observation(value, dict(attributes)) for attributes, value in sums.items())


def _callback(observe: Callable[[], Iterable[Observation]]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda options: observe()


def _named(source: facts.Hello) -> dict[str, str]:
    return {catalogue.PROCESS_KIND: source.kind, catalogue.PROCESS_NAME: source.name}
