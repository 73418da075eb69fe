"""Requests find the right engine of a set, whatever comes, goes, fails and is asked in between."""

from __future__ import annotations

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.examples import examples

from headrace_service.engines.engine_set import EngineSet
from headrace_service.engines.routing.engine_load import EngineLoad, LoadReport
from headrace_service.engines.routing.router import RoutingKey

SALT = b""
KEYS = [RoutingKey(np.arange(index, index + 70, dtype=np.uint32), SALT, "tenant") for index in range(60)]
IDEMPOTENT = [key._replace(tenant=tenant, idempotency_key="key") for key, tenant in zip(KEYS, "abcdefgh", strict=False)]


@dataclasses.dataclass(eq=False)
class Engine:
    number: int
    serving: bool = True
    is_reachable: bool = True
    is_known: bool = True
    num_open: int = 0
    load: EngineLoad = dataclasses.field(default_factory=EngineLoad)

    def __post_init__(self) -> None:
        # So quick that no prompt waits for others.
        self.load.reported(LoadReport(prefill_tokens_per_s=1e12), 0, 0.0)


def routes(engines: EngineSet[Engine], keys: list[RoutingKey]) -> list[Engine]:
    return [engines.choose(key) for key in keys]


class EngineSetMachine(RuleBasedStateMachine):
    """Engines of up to eight numbers come, go, fail, recover and fill up."""

    def __init__(self) -> None:
        super().__init__()
        self.engines: EngineSet[Engine] = EngineSet()

    @rule(number=st.integers(0, 7))
    def join(self, number: int) -> None:
        if any(engine.number == number for engine in self.engines):
            with pytest.raises(ValueError, match="in the set already"):
                self.engines.add(Engine(number))
            return
        before = self._homes()
        newcomer = Engine(number)
        self.engines.add(newcomer)
        for then, now in zip(before or IDEMPOTENT, self._homes(), strict=True):
            assert now in (then, newcomer), "one that joins moves nothing between the others"

    @precondition(lambda self: len(self.engines) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        leaver = data.draw(st.sampled_from(list(self.engines)))
        before = self._homes()
        self.engines.remove(leaver)
        for then, now in zip(before, self._homes(), strict=True):
            assert now is then or then is leaver, "one that leaves moves only what it had"

    @precondition(lambda self: len(self.engines))
    @rule(data=st.data(), serving=st.booleans(), is_reachable=st.booleans(), is_known=st.booleans())
    def change(self, data: st.DataObject, serving: bool, is_reachable: bool, is_known: bool) -> None:
        engine = data.draw(st.sampled_from(list(self.engines)))
        before = routes(self.engines, IDEMPOTENT)
        engine.is_known, engine.is_reachable = is_known, is_known and is_reachable
        engine.serving = engine.is_reachable and serving
        assert routes(self.engines, IDEMPOTENT) == before, "an idempotency key stays, whoever serves"
        # The mean over engines that serve is taken anew after eight choices an engine; before, it
        # may be of fewer engines, and higher.
        routes(self.engines, KEYS[-8:] * len(self.engines))

    @precondition(lambda self: len(self.engines))
    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 200))
    def ask(self, key: RoutingKey, count: int) -> None:
        for _ in range(count):
            self.engines.choose(key).num_open += 1

    @rule()
    def end_all(self) -> None:
        for engine in self.engines:
            engine.num_open = 0

    @invariant()
    def requests_go_to_who_can_take_them(self) -> None:
        if not len(self.engines):
            return
        members = list(self.engines)
        able = [e for e in members if e.serving] or [e for e in members if e.is_reachable] or members
        mean = sum(engine.num_open for engine in able) / len(able)
        for engine in routes(self.engines, KEYS[:12]):
            assert engine in able
            # The mean may be of eight choices an engine ago, and the count has the last one in it.
            # Where none serves, how much they have to do decides nothing.
            assert len(members) == 1 or not engine.serving or engine.num_open - 1 <= 32 + 1.5 * (mean + 8)
        assert self.engines.best.serving or not any(engine.serving for engine in members)
        assert self.engines.best.is_known or not any(engine.is_known for engine in members)

    @invariant()
    def the_order_of_arrival_does_not_matter(self) -> None:
        other: EngineSet[Engine] = EngineSet()
        for engine in reversed(list(self.engines)):
            other.add(engine)
        assert list(other) == list(self.engines)
        assert [engine.number for engine in other] == sorted(engine.number for engine in other)

    def _homes(self) -> list[Engine]:
        """Returns the homes of idempotency keys: what of routing depends on the members alone."""
        return routes(self.engines, IDEMPOTENT) if len(self.engines) else []

    def teardown(self) -> None:
        assert len({engine.number for engine in self.engines}) == len(self.engines)


TestEngineSetMachine = EngineSetMachine.TestCase
TestEngineSetMachine.settings = hypothesis.settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_prefixes_move_as_little_as_members_do() -> None:
    engines: EngineSet[Engine] = EngineSet()
    for number in (4, 0, 2):
        engines.add(Engine(number))
    before = routes(engines, KEYS)
    newcomer = Engine(1)
    engines.add(newcomer)
    with_newcomer = routes(engines, KEYS)
    assert all(now in (then, newcomer) for then, now in zip(before, with_newcomer, strict=True))
    engines.remove(newcomer)
    assert routes(engines, KEYS) == before


def test_an_engine_that_joins_gets_its_share_of_new_prefixes() -> None:
    engines: EngineSet[Engine] = EngineSet()
    for number in range(4):
        engines.add(Engine(number))
    prompts = [np.random.default_rng(seed).integers(0, 1000, 70, dtype=np.uint32) for seed in range(400)]
    routed = routes(engines, [RoutingKey(prompt, SALT, "") for prompt in prompts])
    # 100 each, less than 9.
    assert all(abs(routed.count(engine) - 100) < 45 for engine in engines)


def test_a_tenants_idempotency_key_is_its_own() -> None:
    engines: EngineSet[Engine] = EngineSet()
    for number in range(8):
        engines.add(Engine(number))
    # The prompt does not matter, the tenant does.
    [home] = {engines.choose(key._replace(tenant="a", idempotency_key="key")).number for key in KEYS}
    tenants = {engines.choose(key).number for key in IDEMPOTENT}
    assert home in tenants and len(tenants) > 1


def test_a_popular_prompt_leaves_a_crowded_engine_though_the_rest_of_its_set_is_away() -> None:
    engines: EngineSet[Engine] = EngineSet()
    for number in range(8):
        engines.add(Engine(number))
    for _ in range(40):
        engines.choose(KEYS[0]).num_open += 1
    crowded, *others = sorted((engine for engine in engines if engine.num_open), key=lambda engine: -engine.num_open)
    assert 0 < len(others) < 7, "the prompt has a set of engines, not all of them"
    for engine in others:
        engine.serving = engine.is_reachable = False
    crowded.num_open = 400
    # Until the mean over engines is taken anew.
    routes(engines, KEYS[-8:] * len(engines))
    assert crowded not in routes(engines, KEYS[:1] * 8)
