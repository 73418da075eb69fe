"""Whatever happens in whatever order, tokens are those of a model without an engine.

Nothing is left behind.
"""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.engine.fake_worker import expected_prompt, expected_tokens
from tests.engine.harness import TOKEN_BYTES, Harness, Reader, request
from tests.support.examples import examples

from headrace_backend.cache_groups import ONE_GROUP, CacheGroup
from headrace_backend.engine.errors import RequestRefused
from headrace_backend.engine.events import EndReason
from headrace_backend.engine.request import AbortCause, EngineRequest
from headrace_backend.engine.scheduling import prefix_followers

MAX_LEN = 96
GROUPS = [ONE_GROUP, ONE_GROUP, (CacheGroup(), CacheGroup(18)), (CacheGroup(), CacheGroup(33), CacheGroup(5))]


def expected_end(spec: EngineRequest, output_index: int) -> tuple[list[int], EndReason]:
    """The output's tokens and its end by the letter of the rules.

    They are applied to one token after another, over the whole text.
    """
    tokens: list[int] = []
    text = b""
    for token in expected_tokens(spec, output_index):
        tokens.append(token)
        before, text = len(text), text + TOKEN_BYTES[token]
        if token in spec.stop_token_ids and len(tokens) > spec.asked.stop.min_tokens:
            return tokens, EndReason.STOP
        ends_in_token = any(
            text[:end].endswith(string)
            for string in spec.asked.stop.strings
            for end in range(before + 1, len(text) + 1)
        )
        if ends_in_token and len(tokens) >= spec.asked.stop.min_tokens:
            return tokens, EndReason.STOP
    return tokens, EndReason.LENGTH


@dataclasses.dataclass
class Asked:
    spec: EngineRequest
    reader: Reader
    # Reasons that the test itself gave the request to end.
    causes: set[EndReason] = dataclasses.field(default_factory=set)
    resumed: int = 0


