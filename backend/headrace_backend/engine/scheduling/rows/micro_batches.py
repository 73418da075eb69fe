"""Deals rows that decode out to steps, so that pipeline stages compute at the same time.

A row's next token can be computed once its last one is drawn, behind the last stage. So with one
step for all rows the stages would work one after the other. With as many steps in flight as there
are stages, each with a part of the rows (a micro-batch), every stage has one to compute:

    stage 0    rows A   rows B   rows A   rows B
    stage 1             rows A   rows B   rows A
                            A's tokens are drawn, and go to stage 0

Owns the choice of rows. Prompts need no such choice: a chunk waits for nothing that is drawn, so
the chunks of one prompt follow each other from stage to stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from collections.abc import Set as AbstractSet

from headrace_backend.engine.requests.sequence import Sequence
from headrace_backend.engine.scheduling.in_flight_step import InFlightStep

_NOBODY: AbstractSet[Sequence] = frozenset()
# Unread tokens of a row at which it is planned no further: what comes behind a token at which it
# ends is computed for nothing, and keeps others waiting.
_MOST_UNREAD = 2


class MicroBatches:
    """The rows of each step, where there are several pipeline stages."""

    __slots__ = ("_num_stages",)

    def __init__(self, num_stages: int) -> None:
        """With one stage every step has all rows."""
        self._num_stages = num_stages

    def passed_over(
        self, running: Iterable[Sequence], in_flight: AbstractSequence[InFlightStep]
    ) -> AbstractSet[Sequence]:
        """The sequences that could decode in the next step and are left to later ones.

        Args:
            running: All that have a row, most urgent first.
            in_flight: Steps that were planned and not settled, in order.
        """
        if self._num_stages == 1:
            return _NOBODY
        decoding = [sequence for sequence in running if sequence.decodes and not sequence.completing]
        return set(decoding).difference(self._chosen(decoding, in_flight))

    def _chosen(self, decoding: list[Sequence], in_flight: AbstractSequence[InFlightStep]) -> list[Sequence]:
        """An even share of the rows, of those that waited longest first.

        Rows of the steps that other stages are still at are taken only if there are no others: then
        there is too little to do for all stages, and the host at least is not waited for.
        """
        num_latest = min(self._num_stages - 1, len(in_flight))
        ready = decoding
        if num_latest:
            first_id = in_flight[-num_latest].step_id
            ready = [sequence for sequence in decoding if sequence.planned_in < first_id]
        ready = ready or [sequence for sequence in decoding if sequence.num_unread < _MOST_UNREAD]
        share = -(-len(decoding) // self._num_stages)
        return sorted(ready, key=_planned_in)[:share]


def _planned_in(sequence: Sequence) -> int:
    return sequence.planned_in
