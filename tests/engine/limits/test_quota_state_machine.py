"""Quotas hold, whatever happens in whatever order.

No tenant takes more than its quotas, charges are settled to the token, and nothing is remembered
for ever.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import Harness, Reader, request
from tests.support.examples import examples

from headrace_backend.engine.errors import RefusalCode, RequestRefused
from headrace_backend.engine.limits.sharing.pools import MINUTE_NS
from headrace_backend.engine.request import AbortCause, EngineRequest, Subscriber, TenantLimits

NUM_BLOCKS = 16
# Of the last one the limits change; the books that the test keeps are those of the others.
TENANTS = ("a", "b", "moving")
STREAMS = (1, 2, 3)

limits = st.builds(
    TenantLimits,
    requests_per_minute=st.sampled_from([0, 1, 3, 20]),
    concurrent_streams=st.sampled_from([0, 1, 2, 5]),
    tokens_per_minute=st.sampled_from([0, 60, 200, 1000]),
    kv_cache_share=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)


@dataclasses.dataclass
class Asked:
    spec: EngineRequest
    accepted_at_ns: int
    reader: Reader | None


@dataclasses.dataclass
class Level:
    """A tenant's bucket of tokens by the letter of the rules, in fractions."""

    limit: int
    level: Fraction
    as_of_ns: int

    def add(self, amount: int, now_ns: int) -> None:
        risen = self.level + Fraction(self.limit * (now_ns - self.as_of_ns), MINUTE_NS)
        self.level = min(Fraction(self.limit), min(Fraction(self.limit), risen) + amount)
        self.as_of_ns = now_ns


