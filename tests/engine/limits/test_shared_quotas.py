"""Several engines hold a tenant to its quotas together, however late they hear of each other."""

from __future__ import annotations

import collections

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.engine.limits.quota_network import QuotaNetwork
from tests.support.examples import examples

from headrace_backend.engine.errors import RequestRefused
from headrace_backend.engine.limits.sharing.pools import MINUTE_NS
from headrace_backend.engine.request import TenantLimits

SECOND_NS = 10**9
# What is claimed and not spent is held so long at most, looked at this often.
RESERVE_NS = 130_000_000


def streams(number: int) -> TenantLimits:
    return TenantLimits(concurrent_streams=number)


def fill(network: QuotaNetwork, engine: str, limits: TenantLimits, most: int = 1000, tokens: int = 2) -> int:
    """Asks an engine until it refuses; returns how many requests it admitted."""
    return next((number for number in range(most) if not network.add_patiently(engine, limits, tokens)), most)


@pytest.mark.parametrize("engines", ["a", "ab", "abcd", "abcdefghijklmnop"])
@pytest.mark.parametrize("limit", [1, 3, 100])
def test_one_engine_alone_is_given_the_whole_quota_and_no_more(engines: str, limit: int) -> None:
    network = QuotaNetwork(engines, {0: engines})
    network.settle()
    assert fill(network, engines[-1], streams(limit)) == limit
    assert all(fill(network, engine, streams(limit)) == 0 for engine in engines)


def test_a_quota_is_shared_by_use_and_comes_back_where_it_is_needed() -> None:
    network = QuotaNetwork("abc", {0: "abc", 1: "abc"})
    network.settle()
    limits = streams(30)
    for _ in range(10):
        assert network.add_patiently("a", limits) and network.add_patiently("b", limits)
    assert fill(network, "c", limits) == 10
    for running in [running for running in network.running if running.engine == "a"]:
        network.end(running)
    network.settle()
    assert fill(network, "c", limits) == 10