class EngineMachine(RuleBasedStateMachine):
    """A tiny pool, a tiny budget, few rows, and prompts that share prefixes."""

    # Most tokens that a step settles for a row that decodes; None: exactly one.
    tokens_per_row: int | None = None

    @initialize(
        num_blocks=st.integers(6, 14),
        num_rows=st.integers(1, 6),
        budget=st.sampled_from([16, 17, 40, 200]),
        prefix_cache=st.booleans(),
        least_shared=st.sampled_from([16, 128]),
        groups=st.sampled_from(GROUPS),
    )
    def start(
        self,
        num_blocks: int,
        num_rows: int,
        budget: int,
        prefix_cache: bool,
        least_shared: int,
        groups: tuple[CacheGroup, ...],
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prefix_followers, "LEAST_SHARED_TOKENS", least_shared)
        self.harness = Harness(
            # With few groups enough for one long sequence, or hardly.
            num_blocks + 4 * (len(groups) - 1),
            model_len=MAX_LEN,
            max_num_seqs=num_rows,
            max_num_batched_tokens=budget,
            enable_prefix_cache=prefix_cache,
            max_outputs=4,
            ageing_s=1e-5,
            tokens_per_row=self.tokens_per_row,
            groups=groups,
        )
        self.harness.choose_count = self.choose_count
        self.engine = self.harness.engine
        self.num_rows = num_rows
        self.asked: list[Asked] = []

    def choose_count(self, most: int) -> int:
        """How many tokens a row settles that may settle so many."""
        return most

    @rule(
        shared=st.integers(0, 40),
        own=st.lists(st.integers(1, 3), min_size=1, max_size=20),
        max_tokens=st.integers(1, 36),
        min_tokens=st.integers(0, 4),
        n=st.integers(1, 4),
        seed=st.integers(0, 3),
        priority=st.integers(-2, 2),
        strings=st.lists(st.sampled_from([b"a", b"abab", b"bcc", b"cab", b"aabb"]), max_size=2, unique=True),
        stop_tokens=st.frozensets(st.integers(0, 23), max_size=1),
        penalty=st.booleans(),
        tenant=st.sampled_from(["", "other"]),
        deadline_ns=st.none() | st.integers(1, 60_000),
        num_prompt_logprobs=st.sampled_from([-1, -1, 0, 2]),
        salt=st.sampled_from([b"", b"", b"salt"]),
    )
    def add(
        self,
        shared: int,
        own: list[int],
        max_tokens: int,
        min_tokens: int,
        n: int,
        priority: int,
        seed: int,
        strings: list[bytes],
        stop_tokens: frozenset[int],
        penalty: bool,
        tenant: str,
        deadline_ns: int | None,
        num_prompt_logprobs: int,
        salt: bytes,
    ) -> None:
        spec = request(
            [5] * shared + own,
            max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            n=min(n, self.num_rows),
            seed=seed,
            priority=priority,
            strings=tuple(strings),
            token_ids=stop_tokens,
            presence_penalty=0.5 if penalty else 0.0,
            tenant=tenant,
            deadline_ns=None if deadline_ns is None else self.harness.now_ns + deadline_ns,
            num_prompt_logprobs=num_prompt_logprobs,
            cache_salt=salt,
        )
        try:
            reader = self.harness.add(spec)
        except RequestRefused as refusal:
            assert "KV cache" in refusal.message or (deadline_ns and "expected wait" in refusal.message), refusal
            return
        causes = set() if deadline_ns is None else {EndReason.DEADLINE}
        self.asked.append(Asked(dataclasses.replace(spec), reader, causes))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        outcome = self.engine.abort(asked.spec.request_id, asked.spec.tenant, AbortCause.CANCELLED)
        assert outcome.found
        if outcome.was_active:
            asked.causes.add(EndReason.CANCELLED)
        self.harness.read()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def lose_reader(self, data: st.DataObject) -> None:
        """The owner's subscription ends with its request; nothing more reaches the reader."""
        index = data.draw(st.integers(0, len(self.asked) - 1))
        asked = self.asked[index]
        subscriber = next(s for s, reader in self.harness.readers.items() if reader is asked.reader)
        if asked.reader.done is None:
            self.engine.detach(subscriber)
            del self.harness.readers[subscriber]
            del self.asked[index]

    @rule()
    def plan_one(self) -> None:
        plan = self.engine.plan()
        if plan is not None:
            self.harness.worker.push(plan)
        elif self.engine.num_in_flight == 0:
            assert not self.engine.has_work, "there is work, a worker and nothing in flight, but nothing is planned"
        self.harness.read()

    @precondition(lambda self: self.harness.worker.plans)
    @rule()
    def settle_one(self) -> None:
        self.harness.settle()

    @rule(steps=st.integers(1, 8))
    def turns(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()

    @rule(pause_ns=st.integers(1, 5_000))
    def replace_worker(self, pause_ns: int) -> None:
        self.harness.replace_worker(pause_ns)

    @rule(elapsed_ns=st.integers(1, 20_000))
    def wait(self, elapsed_ns: int) -> None:
        self.harness.now_ns += elapsed_ns
        self.engine.expire()
        self.harness.read()

    @invariant()
    def nothing_is_out_of_place(self) -> None:
        self.engine.check_integrity()
        load = self.engine.load()
        assert load.free_blocks + load.cached_blocks + load.used_blocks == load.kv_blocks

    @invariant()
    def readers_have_a_prefix_of_what_is_expected(self) -> None:
        for asked in self.asked:
            if asked.spec.asked.num_prompt_logprobs >= 0:
                expected = expected_prompt(asked.spec)
                read = asked.reader.prompt
                assert read == expected if asked.reader.tokens else read == expected[: len(read)]
            for output_index, tokens in asked.reader.tokens.items():
                assert tokens == expected_tokens(asked.spec, output_index)[: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        try:
            self.harness.run()
        finally:
            self.patch.undo()
        for asked in self.asked:
            self._check_ended(asked)
        load = self.engine.load()
        assert load.used_blocks == load.running_sequences == load.waiting_requests == load.waiting_tokens == 0
        assert self.engine.num_in_flight == 0
        assert self.engine.take_outboxes() == {}

    def _check_ended(self, asked: Asked) -> None:
        reader, done = asked.reader, asked.reader.done
        assert done is not None
        assert sorted(reader.ends) == list(range(asked.spec.asked.n))
        assert done.output_tokens == sum(len(tokens) for tokens in reader.tokens.values())
        for output_index, end in reader.ends.items():
            tokens = reader.tokens.get(output_index, [])
            expected, reason = expected_end(asked.spec, output_index)
            if end.reason in asked.causes:
                assert tokens == expected[: len(tokens)]
            else:
                assert (tokens, end.reason) == (expected, reason)
        total_ns = done.queued_ns + done.prefill_ns + done.decode_ns + done.preempted_ns + done.engine_restart_ns
        assert total_ns == asked.spec.service_ns + done.ended_at_ns - self._arrival_ns(asked)

    def _arrival_ns(self, asked: Asked) -> int:
        """The harness' clock is the wall clock too."""
        rows = self.engine.list_requests(asked.spec.tenant, 0, 10_000, 0).rows
        return next(row.created_at_ns for row in rows if row.request_id == asked.spec.request_id)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = hypothesis.settings(
    max_examples=examples(120),
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)
