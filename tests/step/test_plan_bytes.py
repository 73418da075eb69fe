"""Every step plan fits its ring, whatever is asked.

What does not fit one step waits for the next, and every request ends.
"""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.engine.fake_worker import VOCAB_SIZE, column_bytes, expected_tokens
from tests.engine.harness import Harness, config, request
from tests.support.examples import examples

from headrace_backend.cache_groups import SequenceBlocks
from headrace_backend.config import EngineConfig
from headrace_backend.engine.engine import Engine
from headrace_backend.engine.errors import RefusalCode, RequestRefused
from headrace_backend.engine.events import EndReason
from headrace_backend.engine.limits.admission import most_admission_bytes
from headrace_backend.engine.request import EngineRequest, ModelLimits, Subscriber
from headrace_backend.step.plan import StepPlan, StepResult, admission_bytes
from headrace_backend.step.plan_bytes import columns_bytes, largest_admission_bytes, max_plan_bytes
from headrace_request import limits

MIB = 1 << 20
LONG = 131_072


class LongEngine:
    """An engine with a long context, whose worker draws nothing but ones.

    Only its plans are of interest.
    """

    def __init__(self, **changes: object) -> None:
        self.config = config(max_num_batched_tokens=8192, max_outputs=128, **changes)
        self.now_ns = 1
        self.engine = Engine(self.config, ModelLimits(VOCAB_SIZE, LONG, (0,)), None, lambda: self.now_ns)
        self.limit = max_plan_bytes(self.config, LONG)
        self.plan_bytes: list[int] = []
        self.lose_workers()

    def lose_workers(self) -> None:
        self.engine.worker_lost()
        self.engine.worker_ready(1 << 15)

    def add(self, spec: EngineRequest) -> None:
        self.engine.add(spec, Subscriber(1, self.now_ns))
        self.now_ns += 1

    def step(self) -> StepPlan:
        plan = self.engine.plan()
        assert plan is not None, "there is work"
        encoded = plan.encode()
        self.plan_bytes.append(len(encoded))
        assert len(encoded) <= self.limit, f"a plan of {len(encoded)} bytes outgrows {self.limit}"
        self.now_ns += 1_000_000
        ones = np.ones(plan.sample.rows.size, np.int32)
        finite = np.ones(plan.forward.checked_indices.size, np.uint8)
        self.engine.settle(StepResult(plan.step_id, 1, 2, ones, ones.astype(np.uint8), checked_ok=finite))
        return plan

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        self.engine.check_integrity()


def prompt_of(length: int) -> list[int]:
    return (1 + np.arange(length) % (VOCAB_SIZE - 1)).tolist()


def test_the_history_of_a_request_crosses_once_for_all_its_outputs() -> None:
    engine = LongEngine(max_num_seqs=128)
    engine.add(request(prompt_of(130_900), 3, n=128, repetition_penalty=1.1))
    engine.run()
    # 128 tables of 33 kB, and the prompt of 524 kB once.
    assert 4 * MIB < max(engine.plan_bytes) < 6 * MIB


def test_requests_behind_a_warm_prompt_enter_as_far_as_a_plan_has_room() -> None:
    engine = LongEngine(max_num_seqs=512)
    engine.add(request(prompt_of(65_400), 2))
    engine.run()
    for _ in range(20):
        engine.add(request(prompt_of(65_400), 2, n=16, repetition_penalty=1.1))
    engine.run()


def test_everybody_comes_back_after_a_loss_as_far_as_a_plan_has_room() -> None:
    engine = LongEngine(max_num_seqs=256, enable_prefix_cache=True)
    engine.add(request(prompt_of(60_000), 2))
    engine.run()
    words = tuple((1 + i % 20,) * limits.MAX_BAD_WORD_TOKENS for i in range(limits.MAX_BAD_WORD_SEQUENCES))
    for seed in range(64):
        engine.add(request(prompt_of(60_000), 40, n=4, seed=seed, presence_penalty=0.5, bad_words=words))
    for _ in range(30):
        engine.step()
    engine.lose_workers()
    engine.run()
    # Together they are 64 times 240 kB of history and 134 kB of words.
    assert max(engine.plan_bytes) > 10 * MIB


def test_the_largest_request_that_is_valid_fits_any_plan() -> None:
    for context in (256, 4096, LONG, 1 << 24):
        made = config(max_outputs=128, max_num_seqs=4096, max_num_batched_tokens=1 << 20)
        most = max_plan_bytes(made, context) - columns_bytes(made)
        assert largest_request_bytes(made, context) <= largest_admission_bytes(made, context) <= most


def largest_request_bytes(made: EngineConfig, context: int) -> int:
    spec = request(
        [1],
        context - 1,
        presence_penalty=1.0,
        logit_bias_ids=bytes(4 * limits.MAX_LOGIT_BIAS),
        logit_bias_values=bytes(4 * limits.MAX_LOGIT_BIAS),
        bad_words=((1,) * limits.MAX_BAD_WORD_TOKENS,) * limits.MAX_BAD_WORD_SEQUENCES,
        token_ids=frozenset(range(limits.MAX_STOP_TOKEN_IDS)),
    )
    return most_admission_bytes(spec, SequenceBlocks(made.block_size))


