"""Whatever happens in whatever order, no token is computed behind another sequence's state.

Few checkpoints and few tokens between them, so that they are displaced, moved and dropped.
"""

from __future__ import annotations

import random

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant
from tests.engine.stateful_worker import StatefulHarness
from tests.engine.test_engine_state_machine import MAX_LEN, Asked, EngineMachine
from tests.support.examples import examples

from headrace_backend.engine.scheduling import checkpoint_places, prefix_followers


class CheckpointMachine(EngineMachine):
    """What the engine's machine does, with states."""

    @initialize(
        num_blocks=st.integers(6, 14),
        num_rows=st.integers(1, 6),
        budget=st.sampled_from([16, 17, 40, 200]),
        num_checkpoints=st.integers(0, 7),
        least_shared=st.sampled_from([16, 128]),
        least_stop=st.sampled_from([16, 32]),
        least_move=st.sampled_from([16, 32]),
        pp=st.sampled_from([1, 1, 2, 4]),
    )
    def start(
        self,
        num_blocks: int,
        num_rows: int,
        budget: int,
        num_checkpoints: int,
        least_shared: int,
        least_stop: int,
        least_move: int,
        pp: int,
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prefix_followers, "LEAST_SHARED_TOKENS", least_shared)
        self.patch.setattr(checkpoint_places, "LEAST_STOP_TOKENS", least_stop)
        self.patch.setattr(checkpoint_places, "LEAST_MOVE_TOKENS", least_move)
        self.harness = StatefulHarness(
            num_blocks,
            num_checkpoints,
            model_len=MAX_LEN,
            max_num_seqs=num_rows,
            max_num_batched_tokens=budget,
            max_outputs=4,
            ageing_s=1e-5,
            tokens_per_row=self.tokens_per_row,
            # Stages verify no drafts.
            pp=pp if self.tokens_per_row is None else 1,
        )
        self.harness.choose_count = self.choose_count
        self.engine = self.harness.engine
        self.num_rows = num_rows
        self.asked: list[Asked] = []

    @invariant()
    def only_rows_have_something_to_keep(self) -> None:
        parts = self.engine._scheduler._parts
        if parts is not None and (places := parts.memory.places) is not None:
            assert set(places._ways) <= set(self.engine._scheduler.batch.running), "who has no row has no way"
            assert set(places._checkpoints._written) <= set(places._ways), "what is written is for who runs"


class DraftedCheckpointMachine(CheckpointMachine):
    """What the machine does with states, where steps verify drafts, any number of them right."""

    tokens_per_row = 5

    @initialize(draws=st.randoms(use_true_random=False))
    def begin_to_draw(self, draws: random.Random) -> None:
        self.draws = draws

    def choose_count(self, most: int) -> int:
        return self.draws.randint(1, most)


TestCheckpointMachine = CheckpointMachine.TestCase
TestCheckpointMachine.settings = hypothesis.settings(
    max_examples=examples(200),
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)
TestDraftedCheckpointMachine = DraftedCheckpointMachine.TestCase
TestDraftedCheckpointMachine.settings = TestCheckpointMachine.settings
