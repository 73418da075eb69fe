"""To which of a model's engines a new request goes, where the set has several.

Owns the policy, which is one for local and remote engines: the engine is taken where waiting and
computing cost least. The wait is for the prompts ahead (`engine_load`); what is computed is what
the engine has not cached, as far as this service sent it there (`placements`).

Which engines are compared follows from how the prompt begins (`places`): its beginning has an order
over the engines that all services come to alike, and its first engine is taken to have cached what
this service knows nothing of. So prompts that begin alike meet at one engine, whichever service
they asked, until its wait outweighs what they gain there; and then at the second.

An engine that is lost or leaves moves only its own prefixes, which come back with it; one that
joins moves none between others. A tenant's idempotency key has one engine as long as that is in the
set, as only that one knows what was asked under the key. What follows a request (its readers, its
end) finds its engine by the request's id.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from headrace_service.engines.routing.engine_load import EngineLoad
from headrace_service.engines.routing.placements import Placements
from headrace_service.engines.routing.places import Place, Places
from headrace_service.engines.routing.popularity import Popularity, Repeats
from headrace_service.engines.routing.prefix_keys import TokenIds, prefix_keys, root
from headrace_service.engines.routing.rendezvous import Rendezvous

# Engines that are compared: those that were sent the prompt's beginning, and the first ones in its
# order. More of them leave more copies of a prefix behind, which press others out of caches: with
# eight, four services lost 5 of 100 hits that they have with two (docs/experiments.md).
_CANDIDATES = 2
# How much a second of computing counts beside a second of waiting. Whoever has computed anew what
# is cached elsewhere makes all others wait that come after, and may evict what they have cached.
_MISS_WEIGHT = 4.0
# How much sooner another engine must be, so that near ties fall to the first in the order.
_MARGIN_S = 0.005
# Of an engine that has measured nothing, where no other has either.
_UNMEASURED_RATE = 10_000.0
# An engine is passed over that has more open requests than an eighth of its rows, with which steps
# take hardly longer than for one, and so many times the mean. One that has not said how many rows
# it has counts as one of 256.
_QUIET_SHARE = 1 / 8
_MOST_OF_MEAN = 1.5
_UNKNOWN_ROWS = 256
# A prompt that would cost more than so many seconds at its set is compared with as many engines
# beyond: the set of a beginning that has just become popular is not wide enough yet.
_MOST_COST_S = 0.25
# How old the means over all engines may be, and how many choices for each engine they may serve.
_SURVEY_S = 0.5
_SURVEY_CHOICES = 8


class RoutedEngine(Protocol):
    """One engine of a model, as the policy sees it."""

    @property
    def number(self) -> int:
        """Its number among the model's engines, the same in every service process."""

    @property
    def serving(self) -> bool:
        """Whether it makes progress and takes requests."""

    @property
    def is_reachable(self) -> bool:
        """Whether it hears of requests: one that replaces a worker does, and queues them."""

    @property
    def num_open(self) -> int:
        """Requests that this process has there."""

    @property
    def load(self) -> EngineLoad:
        """How busy it is."""


Engine = TypeVar("Engine", bound=RoutedEngine)


class RoutingKey(NamedTuple):
    """What of a new request decides which engine it goes to."""

    token_ids: TokenIds
    cache_salt: bytes
    tenant: str
    # "": it has none.
    idempotency_key: str = ""


class _Survey(NamedTuple):
    """Means over the engines that serve."""

    until_s: float
    # Prompt tokens per second.
    rate: float
    # Open requests beyond which an engine is passed over.
    most_open: float


class _Prompt(NamedTuple):
    """A prompt on its way to an engine."""

    num_tokens: int
    place: Place
    # What engines were sent of it before, in tokens by their numbers.
    known: dict[int, int]
    # Tokens that its first engine is taken to have where nothing is known.
    presumed: int

    def cached(self, number: int) -> int:
        """Returns the tokens that an engine has, as far as known; each has what is wide."""
        known, shared = self.known.get(number, 0), self.place.shared_tokens
        return known if known > shared else shared