def test_columns_fit_their_part_when_every_row_copies_and_grows() -> None:
    """The worker asserts it."""
    harness = Harness(max_num_seqs=16, max_num_batched_tokens=16, max_outputs=16)
    reader = harness.add(request(20, 40, n=16))
    harness.run()
    assert len(reader.ends) == 16 and harness.worker.num_copies >= 15


def test_a_request_that_fits_no_plan_is_refused_when_it_comes() -> None:
    harness = Harness(plan_bytes=columns_bytes(config()) + 1024)
    fits = harness.add(request(60, 8, presence_penalty=0.5))
    with pytest.raises(
        RequestRefused, match=r"spec: an output of it may take \d+ bytes .* the limit is 1024"
    ) as refused:
        harness.add(request(200, 8, presence_penalty=0.5))
    assert refused.value.code is RefusalCode.RESOURCE_EXHAUSTED
    # Without a history its prompt is no part of an admission.
    without = harness.add(request(200, 8))
    harness.run()
    assert fits.ends[0].reason is without.ends[0].reason is EndReason.LENGTH


def test_a_request_that_fits_no_plan_of_a_new_worker_ends_alone() -> None:
    harness = Harness()
    long, short = harness.add(request(200, 50, presence_penalty=0.5)), harness.add(request(60, 50))
    harness.step()
    harness.plan_bytes = columns_bytes(harness.config) + 1024
    harness.engine.worker_lost()
    harness.worker = harness.new_worker()
    harness.engine.worker_ready(harness.num_blocks, plan_bytes=harness.plan_bytes)
    harness.run()
    assert long.ends[0].reason is EndReason.ERROR and "the limit is 1024" in long.ends[0].unfit
    assert short.ends[0].reason is EndReason.LENGTH


asked = st.fixed_dictionaries(
    {
        "shared": st.integers(0, 120),
        "own": st.integers(1, 30),
        "max_tokens": st.integers(1, 40),
        "n": st.integers(1, 4),
        "priority": st.integers(-2, 2),
        "penalty": st.booleans(),
        "biases": st.integers(0, 20),
        "words": st.integers(0, 6),
        "pause": st.integers(0, 10),
    }
)


@hypothesis.settings(max_examples=examples(100), deadline=None)
@hypothesis.given(
    st.integers(14, 40),
    st.sampled_from([16, 48, 200]),
    st.booleans(),
    st.integers(0, 500),
    st.lists(asked, min_size=2, max_size=10),
    st.sets(st.integers(1, 60), max_size=2),
)
def test_every_plan_fits_and_every_request_ends_with_its_tokens(
    num_blocks: int,
    token_budget: int,
    enable_prefix_cache: bool,
    spare_bytes: int,
    requests: list[dict[str, int]],
    deaths: set[int],
) -> None:
    """The worker asserts that plans fit the ring.

    They have room for the largest of these requests, and for a few more bytes.
    """
    changes = {"max_num_seqs": 10, "max_num_batched_tokens": token_budget, "ageing_s": 1e-6}
    made = config(**changes, enable_prefix_cache=enable_prefix_cache)
    arrivals = [
        (
            request(
                [5] * each["shared"] + prompt_of(each["own"]),
                min(each["max_tokens"], num_blocks * 16 + 1 - each["shared"] - each["own"]),
                n=each["n"],
                priority=each["priority"],
                seed=seed,
                presence_penalty=0.5 if each["penalty"] else 0.0,
                logit_bias_ids=np.arange(each["biases"], dtype=np.int32).tobytes(),
                logit_bias_values=bytes(4 * each["biases"]),
                bad_words=((seed % VOCAB_SIZE, *[1] * 40),) * each["words"],
            ),
            each["pause"],
        )
        for seed, each in enumerate(requests)
    ]
    room = max(most_admission_bytes(spec, SequenceBlocks(16)) for spec, _ in arrivals) + spare_bytes
    harness = Harness(
        num_blocks, plan_bytes=columns_bytes(made) + room, **changes, enable_prefix_cache=enable_prefix_cache
    )
    for spec, reader in harness.serve(arrivals, deaths):
        assert [reader.tokens[index] for index in range(spec.asked.n)] == [
            expected_tokens(spec, i) for i in range(spec.asked.n)
        ]
    # A worker that replaced one after the last step has seen no plan.
    assert deaths or harness.worker.largest_plan_bytes > 0


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(st.lists(asked, min_size=1, max_size=8))
def test_the_bytes_of_admissions_are_counted_to_the_byte(requests: list[dict[str, int]]) -> None:
    harness = Harness(max_num_seqs=32, max_num_batched_tokens=512)
    for seed, each in enumerate(requests):
        penalty = 0.5 if each["penalty"] else 0.0
        harness.add(request([5] * each["shared"] + [1], 4, n=each["n"], seed=seed % 2, presence_penalty=penalty))
    while harness.engine.has_work:
        plan = harness.engine.plan()
        if plan is not None:
            admissions, encoded = plan.admissions, plan.encode()
            counted = sum(map(admission_bytes, admissions, [None, *admissions]))
            assert column_bytes(plan) - 5 + counted <= len(encoded) <= column_bytes(plan) + counted
            assert StepPlan.decode(encoded).admissions == admissions
            assert StepPlan.step_id_of(encoded) == plan.step_id
            harness.worker.push(plan)
        harness.settle()
