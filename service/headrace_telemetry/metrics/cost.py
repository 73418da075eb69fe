"""What the server costs, and what its tokens cost by that.

Owns the arithmetic. The machine costs the same whether it works or not:

    headrace.cost                     price_per_hour / 3600 x seconds since telemetry began
    ...per_million_output_tokens      price_per_hour / 3600 x seconds of the window / output tokens
                                      in the window x 1,000,000

The window is the last 5 minutes, or the time since telemetry began if that is shorter. A
generation's tokens count when it ends. Input and output each bear the whole price: which share of
the machine a prompt took is not known. Without tokens in the window there is no figure; without a
price there are no such metrics at all.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.metrics import catalogue

WINDOW_NS: Final = 300_000_000_000
_SAMPLE_NS: Final = 1_000_000_000


class _Tokens(NamedTuple):
    at_ns: int
    input: int
    output: int


class Cost:
    """The price of a server's time, and what a token costs by it.

    Args:
        config: the price.
        meter: makes the instruments.
        tokens: input and output tokens so far.
        now_ns: a clock that never goes back.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        meter: Meter,
        tokens: Callable[[], tuple[int, int]],
        now_ns: Callable[[], int],
    ) -> None:
        self._per_ns = config.price_per_hour / 3600e9
        self._tokens, self._now_ns = tokens, now_ns
        self._attributes = {catalogue.CURRENCY: config.price_currency}
        self._began_ns = now_ns()
        self._window = collections.deque([_Tokens(self._began_ns, *tokens())])
        if config.price_per_hour > 0:
            self._create(meter)

    def tick(self) -> None:
        """Notes the tokens so far, once a second, and forgets what is older than the window."""
        now_ns = self._now_ns()
        if now_ns - self._window[-1].at_ns < _SAMPLE_NS:
            return
        self._window.append(_Tokens(now_ns, *self._tokens()))
        # The first sample is the window's beginning, so one that is older than it stays.
        while now_ns - self._window[1].at_ns >= WINDOW_NS:
            self._window.popleft()

    def _create(self, meter: Meter) -> None:
        cost, output, input_ = (
            catalogue.COST,
            catalogue.COST_PER_MILLION_OUTPUT,
            catalogue.COST_PER_MILLION_INPUT,
        )
        meter.create_observable_counter(cost.name, [self._cost], cost.unit, cost.description)
        meter.create_observable_gauge(output.name, [self._per_output], output.unit, output.description)
        meter.create_observable_gauge(input_.name, [self._per_input], input_.unit, input_.description)

    def _cost(self, options: CallbackOptions) -> Iterator[Observation]:
        yield Observation(self._per_ns * (self._now_ns() - self._began_ns), self._attributes)

    def _per_input(self, options: CallbackOptions) -> Iterator[Observation]:
        return self._per_million(self._tokens()[0] - self._window[0].input)

    def _per_output(self, options: CallbackOptions) -> Iterator[Observation]:
        return self._per_million(self._tokens()[1] - self._window[0].output)

    def _per_million(self, tokens: int) -> Iterator[Observation]:
        if tokens > 0:
            elapsed_ns = self._now_ns() - self._window[0].at_ns
            yield Observation(self._per_ns * elapsed_ns / tokens * 1e6, self._attributes)
