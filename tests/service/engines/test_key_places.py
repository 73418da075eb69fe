"""A request under an idempotency key begins at one engine alone, whatever is lost when.

Real are the rule of places, what services report of engines, and what engines make of it; the
machine below plays services, guardians and engines, and time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.examples import examples

from headrace_backend.engine.errors import RequestRefused
from headrace_backend.server.streams.held_engines import QUIET_NS, HeldEngines
from headrace_protos.engine.v1 import engine_pb2
from headrace_service.engines import key_places, request_ids, takeover_order
from headrace_service.engines.engine_holds import EngineHolds
from headrace_service.engines.key_places import KeyPlace

PLACE = request_ids.key_place("tenant", "key")
NUM_ENGINES, NUM_SERVICES = 4, 3
S = 10**9
# Within it a service reaches an engine that is there, and guardians have moved what an engine lost.
RECONNECT_NS = S
SETTLED_NS = 3 * S


@dataclasses.dataclass(eq=False)
class Seen:
    """One engine as one service sees it."""

    number: int
    is_reachable: bool = True


def seen(reachable: Sequence[bool]) -> list[Seen]:
    return [Seen(number, each) for number, each in enumerate(reachable)]


# -- the rule


@settings(max_examples=examples(200))
@given(
    reachable=st.lists(st.booleans(), min_size=1, max_size=30), home=st.integers(0, 29), place=st.integers(0, 2**20 - 1)
)
def test_each_engine_that_may_know_a_key_takes_it_is_asked_or_is_named(
    reachable: list[bool], home: int, place: int
) -> None:
    engines = seen(reachable)
    own, name = engines[home % len(engines)], request_ids.key_place("t", str(place))
    found = key_places.find(engines, own, name)
    order = [own, *takeover_order.in_order([each for each in engines if each is not own], name, len(engines))]
    assert found.engine is next((each for each in order if each.is_reachable), own)
    assert len(found.asked) <= takeover_order.MOST
    assert all(each.is_reachable for each in found.asked) and not any(each.is_reachable for each in found.unasked)
    named = {found.engine, *found.asked, *found.unasked}
    # Those beyond come later in the order than as many that are reachable as are ever asked.
    assert set(order[: len(named)]) == named
    assert named == set(order) or len(found.asked) == takeover_order.MOST


@settings(max_examples=examples(200))
@given(views=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=2, max_size=2), home=st.integers(0, 5))
def test_services_that_place_a_key_at_two_engines_differ_in_what_they_reach(views: list[list[bool]], home: int) -> None:
    one, other = (key_places.find(engines := seen(view), engines[home], PLACE) for view in views)
    if any(views[0]) and any(views[1]) and one.engine.number != other.engine.number:
        # One of the two reaches what the other can't ask, and says so to every engine.
        assert other.engine.number in _numbers(one.unasked) or one.engine.number in _numbers(other.unasked)


def _numbers(engines: Sequence[Seen]) -> set[int]:
    return {engine.number for engine in engines}


# -- the whole


class Engine:
    """An engine's process: its requests by id under the one key, and what it hears of services."""

    def __init__(self, number: int, machine: KeyMachine) -> None:
        self.number = number
        self.request: int | None = None
        self.held = HeldEngines(lambda: machine.now_ns)

    def add(self, wanted: int, unasked: Sequence[int], stands_in: bool, now_ns: int) -> int:
        if self.request is None:
            if unasked:
                self.held.check_unheld(unasked, stands_in, now_ns)
            self.request = wanted
        return self.request


class Link:
    """A service's connection to one engine."""

    def __init__(self, service: int, engine: Engine) -> None:
        self.service, self.engine = service, engine

    def tell(self, to_engine: engine_pb2.ToEngine) -> None:
        held = to_engine.held_engines
        self.engine.held.report(self.service, held.reached, held.guarded)


@dataclasses.dataclass
class Pending:
    """A Submit whose other engines have answered, on its way to the engine where it begins."""

    place: KeyPlace[Seen]
    life: Engine
    asked_ns: int


