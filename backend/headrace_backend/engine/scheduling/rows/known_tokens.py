"""Chunks of known tokens in the plan, and the outputs that begin where their prompt ends.

Outputs of a request share its prompt, which the first of them computes. The step that computes its
last token samples the first token of each, so there the others take their rows, and share the
blocks of the prompt.

Owns this beginning of outputs. Does not own the length of a chunk (`prompts`, `queue_admission`).
"""

from __future__ import annotations

from headrace_backend.engine.requests.sequence import Sequence
from headrace_backend.engine.scheduling.plan_builder import PlanBuilder
from headrace_backend.engine.scheduling.rows.batch import Batch
from headrace_backend.engine.scheduling.rows.worker_memory import WorkerMemory
from headrace_backend.engine.scheduling.waiting_queue import WaitingQueue


class KnownTokens:
    """Adds chunks to the plan, and with the last one of a prompt its other outputs."""

    __slots__ = ("_batch", "_kv", "_states", "_tables", "_waiting")

    def __init__(self, memory: WorkerMemory, batch: Batch, waiting: WaitingQueue) -> None:
        """Gives outputs rows of `batch`; those for which there is none go to `waiting`."""
        self._kv, self._tables, self._states = memory.kv, memory.tables, memory.states
        self._batch, self._waiting = batch, waiting

    def add(self, sequence: Sequence, count: int, builder: PlanBuilder, now_ns: int) -> None:
        """Has the step compute the next `count` tokens of a sequence, for which there is room."""
        if builder.add_known(sequence, count) and sequence.request.unforked:
            self._fork(sequence, builder, now_ns)

    def _fork(self, leader: Sequence, builder: PlanBuilder, now_ns: int) -> None:
        """The prompt's last token is in the step: the other outputs begin from it.

        Those for which there is no row, or no room in the plan, wait like any sequence.
        """
        batch, request = self._batch, leader.request
        siblings, request.unforked = request.unforked, []
        for sibling in siblings:
            rows = batch.next_rows(1)
            if not rows or not builder.admit(sibling, rows[0], len(leader.tables[0])):
                self._waiting.push(sibling)
                continue
            batch.take_row(sibling, now_ns)
            self._kv.fork(leader, sibling)
            self._states.note(leader, sibling)
            self._tables.write(sibling, builder)
            builder.add_fork(sibling)
