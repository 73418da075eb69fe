"""Which engine takes a prompt: prefixes meet, waits are evened out, and services agree."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples

from headrace_service.engines.routing.engine_load import EngineLoad, LoadReport
from headrace_service.engines.routing.placements import Placements
from headrace_service.engines.routing.popularity import Popularity, Repeats
from headrace_service.engines.routing.prefix_keys import LENGTHS, prefix_keys, root
from headrace_service.engines.routing.rendezvous import Rendezvous
from headrace_service.engines.routing.router import Router, RoutingKey

NUMBERS = st.lists(st.integers(0, (1 << 20) - 1), min_size=2, max_size=80, unique=True)
KEYS = st.integers(0, (1 << 64) - 1)
# Prompt tokens that an engine of these tests computes per second.
RATE = 10_000.0


@dataclasses.dataclass(eq=False)
class Engine:
    """One engine as a service sees it; it has reported that nothing is open."""

    number: int
    serving: bool = True
    is_reachable: bool = True
    num_open: int = 0
    load: EngineLoad = dataclasses.field(default_factory=EngineLoad)

    def __post_init__(self) -> None:
        self.waits(0)

    def waits(self, tokens: int, open_requests: int = 0) -> None:
        self.load.reported(LoadReport(tokens, RATE, open_requests, 256, 1.0), 0, 0.0)


class Service:
    """A router on a clock that stands still, over engines of its own sight."""

    def __init__(self, numbers: list[int]) -> None:
        self.engines = {number: Engine(number) for number in numbers}
        self.router: Router[Engine] = Router(lambda: 0.0)
        self.router.set_engines(list(self.engines.values()))

    def ask(self, prompt: list[int], tenant: str = "", salt: bytes = b"") -> int:
        """Sends a prompt that is over at once: which engine got it."""
        number = self.router.choose(RoutingKey(np.array(prompt, np.uint32), salt, tenant)).number
        self.engines[number].waits(0)
        return number


def prompt_of(seed: int, length: int = 100) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100_000, length).tolist()


# -- keys of beginnings


@given(st.lists(st.integers(0, 9), max_size=200), st.data())
def test_beginnings_have_one_key_exactly_where_their_tokens_are_equal(ids: list[int], data: st.DataObject) -> None:
    other = list(ids)
    if ids:
        changed = data.draw(st.integers(0, len(ids) - 1))
        other[changed] += 1
    else:
        changed = 0
    keys, others = (prefix_keys(np.array(found, np.uint32), 7) for found in (ids, other))
    reached = [length for length in LENGTHS if length <= len(ids)]
    assert len(keys) == max(1, len(reached))
    for index, length in enumerate(reached or [len(ids)]):
        assert (keys[index] == others[index]) == (changed >= length or not ids)


@given(st.integers(1, 3000), st.integers(0, 3000))
def test_a_longer_prompt_has_the_keys_of_its_beginning(length: int, more: int) -> None:
    ids = np.arange(length + more, dtype=np.uint32)
    keys = prefix_keys(ids[:length], 7)
    if length >= LENGTHS[0]:
        assert prefix_keys(ids, 7)[: len(keys)] == keys


def test_whoever_may_not_share_blocks_has_keys_of_their_own() -> None:
    ids = np.arange(100, dtype=np.uint32)
    owners = [("", b""), ("a", b""), ("", b"a"), ("ab", b"c"), ("a", b"bc")]
    assert len({key for tenant, salt in owners for key in prefix_keys(ids, root(tenant, salt))}) == 2 * len(owners)


def test_what_differs_behind_the_longest_beginning_decides_nothing() -> None:
    ids = np.zeros(LENGTHS[-1] + 1000, np.uint32)
    keys = prefix_keys(ids, 7)
    ids[-1] = 1
    assert prefix_keys(ids, 7) == keys and len(keys) == len(LENGTHS)


# -- the order


@given(NUMBERS, KEYS, st.randoms(use_true_random=False))
def test_all_services_have_one_order_whatever_the_engines_are_named_in(
    numbers: list[int], key: int, rng: random.Random
) -> None:
    shuffled = rng.sample(numbers, len(numbers))
    orders = [[named[index] for index in Rendezvous(named).first(key, len(named))] for named in (numbers, shuffled)]
    assert orders[0] == orders[1] and sorted(orders[0]) == sorted(numbers)
    assert numbers[Rendezvous(numbers).first(key, 1)[0]] == orders[0][0]


@given(NUMBERS, KEYS, st.data())
def test_an_engine_that_leaves_or_joins_moves_nothing_between_others(
    numbers: list[int], key: int, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(numbers))
    left = [number for number in numbers if number != gone]
    before = [numbers[index] for index in Rendezvous(numbers).first(key, len(numbers))]
    after = [left[index] for index in Rendezvous(left).first(key, len(left))]
    assert after == [number for number in before if number != gone]


@given(NUMBERS, KEYS, st.data())
def test_the_first_ones_of_some_are_those_of_all_in_their_order(
    numbers: list[int], key: int, data: st.DataObject
) -> None:
    order = Rendezvous(numbers)
    among = np.array(sorted(data.draw(st.sets(st.integers(0, len(numbers) - 1), min_size=1))))
    count = data.draw(st.integers(1, len(numbers)))
    whole = order.first(key, len(numbers))
    assert order.first(key, count) == whole[:count]
    assert order.first(key, count, among) == [index for index in whole if index in among][:count]


def test_every_engine_has_its_share_of_the_prefixes() -> None:
    service = Service([0, 1, 2, 3])
    found = Counter(service.ask(prompt_of(seed)) for seed in range(2000))
    # 500 each, less than 20; five deviations are 97.
    assert all(abs(found[number] - 500) < 100 for number in range(4))


# -- who is there


def test_a_lost_engine_moves_its_own_prefixes_alone_and_has_them_back() -> None:
    numbers, prompts = [0, 1, 2], [prompt_of(seed) for seed in range(200)]

    def placed(lost: int | None) -> list[int]:
        service = Service(numbers)
        if lost is not None:
            service.engines[lost].serving = service.engines[lost].is_reachable = False
        return [service.ask(prompt) for prompt in prompts]

    before, during = placed(None), placed(1)
    assert 1 in before and 1 not in during
    assert all(now == then for now, then in zip(during, before, strict=True) if then != 1)
    # Those that moved are dealt out to both.
    assert {now for now, then in zip(during, before, strict=True) if then == 1} == {0, 2}
    service = Service(numbers)
    assert [service.ask(prompt) for prompt in prompts] == before
    service.engines[1].serving = False
    assert 1 not in [service.ask(prompt) for prompt in prompts]
    service.engines[1].serving = True
    back = [service.ask(prompt) for prompt in prompts]
    # Whoever took them over has them cached too; what is new goes where it always went.
    assert all(now == then for now, then in zip(back, before, strict=True) if then != 1)
    fresh = [prompt_of(seed) for seed in range(1000, 1100)]
    assert [service.ask(prompt) for prompt in fresh] == [Service(numbers).ask(prompt) for prompt in fresh]


def test_an_engine_that_replaces_its_worker_is_asked_before_one_that_is_gone() -> None:
    service = Service([0, 1])
    service.engines[0].serving = False
    service.engines[1].serving = service.engines[1].is_reachable = False
    assert {service.ask(prompt_of(seed)) for seed in range(20)} == {0}
    service.engines[0].is_reachable = False
    assert {service.ask(prompt_of(seed)) for seed in range(20)} == {0, 1}


@pytest.mark.parametrize("serving", [True, False])
def test_only_an_engine_that_may_is_taken(serving: bool) -> None:
    service = Service(list(range(100)))
    for engine in service.engines.values():
        engine.serving = serving
    for seed in range(20):
        key = RoutingKey(np.array(prompt_of(seed), np.uint32), b"", "")
        assert service.router.place(key, {17}).number == 17


def test_all_but_one_of_a_thousand_engines_may_be_lost() -> None:
    service = Service(list(range(1000)))
    for engine in service.engines.values():
        engine.serving = engine.is_reachable = engine.number == 617
    assert {service.ask(prompt_of(seed)) for seed in range(10)} == {617}


def test_an_idempotency_keys_engine_stays_whatever_happens() -> None:
    service = Service([0, 1, 2])

    def homes() -> list[int]:
        prompt = np.array(prompt_of(0), np.uint32)
        return [service.router.choose(RoutingKey(prompt, b"", "a", f"key {index}")).number for index in range(50)]

    before = homes()
    assert set(before) == {0, 1, 2}
    for number in (0, 1):
        service.engines[number].serving = service.engines[number].is_reachable = False
        service.engines[number].waits(1_000_000, open_requests=1000)
    assert homes() == before


# -- waits and caches


def test_a_prefix_stays_with_its_engine_until_the_wait_outweighs_it() -> None:
    service = Service([0, 1])
    prompt = prompt_of(0, 1024)
    home = service.ask(prompt)
    assert service.ask(prompt) == home
    # 0.1 s of computing counts four times.
    service.engines[home].waits(3900)
    service_before = service.router.choose(RoutingKey(np.array(prompt, np.uint32), b"", "")).number
    service.engines[home].waits(4500)
    assert service_before == home and service.ask(prompt) != home


def test_what_was_sent_counts_until_the_engine_reports() -> None:
    service = Service(list(range(4)))
    rng = random.Random(0)
    # A tenant whose prompts were never seen before has nothing to gain at any engine.
    for _ in range(64):
        service.ask([rng.randrange(1000) for _ in range(100)])
    found = Counter(
        service.router.choose(RoutingKey(np.array(prompt_of(seed, 1000), np.uint32), b"", "")).number
        for seed in range(400)
    )
    # Drawn at random the fullest would have 20 to 40 more than 100; the better of two evens it out.
    assert max(found.values()) <= 105


def test_tokens_that_wait_are_worked_off_at_the_measured_rate() -> None:
    load = EngineLoad()
    load.reported(LoadReport(5000, RATE, 3, 4, 2.0), 1, 10.0)
    assert load.wait_s(1, RATE, 10.0) == pytest.approx(0.5)
    load.sent(1000, RATE, 10.2)
    assert load.wait_s(1, RATE, 10.3) == pytest.approx(0.3)
    assert load.wait_s(1, RATE, 60.0) == 0
    # Two more of its own, beside two of other services, are one more than its four rows.
    assert load.num_open(3) == 5 and load.wait_s(3, RATE, 60.0) == pytest.approx(2 / 4 * 2.0)
    load.forget()
    assert load.num_open(1) == 1 and load.wait_s(1, RATE, 60.0) == 0


@settings(max_examples=examples(100))
@given(st.integers(2, 8), st.integers(1, 2000))
def test_no_engine_has_far_more_open_requests_than_others(count: int, requests: int) -> None:
    service = Service(list(range(count)))
    prompt = np.array(prompt_of(0), np.uint32)
    for _ in range(requests):
        service.router.set_engines(list(service.engines.values()))
        service.router.choose(RoutingKey(prompt, b"", "")).num_open += 1
    assert max(engine.num_open for engine in service.engines.values()) <= 33 + 1.5 * requests / count


# -- wide beginnings


def conversations(count: int, system: int = 640) -> list[list[int]]:
    return [[*prompt_of(0, system), *prompt_of(1 + index, 300)] for index in range(count)]


def test_a_beginning_that_everybody_has_is_spread_and_conversations_stay() -> None:
    service = Service(list(range(8)))
    for prompt in conversations(600):
        service.ask(prompt)
    first = {index: service.ask(prompt) for index, prompt in enumerate(conversations(200))}
    assert set(first.values()) == set(range(8))
    longer = [[*prompt, *prompt_of(9000 + index, 500)] for index, prompt in enumerate(conversations(200))]
    assert [service.ask(prompt) for prompt in longer] == list(first.values())


def test_services_that_never_spoke_agree_on_the_turns_of_a_conversation() -> None:
    services = [Service(list(range(16))) for _ in range(2)]
    for index, prompt in enumerate(conversations(4000)):
        services[index % 2].ask(prompt)
    fresh = [[*prompt_of(0, 640), *prompt_of(50_000 + index, 300)] for index in range(200)]
    placed = [service.ask(prompt) for prompt, service in zip(fresh, itertools.cycle(services), strict=False)]
    longer = [[*prompt, *prompt_of(90_000 + index, 200)] for index, prompt in enumerate(fresh)]
    again = [service.ask(prompt) for prompt, service in zip(longer, itertools.cycle(services[::-1]), strict=False)]
    assert placed == again and len(set(placed)) == 16


def test_a_beginning_that_became_popular_at_once_leaves_its_set() -> None:
    service = Service(list(range(100)))
    prompts = conversations(40)
    for prompt in prompts[:20]:
        service.ask(prompt)
    for engine in service.engines.values():
        engine.waits(0 if engine.number >= 50 else 20_000)
    asked = [service.router.choose(RoutingKey(np.array(prompt, np.uint32), b"", "")).number for prompt in prompts[20:]]
    # The set waits for two seconds. Of the two more that each draws, both do so one time in four.
    assert sum(number >= 50 for number in asked) >= 10


def test_prefixes_of_a_fair_share_are_not_spread() -> None:
    service = Service(list(range(8)))
    rng = random.Random(0)
    found: dict[int, set[int]] = {}
    for index in range(4000):
        seed = rng.randrange(40)
        found.setdefault(seed, set()).add(service.ask([*prompt_of(seed, 200), *prompt_of(100 + index, 60)]))
    assert all(len(engines) == 1 for engines in found.values())


def test_a_prompt_that_is_popular_as_a_whole_is_spread() -> None:
    service = Service(list(range(8)))
    found = Counter()
    for _ in range(2000):
        number = service.router.choose(RoutingKey(np.array(prompt_of(0, 640), np.uint32), b"", "")).number
        found[number] += 1
    assert len(found) == 8


# -- bounds


def test_memory_is_bounded_whatever_callers_send() -> None:
    placements, popularity, repeats = Placements(most_keys=100), Popularity(), Repeats()
    for index in range(20_000):
        placements.note([index, -index], index % 50)
        popularity.count_request()
        popularity.count(index)
        repeats.share(index, repeated=False)
    assert len(placements) <= 102 and len(popularity) <= 8192 and len(repeats) <= 4096
    assert placements.find([19_999, -19_999]) == {19_999 % 50: LENGTHS[1]}


def test_a_beginning_keeps_its_newest_engines() -> None:
    placements = Placements()
    for number in (1, 2, 3, 4, 5, 3):
        placements.note([7], number)
    assert list(placements.find([7])) == [3, 5, 4, 2]


def test_what_was_popular_fades() -> None:
    popularity = Popularity()
    for _ in range(4000):
        popularity.count_request()
        popularity.count(1)
    for _ in range(40_000):
        popularity.count_request()
        popularity.count(2)
    popularity.count_request()
    assert popularity.count(1) <= 4 and popularity.count(2) > 0.9 * popularity.total


@given(st.lists(st.integers(0, 100_000), max_size=70))
def test_a_prompt_of_any_length_finds_an_engine(ids: list[int]) -> None:
    service = Service([3, 5])
    assert service.ask(ids) == service.ask(ids)