class Router(Generic[Engine]):
    """Chooses among the engines of one model, for one service.

    Args:
        clock: seconds, the same clock by which loads are reported.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._placements = Placements()
        self._repeats = Repeats()
        self._popularity = Popularity()
        self.set_engines(())

    def set_engines(self, engines: Sequence[Engine]) -> None:
        """Takes the engines that there are now, each with a number of its own."""
        self._engines = tuple(engines)
        self._indices = {engine.number: index for index, engine in enumerate(self._engines)}
        self._order = Rendezvous([engine.number for engine in self._engines])
        self._places = Places(self._order, self._popularity)
        self._survey: _Survey | None = None
        self._num_choices, self._most_choices = 0, _SURVEY_CHOICES * len(self._engines)

    def choose(self, key: RoutingKey) -> Engine:
        """Returns the engine, of at least one, for a new request, and counts the request there."""
        if len(self._engines) == 1:
            return self._engines[0]
        if key.idempotency_key:
            return self._home(f"{key.tenant}/{key.idempotency_key}".encode())
        return self.place(key)

    def place(self, key: RoutingKey, able: Collection[int] | None = None) -> Engine:
        """Returns the engine for a prompt, whatever its idempotency key, and counts it there.

        Engines that serve come first, then those that will. If there is neither, the prompt's own
        engine is returned, which says what is wrong.

        Args:
            key: the prompt.
            able: the numbers of engines of which one is taken, at least one; None: all.
        """
        now_s, owner = self._clock(), root(key.tenant, key.cache_salt)
        keys = prefix_keys(key.token_ids, owner)
        known = self._placements.find(keys)
        presumed = int(len(key.token_ids) * self._repeats.share(owner, bool(known)))
        prompt = _Prompt(len(key.token_ids), self._places.find(keys), known, presumed)
        survey = self._surveyed(now_s)
        engine = self._quickest(prompt, able, survey, now_s)
        rate = engine.load.report.prefill_tokens_per_s or survey.rate
        engine.load.sent(prompt.num_tokens - prompt.cached(engine.number), rate, now_s)
        self._placements.note(keys, engine.number)
        return engine

    # -- who there is

    def _home(self, name: bytes) -> Engine:
        """Returns the one engine of an idempotency key, whether it serves or not.

        No other engine knows what was asked under that key before.
        """
        digest = hashlib.blake2b(name, digest_size=8).digest()
        return self._engines[self._order.first(int.from_bytes(digest, "little"), 1)[0]]

    def _surveyed(self, now_s: float) -> _Survey:
        self._num_choices += 1
        if self._survey is None or now_s >= self._survey.until_s or self._num_choices == self._most_choices:
            self._survey, self._num_choices = self._look_around(now_s), 0
        return self._survey

    def _look_around(self, now_s: float) -> _Survey:
        serving = [engine for engine in self._engines if engine.serving] or self._engines
        loads = [engine.load for engine in serving]
        num_open = sum([load.num_open(engine.num_open) for load, engine in zip(loads, serving, strict=True)])
        rates = [rate for load in loads if (rate := load.report.prefill_tokens_per_s)]
        rows = sum([load.report.rows or _UNKNOWN_ROWS for load in loads])
        most_open = max(1.0, _QUIET_SHARE * rows / len(loads)) + _MOST_OF_MEAN * num_open / len(loads)
        return _Survey(now_s + _SURVEY_S, sum(rates) / len(rates) if rates else _UNMEASURED_RATE, most_open)

    # -- which is the quickest

    def _quickest(self, prompt: _Prompt, able: Collection[int] | None, survey: _Survey, now_s: float) -> Engine:
        """Returns the engine for a prompt, among those of some numbers or all."""
        indices = self._places.ordered(prompt.place, _CANDIDATES)
        first = self._engines[indices[0]]
        if self._needs_no_other(first, prompt, survey, now_s) and (able is None or first.number in able):
            return first
        known = [self._indices[number] for number in prompt.known if number in self._indices]
        serving = self._serving([*indices, *known], able)
        free = _free(serving, survey)
        if not free:
            # The whole set, in its order; and all others where that has no free one either.
            everybody = len(self._engines)
            serving = self._serving([*self._places.ordered(prompt.place, everybody), *known], able)
            free = _free(serving, survey)
            if serving and not free:
                serving += self._serving(self._places.beyond(prompt.place, everybody), able)
                free = _free(serving, survey)
        if not serving:
            return self._elsewhere(first, prompt, able, survey, now_s)
        best, best_s = self._soonest(free or serving, first, prompt, survey, now_s)
        if best_s <= _MOST_COST_S:
            return best
        beyond = self._serving(self._places.beyond(prompt.place, _CANDIDATES), able)
        if not beyond:
            return best
        other, other_s = self._soonest(_free(beyond, survey) or beyond, first, prompt, survey, now_s)
        return other if other_s < best_s else best

    def _elsewhere(
        self, first: Engine, prompt: _Prompt, able: Collection[int] | None, survey: _Survey, now_s: float
    ) -> Engine:
        """Returns an engine where none of a prompt's set serves: one that does, or else will."""
        everybody = self._order.first(prompt.place.key, len(self._engines))
        serving = self._serving(everybody, able)
        if serving:
            candidates = serving[:_CANDIDATES]
            return self._soonest(_free(candidates, survey) or candidates, first, prompt, survey, now_s)[0]
        those = [self._engines[index] for index in everybody if able is None or self._engines[index].number in able]
        return next((engine for engine in those if engine.is_reachable), those[0])

    def _serving(self, indices: Iterable[int], able: Collection[int] | None) -> list[Engine]:
        """Returns the engines that serve and may be taken, each once."""
        found = [engine for index in dict.fromkeys(indices) if (engine := self._engines[index]).serving]
        return found if able is None else [engine for engine in found if engine.number in able]

    def _wait_s(self, engine: Engine, survey: _Survey, now_s: float) -> float:
        rate = engine.load.report.prefill_tokens_per_s or survey.rate
        return engine.load.wait_s(engine.num_open, rate, now_s)

    def _needs_no_other(self, first: Engine, prompt: _Prompt, survey: _Survey, now_s: float) -> bool:
        """Whether a prompt's first engine serves and is quiet, and no other has more of it."""
        if not first.serving or first.load.num_open(first.num_open) > survey.most_open:
            return False
        if prompt.known and prompt.cached(first.number) < max(prompt.known.values()):
            return False
        return self._wait_s(first, survey, now_s) <= _MARGIN_S

    def _soonest(
        self, engines: Sequence[Engine], first: Engine, prompt: _Prompt, survey: _Survey, now_s: float
    ) -> tuple[Engine, float]:
        """Returns the engine, of at least one, with the least cost, and the cost.

        The cost is in seconds of waiting and computing, of which the latter count several times.
        `first` is taken to have cached what nobody is known to have.
        """
        best, best_s = engines[0], math.inf
        for engine in engines:
            load = engine.load
            rate = load.report.prefill_tokens_per_s or survey.rate
            num_computed = prompt.num_tokens - prompt.cached(engine.number)
            if engine is first and not prompt.known:
                num_computed -= prompt.presumed
            computed_s = num_computed / rate if num_computed > 0 else 0.0
            cost_s = load.wait_s(engine.num_open, rate, now_s) + _MISS_WEIGHT * computed_s
            if cost_s < best_s - _MARGIN_S:
                best, best_s = engine, cost_s
        return best, best_s


def _free(engines: Sequence[Engine], survey: _Survey) -> list[Engine]:
    """Returns the engines that have not far too many open requests."""
    most = survey.most_open
    return [engine for engine in engines if engine.load.num_open(engine.num_open) <= most]
