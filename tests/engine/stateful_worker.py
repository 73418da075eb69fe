"""A worker without a model whose rows keep states, and an engine with it.

A row's state is the chain over all tokens that it computed, as their KV is, but it lies in the line
of the row, whatever the block tables say. A token that is computed behind another state than the
one before it shows at once: a copy that is missing, late, or of a line that holds something else.
"""

from __future__ import annotations

from typing import Any

from tests.engine.fake_worker import VOCAB_SIZE, FakeWorker, Row
from tests.engine.harness import EOS, Harness

from headrace_backend.engine.request import ModelLimits
from headrace_backend.step.plan import StepPlan
from headrace_backend.step.plan_bytes import columns_bytes


class StatefulWorker(FakeWorker):
    """Rows have states, and so have checkpoints."""

    def __init__(self, *sizes: int, num_checkpoints: int) -> None:
        super().__init__(*sizes)
        # None: nothing that a token may be computed behind.
        self.states: list[int | None] = [None] * (self.num_rows + 1 + num_checkpoints)
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

    def _forward(self, plan: StepPlan) -> list[tuple[Row, int]]:
        forward = plan.forward
        entries = list(zip(forward.rows.tolist(), forward.starts.tolist(), forward.counts.tolist(), strict=True))
        for row, start, _ in entries:
            if start:
                assert self.states[row] == self._read(self.rows[row], start - 1), "a token is behind another state"
        hidden = super()._forward(plan)
        for row, start, count in entries:
            self.states[row] = self._read(self.rows[row], start + count - 1)
        return hidden


class StatefulHarness(Harness):
    """An engine of a model with recurrent layers."""

    worker: StatefulWorker

    def __init__(self, num_blocks: int = 64, num_checkpoints: int = 8, **changes: Any) -> None:
        super().__init__(num_blocks, num_checkpoints=num_checkpoints, **changes)

    def model_limits(self, model_len: int, attention_window: int | None) -> ModelLimits:
        return ModelLimits(VOCAB_SIZE, model_len, (EOS,), attention_window, self.groups, keeps_states=True)

    def new_worker(self) -> StatefulWorker:
        config = self.config
        sizes = (self.num_blocks, config.block_size, config.max_num_batched_tokens, config.max_num_seqs)
        worker = StatefulWorker(*sizes, num_checkpoints=self.num_checkpoints)
        worker.plan_bytes, worker.column_bytes = self.plan_bytes, columns_bytes(config)
        return worker