def test_an_engine_that_is_lost_gives_its_streams_back_and_its_rates_with_time() -> None:
    network = QuotaNetwork("abc", {0: "abc"})
    network.settle()
    limits = TenantLimits(concurrent_streams=9, requests_per_minute=12)
    assert fill(network, "a", limits) == 9
    # What it has in reserve would come back with time too.
    network.wait(RESERVE_NS)
    network.settle()
    network.lose("a")
    network.settle()
    assert fill(network, "b", limits) == 3
    network.wait(MINUTE_NS // 2)
    network.settle()
    assert fill(network, "c", limits) == 6


def test_an_engine_that_joins_learns_what_is_taken_and_gets_a_share() -> None:
    network = QuotaNetwork("ab", {0: "ab"})
    network.settle()
    limits = TenantLimits(concurrent_streams=9, requests_per_minute=12)
    assert fill(network, "a", limits, most=6) == 6
    network.connect(0, "c")
    network.settle()
    assert fill(network, "c", limits) == 3
    network.end(network.running[0])
    network.settle()
    assert fill(network, "c", limits) == 1


def test_tokens_that_were_not_used_go_to_whoever_needs_them() -> None:
    network = QuotaNetwork("ab", {0: "ab"})
    network.settle()
    limits = TenantLimits(tokens_per_minute=1000)
    assert network.add_patiently("a", limits, 1000)
    network.settle()
    assert not network.add_patiently("b", limits, 100)
    network.end(network.running[0], 100)
    network.wait(RESERVE_NS)
    network.settle()
    assert fill(network, "b", limits, tokens=100) == 9


def test_what_a_lost_engine_admitted_goes_on_elsewhere_and_costs_nothing_again() -> None:
    network = QuotaNetwork("ab", {0: "ab"})
    network.settle()
    limits = TenantLimits(concurrent_streams=1, requests_per_minute=1, tokens_per_minute=100)
    assert network.add_patiently("a", limits, 100)
    network.settle()
    # The service that lost it may be the first to know.
    network.add("b", limits, 100, admitted=True)
    network.lose("a")
    network.settle()
    assert not network.add_patiently("b", limits, 2)
    network.end(network.running[0], 40)
    network.wait(RESERVE_NS)
    with pytest.raises(RequestRefused, match=r"^requests_per_minute: the limit of this key is 1; 1 more pass in"):
        network.add("b", limits, 60)
    tokens_only = TenantLimits(concurrent_streams=1, tokens_per_minute=100)
    network.wait(MINUTE_NS)
    network.settle()
    assert fill(network, "b", tokens_only, tokens=100) == 1


def asks(network: QuotaNetwork, engine: str, limits: TenantLimits) -> bool:
    """Whether an engine asks the others before it answers; it does not admit at once."""
    try:
        network.add(engine, limits)
    except RequestRefused as refused:
        return refused.asks_others
    return False


def hear(network: QuotaNetwork, *engines: str) -> None:
    """Everything is said and heard between some of the engines, and stays on its way elsewhere."""
    for _ in range(4):
        for engine in engines:
            network.flush(engine)
        for way in network.pending:
            while set(way[1:]) <= set(engines) and network.ways[way]:
                network.deliver(way)


def test_what_one_waits_for_is_taken_by_nobody_else() -> None:
    """Two streams are left; c wants one, and has been heard by a and not by b."""
    network = QuotaNetwork("abc", {0: "abc"})
    network.settle()
    limits = streams(5)
    assert fill(network, "b", limits, most=3) == 3
    network.settle()
    assert asks(network, "c", limits)
    hear(network, "a", "c")
    # Two left by three engines is no whole stream for each: a asks too.
    assert asks(network, "a", limits)
    hear(network, "a", "c")
    assert asks(network, "a", limits) and asks(network, "c", limits)
    network.settle()
    assert network.add_patiently("a", limits) and network.add_patiently("c", limits)
    assert not network.add_patiently("b", limits) and len(network.running) == 5


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_of_two_that_want_the_last_stream_one_gets_it(order: str) -> None:
    network = QuotaNetwork("ab", {0: "ab"})
    network.settle()
    first, second = order
    assert asks(network, first, streams(1)) and asks(network, second, streams(1))
    network.settle()
    refusals = []
    for engine in order:
        # Nobody hears of the other's claim before its own.
        try:
            network.add(engine, streams(1))
        except RequestRefused as error:
            refusals.append(str(error))
    assert len(network.running) == 1
    assert refusals == [
        "concurrent_streams: 0 requests and readers of this key are open and more asked before, at other engines;"
        " its limit is 1"
    ]


def test_a_claim_by_share_leaves_what_others_wait_for() -> None:
    """Twenty of 100 tokens are left beside what a wants, though half of all would do for b."""
    network = QuotaNetwork("ab", {0: "ab"})
    network.settle()
    limits = TenantLimits(tokens_per_minute=100)
    with pytest.raises(RequestRefused, match="the other engines are asked"):
        network.add("a", limits, 80)
    hear(network, "a", "b")
    with pytest.raises(RequestRefused):
        network.add("b", limits, 40)
    network.add("a", limits, 80)
    network.settle()
    assert not network.add_patiently("b", limits, 40) and network.add_patiently("b", limits, 20)


@pytest.mark.parametrize("limit", [1, 4])
def test_streams_that_are_all_in_use_are_refused_at_once_and_by_their_name(limit: int) -> None:
    network = QuotaNetwork("abc", {0: "abc"})
    network.settle()
    assert fill(network, "a", streams(limit)) == limit
    assert not network.add_patiently("b", streams(limit))
    # The others need not be asked again for a while.
    with pytest.raises(
        RequestRefused, match=f"concurrent_streams: {limit} requests .* its limit is {limit}"
    ) as refused:
        network.add("b", streams(limit))
    assert not refused.value.asks_others and refused.value.retry_after_ns == SECOND_NS


def test_of_different_limits_the_lowest_holds_at_every_engine_and_is_named() -> None:
    network = QuotaNetwork("ab", {0: "ab"})
    network.settle()
    assert network.add_patiently("a", streams(3))
    network.settle()
    assert fill(network, "b", streams(8)) == 2
    shared = network.engines["b"].shared
    assert not shared.take_disputes(network.now_ns)
    network.wait(11 * SECOND_NS)
    network.settle()
    assert not network.add_patiently("b", streams(8))
    (dispute,) = shared.take_disputes(network.now_ns)
    assert (dispute.tenant, dispute.held) == ("key", streams(3))
    assert sorted(dispute.said) == [streams(3), streams(8)]
    assert not shared.take_disputes(network.now_ns), "it is named once"
    # Who said less has not said so for a minute.
    network.wait(MINUTE_NS)
    network.settle()
    assert fill(network, "b", streams(8)) == 5


def test_an_engine_that_hangs_keeps_what_it_took_and_nobody_waits_for_it() -> None:
    network = QuotaNetwork("abc", {0: "abc"})
    network.settle()
    assert fill(network, "a", streams(12), most=4) == 4
    network.settle()
    hung = network.engines["a"]
    read, hung.read_report = hung.read_report, lambda report, now_ns: None  # type: ignore[method-assign]
    network.add("b", streams(12))
    network.settle()
    network.wait(2 * SECOND_NS)
    network.settle()
    assert fill(network, "b", streams(12)) == 7
    hung.read_report = read  # type: ignore[method-assign]
    # It has missed reports, and gets complete ones as long as it has not answered.
    network.wait(SECOND_NS)
    network.settle()
    network.end(next(running for running in network.running if running.engine == "b"))
    network.wait(RESERVE_NS)
    network.settle()
    assert fill(network, "a", streams(12)) == 1


def test_nothing_is_remembered_of_tenants_that_left() -> None:
    network = QuotaNetwork("ab", {0: "ab"})
    limits = TenantLimits(concurrent_streams=2, requests_per_minute=60, tokens_per_minute=6000)
    for index in range(50):
        assert network.add_patiently("ab"[index % 2], limits, 50, tenant=f"key {index}")
    network.settle()
    assert all(len(quotas.shared) == 50 for quotas in network.engines.values())
    for running in list(network.running):
        network.end(running)
    for _ in range(4):
        network.wait(MINUTE_NS)
        network.settle()
    assert all(len(quotas) == len(quotas.shared) == 0 for quotas in network.engines.values())


class SharedQuotaMachine(RuleBasedStateMachine):
    """Engines and services come and go, and reports take their time, in order on each way."""

    @initialize(
        limits=st.builds(
            TenantLimits,
            concurrent_streams=st.sampled_from([0, 1, 2, 5, 40]),
            requests_per_minute=st.sampled_from([0, 1, 7, 60]),
            tokens_per_minute=st.sampled_from([0, 50, 1000]),
        ),
        engines=st.sampled_from(["ab", "abc", "abcde"]),
        other=st.booleans(),
    )
    def start(self, limits: TenantLimits, engines: str, other: bool) -> None:
        self.limits = limits
        self.network = QuotaNetwork(engines, {0: engines, 1: engines} if other else {0: engines})
        self.network.settle()
        self.began_ns = self.network.now_ns
        self.num_requests = self.num_tokens = 0
        self.next_engine = ord("z")
        self.elders = set(engines)
        # Requests and tokens that each engine admitted since the others heard all.
        self.unheard: collections.Counter[tuple[str, str]] = collections.Counter()

    def engine(self, index: int) -> str:
        names = sorted(self.network.engines)
        return names[index % len(names)]

    @rule(index=st.integers(0, 4), tokens=st.integers(2, 60), burst=st.sampled_from([1, 1, 5]))
    def add(self, index: int, tokens: int, burst: int) -> None:
        for _ in range(burst):
            engine = self.engine(index)
            try:
                self.network.add(engine, self.limits, tokens)
            except RequestRefused:
                return
            self.num_requests += 1
            self.num_tokens += tokens
            self.unheard.update({(engine, "requests"): 1, (engine, "tokens"): tokens})

    @precondition(lambda self: self.network.running)
    @rule(index=st.integers(0, 20), unused=st.integers(0, 60))
    def end(self, index: int, unused: int) -> None:
        running = self.network.running[index % len(self.network.running)]
        unused = min(unused, running.num_tokens)
        self.network.end(running, running.num_tokens - unused)
        self.num_tokens -= unused

    @rule(index=st.integers(0, 4))
    def say(self, index: int) -> None:
        self.network.flush(self.engine(index))

    @precondition(lambda self: self.network.pending)
    @rule(index=st.integers(0, 40), number=st.integers(1, 3))
    def carry(self, index: int, number: int) -> None:
        for _ in range(number):
            if pending := self.network.pending:
                self.network.deliver(pending[index % len(pending)])

    @rule(elapsed_ns=st.sampled_from([10**6, 10**8, SECOND_NS, 20 * SECOND_NS]))
    def pass_time(self, elapsed_ns: int) -> None:
        """Reports take less than a second."""
        self.network.settle()
        self.unheard.clear()
        self.network.wait(elapsed_ns)

    @precondition(lambda self: len(self.network.engines) > 1)
    @rule(index=st.integers(0, 4))
    def lose(self, index: int) -> None:
        """What a lost engine took is known to those who were there, of whom one stays.

        What it had not reported yet is forgotten with it.
        """
        engine = self.engine(index)
        if self.elders != {engine}:
            self.elders.discard(engine)
            self.network.lose(engine)
            self.num_requests -= self.unheard[engine, "requests"]
            self.num_tokens -= self.unheard[engine, "tokens"]

    @precondition(lambda self: len(self.network.engines) < 6)
    @rule(first=st.booleans())
    def join(self, first: bool) -> None:
        """Services find the new engine one after the other."""
        engine, self.next_engine = chr(self.next_engine), self.next_engine - 1
        for service in sorted(self.network.services, reverse=first):
            self.network.connect(service, engine)
            self.network.flush(engine)

    @precondition(lambda self: 1 in self.network.services)
    @rule(index=st.integers(0, 4))
    def reconnect(self, index: int) -> None:
        """One of two services loses an engine, and finds it again."""
        engine = self.engine(index)
        self.network.disconnect(1, engine)
        self.network.connect(1, engine)

    @invariant()
    def the_sum_is_within_the_quota(self) -> None:
        network, limits = self.network, self.limits
        elapsed_ns = network.now_ns - self.began_ns + RESERVE_NS
        if limits.concurrent_streams:
            assert len(network.running) <= limits.concurrent_streams
        for number, limit in (
            (self.num_requests, limits.requests_per_minute), (self.num_tokens, limits.tokens_per_minute)
        ):  # fmt: skip
            assert not limit or number * MINUTE_NS <= limit * (MINUTE_NS + elapsed_ns)

    @invariant()
    def each_engine_adds_up(self) -> None:
        for name, quotas in self.network.engines.items():
            quotas.check_integrity([each.claim for each in self.network.running if each.engine == name], 0)

    def teardown(self) -> None:
        """What is free in the end can be had at any engine, whatever happened before."""
        if not hasattr(self, "network"):
            return
        limits = self.limits
        self.come_to_rest()
        if limits.concurrent_streams and not limits.requests_per_minute and not limits.tokens_per_minute:
            assert fill(self.network, self.engine(0), limits) == limits.concurrent_streams
            self.come_to_rest()
        if limits.requests_per_minute:
            only = TenantLimits(requests_per_minute=limits.requests_per_minute)
            assert fill(self.network, self.engine(1), only) >= limits.requests_per_minute
            self.come_to_rest()
        for quotas in self.network.engines.values():
            assert len(quotas) == len(quotas.shared) == 0

    def come_to_rest(self) -> None:
        for running in list(self.network.running):
            self.network.end(running)
        for _ in range(4):
            self.network.settle()
            self.network.wait(2 * MINUTE_NS)
        self.network.settle()


TestSharedQuotaMachine = SharedQuotaMachine.TestCase
TestSharedQuotaMachine.settings = hypothesis.settings(
    max_examples=examples(180),
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)
