"""The time and the outcome of one request, on their way into the statistics.

Owns the moments between a request's arrival and its last response. A request is counted once, as a
success or as a failure, however it ends; what arrived but never named a model counts nowhere.
"""

from __future__ import annotations

import time

from headrace_protos.engine.v1 import engine_pb2
from headrace_service.kserve.statistics import Durations, ModelCounters, ResponseTimes


class Account:
    """The account of one request, for the statistics of its model.

    Args:
        counters: of its model.
        arrival_ns: CLOCK_MONOTONIC when it reached this process.
        decoupled: whether its responses are counted one by one.
    """

    __slots__ = ("_arrival_ns", "_closed", "_counters", "_decoupled", "_inputs_ns", "_times", "batch_size", "engine")

    def __init__(self, counters: ModelCounters, arrival_ns: int, *, decoupled: bool) -> None:
        self.batch_size = 1
        # How the engine spent the time, where an engine did.
        self.engine: engine_pb2.RequestDone | None = None
        self._counters = counters
        self._arrival_ns = arrival_ns
        self._decoupled = decoupled
        self._inputs_ns = 0
        self._times = ResponseTimes(arrival_ns)
        self._closed = False

    def inputs_read(self) -> None:
        """Notes that the inputs are what the model computes on."""
        self._inputs_ns = time.monotonic_ns()
        self._times.begin_ns = self._inputs_ns

    def responded(self, ready_ns: int) -> None:
        """Notes that the connection just took a response that was ready at `ready_ns`."""
        if self._decoupled:
            times = self._times
            times.ready_ns.append(ready_ns)
            times.sent_ns.append(time.monotonic_ns())

    def next_is_empty(self) -> None:
        """Notes that the next response only says that it is the last."""
        self._times.empty = len(self._times.ready_ns)

    def succeeded(self) -> None:
        """Counts the request as answered whole."""
        if not self._closed:
            self._closed = True
            self._counters.succeeded(self._durations(time.monotonic_ns()), self.batch_size)
            self._counters.responded(self._times)

    def failed(self, *, cancelled: bool = False) -> None:
        """Counts the request as ended by an error, or by its caller."""
        if not self._closed:
            self._closed = True
            now_ns = time.monotonic_ns()
            self._counters.failed(now_ns - self._arrival_ns)
            if self._decoupled:
                self._counters.responded(self._times)
                sent = self._times.sent_ns
                since_ns = now_ns - (sent[-1] if sent else self._times.begin_ns)
                self._counters.response_failed(len(sent), since_ns, cancelled)

    def _durations(self, now_ns: int) -> Durations:
        """Returns where the time went; parts do not overlap."""
        total = now_ns - self._arrival_ns
        compute_input = max(0, self._inputs_ns - self._arrival_ns)
        if self.engine is None:
            return Durations(total, 0, compute_input, total - compute_input, 0)
        engine = self.engine
        queue = max(0, engine.queued_ns - compute_input)
        infer = engine.prefill_ns + engine.decode_ns + engine.preempted_ns + engine.engine_restart_ns
        return Durations(total, queue, compute_input, infer, max(0, total - compute_input - queue - infer))