class ServiceSide:
    """A service: its links, its copies by id and the engine that each is at."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.holds = EngineHolds()
        self.links: dict[int, Link] = {}
        self.since_ns = dict.fromkeys(range(NUM_ENGINES), -100 * S)
        self.copies: dict[int, int] = {}
        # Copies whose engine was lost.
        self.moving: set[int] = set()
        self.pending: Pending | None = None

    def engines(self) -> list[Seen]:
        return [Seen(number, number in self.links) for number in range(NUM_ENGINES)]

    def connect(self, engine: Engine, now_ns: int) -> None:
        link = self.links[engine.number] = Link(self.index, engine)
        self.since_ns[engine.number] = now_ns
        self.holds.connected(engine.number, link)

    def lose(self, number: int, now_ns: int) -> None:
        link = self.links.pop(number, None)
        if link is not None:
            link.engine.held.stream_lost(self.index)
            self.since_ns[number] = now_ns
            self.holds.lost(number, link)
            self.moving |= {request for request, at in self.copies.items() if at == number}

    def guard(self, request: int, number: int) -> None:
        self.copies[request] = number
        self.holds.guarded(number)

    def forget(self) -> None:
        for number in self.copies.values():
            self.holds.unguarded(number)
        self.copies.clear()
        self.moving.clear()
        self.pending = None

    def moved(self, request: int, number: int) -> None:
        self.moving.discard(request)
        self.holds.guarded(number)
        self.holds.unguarded(self.copies[request])
        self.copies[request] = number


class KeyMachine(RuleBasedStateMachine):
    """Engines end and come back, a connection is cut, and the key is sent to all services."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 1000 * S
        self.ids = itertools.count(1)
        self.engines: dict[int, Engine] = {number: Engine(number, self) for number in range(NUM_ENGINES)}
        self.services = [ServiceSide(index) for index in range(NUM_SERVICES)]
        self.cut: tuple[int, int] | None = None
        self.answered: set[int] = set()
        for service, engine in itertools.product(self.services, self.engines.values()):
            service.connect(engine, self.now_ns - 100 * S)
        self.now_ns += 10 * QUIET_NS

    # -- what happens to engines

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.engines)))
        del self.engines[number]
        for service in self.services:
            service.lose(number, self.now_ns)

    @precondition(lambda self: len(self.engines) < NUM_ENGINES)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """An engine comes back once what it had was moved, which takes guardians less time."""
        away = [
            number
            for number in range(NUM_ENGINES)
            if number not in self.engines
            and not any(each.copies[request] == number for each in self.services for request in each.moving)
        ]
        if away:
            number = data.draw(st.sampled_from(away))
            self.engines[number] = Engine(number, self)

    @precondition(lambda self: self.cut is None)
    @rule(service=st.integers(0, NUM_SERVICES - 1), number=st.integers(0, NUM_ENGINES - 1))
    def cut_off(self, service: int, number: int) -> None:
        self.cut = (service, number)
        self.services[service].lose(number, self.now_ns)

    @rule()
    def heal(self) -> None:
        self.cut = None

    @rule(data=st.data())
    def reconnect(self, data: st.DataObject) -> None:
        missing = self._missing()
        if missing:
            service, number = data.draw(st.sampled_from(missing))
            service.connect(self.engines[number], self.now_ns)

    def _missing(self) -> list[tuple[ServiceSide, int]]:
        pairs = itertools.product(self.services, sorted(self.engines))
        return [(each, no) for each, no in pairs if no not in each.links and (each.index, no) != self.cut]

    # -- guardians

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        waiting = [(each, request) for each in self.services for request in sorted(each.moving) if each.links]
        if waiting:
            service, request = data.draw(st.sampled_from(waiting))
            # Any may be the first that is able: some are full.
            self._move(service, request, data.draw(st.sampled_from(sorted(service.links))))

    def _move(self, service: ServiceSide, request: int, number: int) -> None:
        taken = service.links[number].engine.add(request, [], False, self.now_ns)
        assert taken == request, "a guardian finds the key in use for another request"
        service.moved(request, number)

    # -- time

    @rule(ns=st.sampled_from((1, S, SETTLED_NS, QUIET_NS, 2 * QUIET_NS)))
    def wait(self, ns: int) -> None:
        """Passes in parts, in each of which services reconnect and guardians move what they can."""
        while ns > 0:
            part_ns = min(ns, RECONNECT_NS)
            ns -= part_ns
            self.now_ns += part_ns
            for service, number in self._missing():
                service.connect(self.engines[number], self.now_ns)
            for service in self.services:
                for request in sorted(service.moving):
                    if service.links:
                        self._move(service, request, min(service.links))
                if service.pending is not None and self.now_ns - service.pending.asked_ns >= QUIET_NS:
                    service.pending = None

    # -- callers

    @rule()
    def expire(self) -> None:
        """The key's request is forgotten everywhere, so that it is new to engines as they are."""
        self.answered.clear()
        for engine in self.engines.values():
            engine.request = None
        for service in self.services:
            service.forget()

    @rule(index=st.integers(0, NUM_SERVICES - 1))
    def submit(self, index: int) -> None:
        self.ask(index)
        self.add(index)

    @rule(index=st.integers(0, NUM_SERVICES - 1))
    def ask(self, index: int) -> None:
        service = self.services[index]
        place = key_places.find(engines := service.engines(), engines[0], PLACE)
        known = [request for request in service.copies if request in service.moving]
        known += [
            request for engine in place.asked if (request := service.links[engine.number].engine.request) is not None
        ]
        service.pending = None
        if known:
            self.answered.add(known[0])
        elif place.engine.is_reachable and self._is_settled(service, place):
            service.pending = Pending(place, service.links[place.engine.number].engine, self.now_ns)

    def _is_settled(self, service: ServiceSide, place: KeyPlace[Seen]) -> bool:
        stands_in = place.engine.number != 0
        return stands_in or all(self.now_ns - service.since_ns[each.number] >= SETTLED_NS for each in place.unasked)

    @rule(index=st.integers(0, NUM_SERVICES - 1))
    def add(self, index: int) -> None:
        service = self.services[index]
        pending, service.pending = service.pending, None
        if pending is None:
            return
        number = pending.place.engine.number
        link = service.links.get(number)
        if link is None or link.engine is not pending.life:
            return
        wanted = next(self.ids)
        unasked = sorted(_numbers(pending.place.unasked))
        try:
            taken = link.engine.add(wanted, unasked, number != 0, self.now_ns)
        except RequestRefused:
            return
        self.answered.add(taken)
        if taken == wanted:
            service.guard(taken, number)

    @invariant()
    def the_key_names_one_request(self) -> None:
        there = {engine.request for engine in self.engines.values() if engine.request is not None}
        copied = {request for service in self.services for request in service.copies}
        assert len(self.answered | there | copied) <= 1


KeyMachine.TestCase.settings = settings(max_examples=examples(300), stateful_step_count=60, deadline=None)
TestKeys = KeyMachine.TestCase


def test_the_machine_tells_a_rule_that_is_too_weak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that refuse nobody let a key name two requests."""
    monkeypatch.setattr(HeldEngines, "check_unheld", lambda *arguments: None)
    machine = KeyMachine()
    machine.cut_off(0, 0)
    machine.ask(0)
    machine.ask(1)
    machine.add(0)
    machine.add(1)
    with pytest.raises(AssertionError):
        machine.the_key_names_one_request()
