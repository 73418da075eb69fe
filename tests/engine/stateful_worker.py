"""Workers without a model whose rows keep states, and an engine with one.

A row's state is the chain over all tokens that it computed, as their KV is, but it lies in the line
of the row, whatever the block tables say. A token that is computed behind another state than the
one before it shows at once: a copy that is missing, late, or of a line that holds something else.
What a step that verifies drafts leaves can be continued behind each token that it settles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.engine.drafting_worker import DraftingWorker
from tests.engine.fake_worker import VOCAB_SIZE, FakeWorker, Row
from tests.engine.harness import EOS, Harness

from headrace_backend.engine.request import ModelLimits
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_backend.step.plan_bytes import columns_bytes


class States(FakeWorker):
    """What a worker is whose rows have states, as have checkpoints."""

    def keep_states(self, num_checkpoints: int) -> None:
        """Begins with lines that hold nothing."""
        # Of each line the chains behind which a token may be computed, by the number of tokens.
        self.states: list[dict[int, int]] = [{}] * (self.num_rows + 1 + num_checkpoints)
        # Lines that were read into others, in order.
        self.copied: list[tuple[int, int]] = []

    def _copy_blocks(self, plan: StepPlan) -> None:
        super()._copy_blocks(plan)
        sources, targets = plan.forward.state_sources.tolist(), plan.forward.state_targets.tolist()
        assert len(set(targets)) == len(targets), "a state is written twice in one step"
        assert self.num_rows not in (*sources, *targets), "the scratch line is nobody's"
        read = [self.states[source] for source in sources]
        for target, state in zip(targets, read, strict=True):
            self.states[target] = state
        self.copied += zip(sources, targets, strict=True)

    def _check_state(self, row: int, start: int) -> None:
        assert not start or self.states[row].get(start) == self._read(self.rows[row], start - 1), (
            "a token is behind another state"
        )

    def _leave_state(self, row: int, first: int, end: int) -> None:
        """A step leaves a state that goes on behind so many tokens, `first` up to `end`."""
        self.states[row] = {count: self._read(self.rows[row], count - 1) for count in range(first, end + 1)}


class StatefulWorker(States):
    """Computes a token of each row that decodes."""

    def _forward(self, plan: StepPlan) -> list[tuple[Row, int]]:
        forward = plan.forward
        entries = list(zip(forward.rows.tolist(), forward.starts.tolist(), forward.counts.tolist(), strict=True))
        for row, start, _ in entries:
            self._check_state(row, start)
        hidden = super()._forward(plan)
        for row, start, count in entries:
            self._leave_state(row, start + count, start + count)
        return hidden


class StatefulDraftingWorker(States, DraftingWorker):
    """Verifies drafts of rows that decode."""

    def _forward(self, plan: StepPlan) -> list[tuple[Row, int]]:
        forward = plan.forward
        columns = (forward.rows, forward.starts, forward.counts, forward.known_counts)
        # Of rows that decode the tokens before the step, whose plans say how many at most.
        self._decoding: dict[int, int] = {}
        ends: dict[int, int] = {}
        for row, start, count, num_known in zip(*(column.tolist() for column in columns), strict=True):
            exact = start if num_known else self.rows[row].num_computed
            assert exact is not None, "whoever decodes has computed its prompt"
            self._check_state(row, exact)
            if num_known:
                ends[row] = start + count
            else:
                self._decoding[row] = exact
        hidden = super()._forward(plan)
        for row, end in ends.items():
            self._leave_state(row, end, end)
        return hidden

    def _sample(self, plan: StepPlan, hidden: list[tuple[Row, int]]) -> StepResult:
        result = super()._sample(plan, hidden)
        for row, start in self._decoding.items():
            end = self.rows[row].num_computed
            assert end is not None and end > start, "a step settles a token of each row at least"
            self._leave_state(row, start + 1, end)
        return result


class StatefulHarness(Harness):
    """An engine of a model with recurrent layers."""

    worker: States

    def __init__(self, num_blocks: int = 64, num_checkpoints: int = 8, **changes: Any) -> None:
        super().__init__(num_blocks, num_checkpoints=num_checkpoints, **changes)

    def model_limits(self, model_len: int, attention_window: int | None) -> ModelLimits:
        return ModelLimits(VOCAB_SIZE, model_len, (EOS,), attention_window, self.groups, keeps_states=True)

    def new_worker(self) -> States:
        config = self.config
        sizes = (self.num_blocks, config.block_size, config.max_num_batched_tokens, config.max_num_seqs)
        choose_count: Callable[[int], int] = lambda most: self.choose_count(most)  # noqa: E731
        drafts = self.tokens_per_row is not None
        worker = StatefulDraftingWorker(*sizes, choose_count) if drafts else StatefulWorker(*sizes)
        worker.keep_states(self.num_checkpoints)
        worker.plan_bytes, worker.column_bytes = self.plan_bytes, columns_bytes(config)
        return worker