class QuotaMachine(RuleBasedStateMachine):
    """Three tenants on three services, a small pool, and workers that die or fail."""

    @initialize(a=limits, b=limits, budget=st.sampled_from([16, 40, 200]), prefix_cache=st.booleans())
    def start(self, a: TenantLimits, b: TenantLimits, budget: int, prefix_cache: bool) -> None:
        self.harness = Harness(
            NUM_BLOCKS,
            max_num_seqs=6,
            max_num_batched_tokens=budget,
            enable_prefix_cache=prefix_cache,
            max_outputs=3,
            ageing_s=1e-5,
        )
        self.engine = self.harness.engine
        self.limits = {"a": a, "b": b, "moving": TenantLimits()}
        self.began_ns = self.harness.now_ns
        self.asked: list[Asked] = []
        # Requests not known to have ended, and the buckets as they should be.
        self.active: dict[str, Asked] = {}
        self.levels = {
            tenant: Level(kept.tokens_per_minute, Fraction(kept.tokens_per_minute), self.began_ns)
            for tenant, kept in self.limits.items()
        }

    @rule(
        prompt=st.integers(1, 60),
        max_tokens=st.integers(1, 30),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(TENANTS),
        stream_id=st.sampled_from(STREAMS),
        detached=st.booleans(),
        key=st.sampled_from(["", "", "k1", "k2"]),
        stop=st.frozensets(st.integers(1, 23), max_size=6),
        deadline_ns=st.none() | st.integers(1, 60_000),
    )
    def add(
        self,
        prompt: int,
        max_tokens: int,
        n: int,
        priority: int,
        tenant: str,
        stream_id: int,
        detached: bool,
        key: str,
        stop: frozenset[int],
        deadline_ns: int | None,
    ) -> None:
        spec = request(
            prompt,
            max_tokens,
            n=n,
            priority=priority,
            tenant=tenant,
            detached=detached,
            idempotency_key=key,
            spec_digest=b"d",
            token_ids=stop,
            deadline_ns=None if deadline_ns is None else self.harness.now_ns + deadline_ns,
            limits=self.limits[tenant],
        )
        subscriber = self.harness.subscriber(stream_id)
        try:
            outcome = self.engine.add(spec, None if detached else subscriber)
        except RequestRefused as refused:
            self._check_refusal(spec, refused)
            return
        if outcome.existing:
            assert key and any(asked.spec.idempotency_key == key for asked in self.asked)
            return
        reader = None if detached else self.harness.readers.setdefault(subscriber, Reader())
        asked = Asked(dataclasses.replace(spec), self.harness.now_ns, reader)
        self.asked.append(asked)
        self.active[spec.request_id] = asked
        self.levels[tenant].add(-self._charge(spec), self.harness.now_ns)

    @rule(newest=limits)
    def change_limits(self, newest: TenantLimits) -> None:
        self.limits["moving"] = newest

    def _charge(self, spec: EngineRequest) -> int:
        kept = self.limits[spec.tenant]
        fixed = spec.tenant != "moving" and kept.tokens_per_minute
        return len(spec.prompt_ids) + spec.asked.n * spec.asked.stop.max_tokens if fixed else 0

    def _check_refusal(self, spec: EngineRequest, refused: RequestRefused) -> None:
        """A refusal is true, and so is the moment that it names."""
        assert refused.code is RefusalCode.RESOURCE_EXHAUSTED, refused
        if spec.tenant == "moving":
            return
        kept, now_ns = self.limits[spec.tenant], self.harness.now_ns
        wait_ns = refused.retry_after_ns
        if "concurrent_streams:" in refused.message:
            assert sum(asked.spec.tenant == spec.tenant for asked in self.active.values()) <= kept.concurrent_streams
            assert wait_ns is not None and wait_ns >= 10**9
        elif "tokens_per_minute:" in refused.message:
            level = self.levels[spec.tenant]
            level.add(0, now_ns)
            if wait_ns is None:
                assert self._charge(spec) > kept.tokens_per_minute
            else:
                assert level.level < self._charge(spec)
                if "requests_per_minute" not in refused.message:
                    assert level.level + Fraction(level.limit * wait_ns, MINUTE_NS) >= self._charge(spec)
        elif "requests_per_minute:" in refused.message:
            assert wait_ns is not None and 0 < wait_ns <= MINUTE_NS
        elif "kv_cache_share:" in refused.message:
            room = round(kept.kv_cache_share * NUM_BLOCKS, 6) // 1 * 16
            assert len(spec.prompt_ids) + spec.asked.stop.max_tokens - 1 > room
        else:
            assert "expected wait" in refused.message, refused

    @precondition(lambda self: self.active)
    @rule(data=st.data(), cause=st.sampled_from(AbortCause))
    def abort(self, data: st.DataObject, cause: AbortCause) -> None:
        asked = data.draw(st.sampled_from(list(self.active.values())))
        self.engine.abort(asked.spec.request_id, asked.spec.tenant, cause)
        self.harness.read()

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), stream_id=st.sampled_from(STREAMS))
    def attach(self, data: st.DataObject, stream_id: int) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        subscriber = self.harness.subscriber(stream_id)
        tenant = asked.spec.tenant
        try:
            self.engine.attach(subscriber, asked.spec.request_id, tenant, None, 0, self.limits[tenant])
        except RequestRefused as refused:
            assert "concurrent_streams" in refused.message and refused.retry_after_ns == 10**9
            return
        self.harness.readers[subscriber] = Reader()

    @precondition(lambda self: self.harness.readers)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        subscriber = data.draw(st.sampled_from(list(self.harness.readers)))
        self.engine.detach(Subscriber(*subscriber))
        self.harness.read()

    @rule(stream_id=st.sampled_from(STREAMS))
    def lose_stream(self, stream_id: int) -> None:
        self.harness.read()
        self.engine.stream_lost(stream_id)

    @rule(steps=st.integers(1, 8))
    def turns(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()
            self._settle_ended()

    @rule(pause_ns=st.integers(1, 5_000))
    def replace_worker(self, pause_ns: int) -> None:
        self.harness.replace_worker(pause_ns)

    @precondition(lambda self: self.harness.worker.plans)
    @rule()
    def fail_step(self) -> None:
        """The worker names its oldest step as one that can't be computed.

        From here on some requests are tried alone.
        """
        self.engine.worker_lost(self.harness.worker.next_step_id)
        self.harness.read()
        self.harness.worker = self.harness.new_worker()
        self.engine.worker_ready(NUM_BLOCKS)

    @rule(elapsed_ns=st.integers(1, 20_000) | st.integers(1, 2 * MINUTE_NS))
    def wait(self, elapsed_ns: int) -> None:
        self.harness.now_ns += elapsed_ns
        self.engine.expire()
        self.harness.read()

    def _settle_ended(self) -> None:
        """Gives back what requests that ended since did not use."""
        for tenant in TENANTS:
            for row in self.engine.list_requests(tenant, 0, 10_000, 0).rows:
                asked = self.active.get(row.request_id)
                live = self.engine._table.find(row.request_id, tenant)
                if asked is None or live is None or live.active:
                    continue
                del self.active[row.request_id]
                num_used = row.prompt_tokens + row.output_tokens if live.ledger.started_at_ns else 0
                if charge := self._charge(asked.spec):
                    self.levels[tenant].add(charge - num_used, live.ledger.ended_at_ns)

    @invariant()
    def everything_adds_up(self) -> None:
        self._settle_ended()
        self.engine.check_integrity()
        now_ns = self.harness.now_ns
        for account in self.engine._quotas:
            kept = self.limits[account.tenant]
            if account.tenant == "moving":
                continue
            assert account.limits == kept
            if kept.concurrent_streams:
                assert account.num_streams <= kept.concurrent_streams
            if kept.kv_cache_share:
                assert account.num_blocks <= kept.kv_cache_share * NUM_BLOCKS
            level = self.levels[account.tenant]
            level.add(0, now_ns)
            if account.shares.tokens is not None:
                bucket, whole = account.shares.tokens.pool, level.level // 1
                assert bucket.wait_ns(whole, now_ns) == 0
                assert bucket.wait_ns(whole + 1, now_ns) != 0

    @invariant()
    def nobody_came_faster_than_allowed(self) -> None:
        for tenant in ("a", "b"):
            kept = self.limits[tenant]
            times_ns = [asked.accepted_at_ns for asked in self.asked if asked.spec.tenant == tenant]
            for count, first_ns in enumerate(reversed(times_ns), 1):
                if kept.requests_per_minute:
                    elapsed = Fraction(times_ns[-1] - first_ns, MINUTE_NS)
                    assert count <= kept.requests_per_minute * (1 + elapsed)

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        self.everything_adds_up()
        assert not self.active
        assert all(account.num_charged_tokens == account.num_streams == 0 for account in self.engine._quotas)
        for asked in self.asked:
            tokens = asked.reader.tokens if asked.reader is not None else {}
            for output_index, received in tokens.items():
                assert received == expected_tokens(asked.spec, output_index)[: len(received)]
        self.harness.now_ns += MINUTE_NS
        self.engine.expire()
        assert len(self.engine._quotas) == 0


TestQuotaMachine = QuotaMachine.TestCase
TestQuotaMachine.settings = hypothesis.settings(
    max_examples=examples(120),
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)
