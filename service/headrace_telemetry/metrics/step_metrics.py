"""Metrics of steps: their time, what was in them, and how much of the device they used.

Owns the counting of steps, each once: a step may be reported by its backend and by every service
that had somebody in it. Records wait until there are enough of them to be worth numpy's overhead,
or until a tick or a snapshot wants them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from opentelemetry.sdk.metrics.export import Metric

from headrace_facts import facts, step_records
from headrace_telemetry import step_work
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.metrics import catalogue
from headrace_telemetry.metrics.aggregates import Aggregates

# Steps that may wait to be counted.
_MOST_WAITING: Final = 1024
# Steps of one engine that are remembered as counted; older ones than that are taken for counted. A
# power of 2.
_REMEMBERED: Final = 1 << 16
# Services' word for a step is not needed for so long after the backend's last.
_BACKEND_SPEAKS_NS: Final = 10_000_000_000
# Engines that are remembered, a MiB each; those go first of which nothing was reported for longest.
# Each life of a backend is one.
_MOST_ENGINES: Final = 64

_TOKEN_BOUNDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SHARE_BOUNDS: Final = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_UNKNOWN_MODEL: Final = "unknown"
# Of an engine that did not say yet who drafts for it.
_UNKNOWN_DRAFTER: Final = "unknown"


class StepMetrics:
    """Figures of all steps of all backends.

    Args:
        config: bounds of the histograms of durations.
    """

    def __init__(self, config: TelemetryConfig) -> None:
        seconds = config.metrics_step_buckets
        self._aggregates = Aggregates(
            {
                catalogue.STEP_DURATION: seconds,
                catalogue.STEP_INTERVAL: seconds,
                catalogue.STEP_TOKENS: _TOKEN_BOUNDS,
                catalogue.STEP_SEQUENCES: _TOKEN_BOUNDS,
                catalogue.STEP_BANDWIDTH_SHARE: _SHARE_BOUNDS,
                catalogue.STEP_FLOPS_SHARE: _SHARE_BOUNDS,
            }
        )
        self._engines: collections.OrderedDict[str, _Engine] = collections.OrderedDict()
        self._num_waiting = 0

    def describe(self, engine: facts.EngineFacts) -> None:
        """Takes what is known of an engine's model and device."""
        self._engine(engine.engine).facts = engine

    def name(self, engine: str, model: str) -> None:
        """Takes which model an engine serves."""
        self._engine(engine).model = model

    def take(self, steps: facts.Steps, from_backend: bool, now_ns: int) -> None:
        """Puts steps aside to be counted; those of services only while their backend says nothing.

        Steps that are not whole records are left out.
        """
        engine = self._engine(steps.engine)
        if from_backend:
            engine.backend_spoke_at_ns = now_ns
        elif now_ns - engine.backend_spoke_at_ns < _BACKEND_SPEAKS_NS:
            return
        whole = len(steps.records) - len(steps.records) % step_records.RECORD.itemsize
        engine.waiting.append(steps.records[:whole])
        self._num_waiting += whole // step_records.RECORD.itemsize
        if self._num_waiting >= _MOST_WAITING:
            self.count_waiting()

    def count_waiting(self) -> None:
        """Counts all steps that were put aside."""
        self._num_waiting = 0
        for engine in self._engines.values():
            if engine.waiting:
                records = step_records.decode(b"".join(engine.waiting))
                engine.waiting.clear()
                self._count(engine, records)

    def metrics(self, now_unix_ns: int) -> Iterator[Metric]:
        """All metrics of steps with their data points."""
        self.count_waiting()
        return self._aggregates.metrics(now_unix_ns)

    def _engine(self, engine: str) -> _Engine:
        known = self._engines.get(engine)
        if known is None:
            self.count_waiting()
            while len(self._engines) >= _MOST_ENGINES:
                self._engines.popitem(last=False)
            known = self._engines[engine] = _Engine()
        self._engines.move_to_end(engine)
        return known

    def _count(self, engine: _Engine, records: step_records.Records) -> None:
        records = records[engine.seen.new(records["step_id"], records["settled_at_ns"])]
        if not len(records):
            return
        model = engine.model
        prompts, decodes = records["num_prefill_tokens"], records["num_decodes"]
        self._observe_durations(model, records)
        intervals = engine.seen.intervals_ns(records["step_id"][decodes > 0])
        self._observe(catalogue.STEP_INTERVAL, model, intervals * 1e-9)
        self._observe(catalogue.STEP_TOKENS, model, prompts[prompts > 0], catalogue.TOKEN_KIND, "prefill")
        self._observe(catalogue.STEP_TOKENS, model, decodes[decodes > 0], catalogue.TOKEN_KIND, "decode")
        self._observe(catalogue.STEP_SEQUENCES, model, records["num_sequences"])
        if engine.facts is not None:
            self._observe_shares(model, engine.facts, records)
        captured = np.count_nonzero(records["flags"] & step_records.StepFlag.CAPTURED)
        self._add(catalogue.STEPS_CAPTURED, model, int(captured))
        self._count_drafts(engine, records)
        self._add(catalogue.FORCED_TOKENS, model, int(records["forced_tokens"].sum(dtype=np.int64)))

    def _count_drafts(self, engine: _Engine, records: step_records.Records) -> None:
        drafter = engine.facts.drafter if engine.facts is not None else ""
        for metric, column in (
            (catalogue.DRAFTS_PROPOSED, "draft_tokens"),
            (catalogue.DRAFTS_ACCEPTED, "accepted_tokens"),
            (catalogue.DRAFTS_LOST, "lost_drafts"),
        ):
            count = int(records[column].sum(dtype=np.int64))
            self._add(metric, engine.model, count, catalogue.DRAFTER, drafter or _UNKNOWN_DRAFTER)

    def _observe_durations(self, model: str, records: step_records.Records) -> None:
        seconds = step_work.seconds(records)
        has_prompts, has_decodes = records["num_prefill_tokens"] > 0, records["num_decodes"] > 0
        for kind, chosen in (
            ("prefill", ~has_decodes),
            ("decode", has_decodes & ~has_prompts),
            ("mixed", has_decodes & has_prompts),
        ):
            self._observe(catalogue.STEP_DURATION, model, seconds[chosen], catalogue.STEP_KIND, kind)

    def _observe_shares(self, model: str, engine: facts.EngineFacts, records: step_records.Records) -> None:
        bandwidth = step_work.bandwidth_share(engine, records)
        if bandwidth is not None:
            self._observe(catalogue.STEP_BANDWIDTH_SHARE, model, bandwidth)
        flops = step_work.flops_share(engine, records)
        if flops is not None:
            self._observe(catalogue.STEP_FLOPS_SHARE, model, flops)

    def _observe(
        self, metric: catalogue.Metric, model: str, values: npt.NDArray[np.number], attribute: str = "", value: str = ""
    ) -> None:
        if len(values):
            attributes = {catalogue.MODEL: model, attribute: value} if attribute else {catalogue.MODEL: model}
            self._aggregates.histogram(metric, attributes).observe_all(values)

    def _add(self, metric: catalogue.Metric, model: str, count: int, attribute: str = "", value: str = "") -> None:
        attributes = {catalogue.MODEL: model, attribute: value} if attribute else {catalogue.MODEL: model}
        self._aggregates.counter(metric, attributes).add(count)


