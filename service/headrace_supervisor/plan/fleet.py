"""Many engines behind a group of services, simulated: who waits how long, and what losses cost.

Owns the simulation. Requests arrive at random, each behind one of a number of shared beginnings;
the routing is the services' own (`headrace_service.engines.routing`), on the simulation's clock,
and knows engines by what they report once a second and by what its service sent. An engine is a
queue of prompts, rows that write, and a cache of beginnings; how fast it is comes from `capacity`.
In the middle of the simulated time the busiest engines are lost: what they wrote goes on at others,
which compute the prompt and what was written anew. Rows that were written before the simulated time
count in the speed of steps, and end as evenly as they began.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import random
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_service.engines.routing.engine_load import EngineLoad, LoadReport
from headrace_service.engines.routing.router import Router, RoutingKey
from headrace_supervisor.plan.capacity import Demand, Gpu, Prediction, RankSizes, predict, prompt_s, step_s

_REPORT_S = 1.0
_VOCABULARY = 120_000
# Requests that arrive in the simulated time: so many an engine, within bounds. Those of its first
# part, in which caches fill and services learn what is popular, are not counted.
_ARRIVALS_EACH, _LEAST_ARRIVALS, _MOST_ARRIVALS, _UNCOUNTED = 100, 20_000, 200_000, 0.5
_LOSS_AT = 0.75
# Most of an engine's time that prompts may take beside its rows.
_MOST_BUSY = 0.95


class Fleet(NamedTuple):
    """What is simulated."""

    sizes: RankSizes
    gpu: Gpu
    engines: int
    services: int
    # Of one engine; what it has cached of each prompt is one of so many shared beginnings.
    demand: Demand
    prefixes: int
    # Engines that are lost at once: those with most streams.
    lost: int


class Outcome(NamedTuple):
    """What was simulated, in seconds and shares from 0 to 1."""

    ttft_p50_s: float
    ttft_p95_s: float
    itl_p95_s: float
    # Of the requests with a shared beginning those whose engine had it cached.
    hit_share: float
    # Streams of lost engines that went on at others, and their pauses.
    moved: int
    pause_p99_s: float
    # Choices of an engine, and the CPU time of one in this process.
    choices: int
    choice_s: float


@dataclasses.dataclass(slots=True, eq=False)
class _Request:
    at_s: float
    service: int
    # -1: its prompt shares nothing.
    prefix: int
    prompt_tokens: int
    tokens_left: int
    first_s: float = 0.0
    end_s: float = 0.0
    itl_s: float = 0.0
    pause_s: float = 0.0


@dataclasses.dataclass(slots=True, eq=False)
class _Engine:
    """A queue of prompts, rows, and a cache of shared beginnings, the oldest first."""

    serving: bool = True
    # When the prompts are computed that were sent so far.
    free_s: float = 0.0
    cache: collections.OrderedDict[int, None] = dataclasses.field(default_factory=collections.OrderedDict)
    open: dict[_Request, None] = dataclasses.field(default_factory=dict)
    row_ends: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False)
class _Seen:
    """An engine as one service sees it."""

    engine: _Engine
    number: int
    load: EngineLoad = dataclasses.field(default_factory=EngineLoad)
    num_open: int = 0

    @property
    def serving(self) -> bool:
        return self.engine.serving

    @property
    def is_reachable(self) -> bool:
        return self.engine.serving


class Simulation:
    """One fleet under its demand."""

    def __init__(self, fleet: Fleet, seed: int = 0) -> None:
        """Engines with empty caches, and the rows that the demand keeps on them."""
        self._fleet = fleet
        self._balance: Prediction = predict(fleet.sizes, fleet.gpu, fleet.demand)
        self._now_s = 0.0
        self._choice_s, self._choices = 0.0, 0
        self._random = random.Random(seed)
        self._tokens = np.random.default_rng(seed)
        self._engines = [_Engine() for _ in range(fleet.engines)]
        # Numbers of engines by address are spread like these.
        numbers = self._random.sample(range(1 << 20), fleet.engines)
        self._index = {number: index for index, number in enumerate(numbers)}
        self._seen = [
            [_Seen(engine, number) for engine, number in zip(self._engines, numbers, strict=True)]
            for _ in range(fleet.services)
        ]
        self._routers: list[Router[_Seen]] = [Router(lambda: self._now_s) for _ in self._seen]
        for router, seen in zip(self._routers, self._seen, strict=True):
            router.set_engines(seen)
        shape = (fleet.prefixes, fleet.demand.cached)
        self._beginnings = self._tokens.integers(0, _VOCABULARY, shape, dtype=np.uint32)
        # Zipf's law: the second is asked for half as often as the first, and so on.
        self._weights = list(itertools.accumulate(1 / rank for rank in range(1, fleet.prefixes + 1)))
        sizes, demand = fleet.sizes, fleet.demand
        held = sizes.kv_tokens - self._balance.active * sizes.held_tokens(demand.prompt + demand.output)
        self._most_cached = int(max(0.0, held) // max(1, sizes.held_tokens(demand.cached)))
        self._ends: list[tuple[float, int, _Request, int]] = []
        self._sequence = itertools.count()
        self._hits: list[bool] = []

    def run(self) -> Outcome:
        """Plays the requests and returns what they saw."""
        fleet, balance = self._fleet, self._balance
        count = min(max(_LEAST_ARRIVALS, _ARRIVALS_EACH * fleet.engines), _MOST_ARRIVALS)
        rate = fleet.engines * fleet.demand.users / (balance.answer_s + fleet.demand.think_s)
        loss_at, next_report_s = int(_LOSS_AT * count), 0.0
        requests, moved = [], []
        for index in range(count):
            self._go_to(self._now_s + self._random.expovariate(rate))
            if self._now_s >= next_report_s:
                self._report()
                next_report_s = self._now_s + _REPORT_S
            if index == loss_at:
                moved = self._lose()
            requests.append(self._arrive())
        counted = slice(int(_UNCOUNTED * count), None)
        ttft_s = sorted(request.first_s - request.at_s for request in requests[counted])
        itl_s, hits = sorted(request.itl_s for request in requests[counted]), self._hits[counted]
        pauses_s = sorted(request.pause_s for request in moved)
        return Outcome(
            _at(ttft_s, 0.5),
            _at(ttft_s, 0.95),
            _at(itl_s, 0.95),
            sum(hits) / len(hits),
            len(moved),
            _at(pauses_s, 0.99),
            self._choices,
            self._choice_s / self._choices,
        )

    def _go_to(self, at_s: float) -> None:
        """Ends what ends until then."""
        while self._ends and self._ends[0][0] <= at_s:
            end_s, _, request, index = heapq.heappop(self._ends)
            # One that was moved ends elsewhere.
            if request.end_s == end_s and request in self._engines[index].open:
                self._leave(request, index)
        self._now_s = at_s

    def _leave(self, request: _Request, index: int) -> None:
        del self._engines[index].open[request]
        self._seen[request.service][index].num_open -= 1

    def _arrive(self) -> _Request:
        demand = self._fleet.demand
        [prefix] = self._random.choices(range(self._fleet.prefixes), cum_weights=self._weights)
        service = self._random.randrange(self._fleet.services)
        request = _Request(self._now_s, service, prefix, demand.prompt, demand.output)
        self._hits.append(self._start(request))
        return request

    def _prompt(self, request: _Request) -> npt.NDArray[np.uint32]:
        """Returns tokens of a request, which are not kept: nobody else has what is its own."""
        prompt = self._tokens.integers(0, _VOCABULARY, request.prompt_tokens, dtype=np.uint32)
        if request.prefix >= 0:
            prompt[: self._fleet.demand.cached] = self._beginnings[request.prefix]
        return prompt

    def _start(self, request: _Request) -> bool:
        """Has an engine compute a request; returns whether it had the shared beginning cached."""
        prompt, began_s = self._prompt(request), time.thread_time()
        seen = self._routers[request.service].choose(RoutingKey(prompt, b"", ""))
        self._choice_s += time.thread_time() - began_s
        self._choices += 1
        index = self._index[seen.number]
        seen.num_open += 1
        self._compute(request, index)
        return self._was_cached

    def _compute(self, request: _Request, index: int) -> None:
        fleet, engine = self._fleet, self._engines[index]
        self._was_cached = self._look_up(engine, request.prefix)
        tokens = request.prompt_tokens - (fleet.demand.cached if self._was_cached else 0)
        begin_s = max(self._now_s, engine.free_s)
        while engine.row_ends and engine.row_ends[0] <= begin_s:
            heapq.heappop(engine.row_ends)
        rows = len(engine.row_ends) + self._earlier_rows()
        if rows >= self._balance.rows_held and engine.row_ends:
            begin_s = max(begin_s, heapq.heappop(engine.row_ends))
        engine.free_s = begin_s + prompt_s(fleet.sizes, fleet.gpu, tokens)
        context = fleet.demand.prompt + fleet.demand.output / 2
        rows = min(max(rows, 1.0), self._balance.rows_held)
        request.itl_s = step_s(fleet.sizes, fleet.gpu, rows, context) / (
            1 - min(self._balance.prompt_share, _MOST_BUSY)
        )
        first_s = engine.free_s + request.itl_s
        if not request.first_s or request.first_s > self._now_s:
            request.first_s = first_s
        else:
            request.pause_s = first_s - self._now_s
        request.end_s = first_s + (request.tokens_left - 1) * request.itl_s
        engine.open[request] = None
        heapq.heappush(engine.row_ends, request.end_s)
        heapq.heappush(self._ends, (request.end_s, next(self._sequence), request, index))

    def _earlier_rows(self) -> float:
        """Returns the rows of an engine that began before the simulated time."""
        return self._balance.active * max(0.0, 1 - self._now_s / self._balance.answer_s)

    def _look_up(self, engine: _Engine, prefix: int) -> bool:
        known = prefix in engine.cache
        engine.cache[prefix] = None
        engine.cache.move_to_end(prefix)
        if len(engine.cache) > self._most_cached:
            engine.cache.popitem(last=False)
        return known

    def _report(self) -> None:
        """Has each engine say to each service how busy it is."""
        fleet = self._fleet
        rate = fleet.demand.prompt / prompt_s(fleet.sizes, fleet.gpu, fleet.demand.prompt)
        earlier = int(self._earlier_rows())
        for index, engine in enumerate(self._engines):
            tokens = int(max(0.0, engine.free_s - self._now_s) * rate)
            open_requests, held = len(engine.open) + earlier, self._balance.rows_held
            report = LoadReport(tokens, rate, open_requests, held, self._balance.answer_s)
            for seen in self._seen:
                seen[index].load.reported(report, seen[index].num_open, self._now_s)

    def _lose(self) -> list[_Request]:
        """Loses the busiest engines; returns what went on at others."""
        moved = []
        for index in self._busiest(self._fleet.lost):
            engine = self._engines[index]
            engine.serving = False
            streams = list(engine.open)
            for request in streams:
                self._leave(request, index)
            moved += streams + [self._earlier_request() for _ in range(int(self._earlier_rows()))]
        for request in moved:
            if request.first_s and request.first_s <= self._now_s:
                written = 1 + int((self._now_s - request.first_s) / request.itl_s) if request.itl_s else 0
                request.tokens_left = max(1, request.tokens_left - written)
                request.prompt_tokens += written
            self._start(request)
        return moved

    def _busiest(self, count: int) -> list[int]:
        return heapq.nlargest(count, range(len(self._engines)), lambda index: len(self._engines[index].open))

    def _earlier_request(self) -> _Request:
        """Returns a row that began before the simulated time and is half written."""
        demand = self._fleet.demand
        service, written = self._random.randrange(self._fleet.services), demand.output // 2
        request = _Request(self._now_s, service, -1, demand.prompt + written, demand.output - written)
        request.first_s = self._now_s
        return request


def _at(values: list[float], share: float) -> float:
    """Returns the value below which a share of sorted values lies; 0 of none."""
    return values[min(int(share * len(values)), len(values) - 1)] if values else 0.0