class _Engine:
    """One life of a backend: what is known of it, and its steps that wait."""

    def __init__(self) -> None:
        self.facts: facts.EngineFacts | None = None
        self.seen = _Seen()
        self.waiting: list[bytes] = []
        self.backend_spoke_at_ns = -_BACKEND_SPEAKS_NS
        self._model = ""

    @property
    def model(self) -> str:
        return self._model or (self.facts.model if self.facts else _UNKNOWN_MODEL)

    @model.setter
    def model(self, model: str) -> None:
        self._model = model


class _Seen:
    """Which of an engine's steps were counted, and when they settled, in a ring by step id."""

    def __init__(self) -> None:
        self._ids = np.zeros(_REMEMBERED, np.uint64)
        self._settled_at_ns = np.zeros(_REMEMBERED, np.uint64)
        self._newest = 0

    def new(self, ids: npt.NDArray[np.uint64], settled_at_ns: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
        """Remembers the steps that were not counted before.

        Returns the indices of those that were not known, in order of their ids, each id once.
        """
        _, first = np.unique(ids, return_index=True)
        self._newest = max(self._newest, int(ids[first[-1]])) if len(first) else self._newest
        chosen, places = ids[first], ids[first] & np.uint64(_REMEMBERED - 1)
        is_new = (self._ids[places] != chosen) & (chosen + np.uint64(_REMEMBERED) > np.uint64(self._newest))
        self._ids[places[is_new]] = chosen[is_new]
        self._settled_at_ns[places[is_new]] = settled_at_ns[first][is_new]
        return np.asarray(first[is_new])

    def intervals_ns(self, ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Returns the times between steps and the ones right before them, where both are known."""
        mask = np.uint64(_REMEMBERED - 1)
        before = ids - np.uint64(1)
        has_one = (self._ids[before & mask] == before) & (before > 0)
        later = self._settled_at_ns[ids[has_one] & mask].astype(np.int64)
        earlier = self._settled_at_ns[before[has_one] & mask].astype(np.int64)
        return np.asarray(np.maximum(later - earlier, 0))
