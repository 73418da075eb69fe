"""Which masks planned steps wait for, and when each can be computed.

A row with a grammar draws from a mask. The mask of a draw needs every token before it, and a step
is planned before the step before it was read. So a plan only says that masks will follow, and the
job for them is ready when the tokens are known: at once for the first draw of an output, and
otherwise when the step before has settled. The forward pass runs meanwhile.

Owns the steps whose masks were not asked for yet. Does not compute anything: whoever drives the
engine takes the calls (`Engine.take_mask_calls`), has them computed, sends the workers what came of
them, and says so (`Engine.masks_done`). Nothing here costs anything while no row has a grammar.
"""

from __future__ import annotations

import dataclasses
from array import array
from typing import Final, NamedTuple

from headrace_backend.engine.events import EndReason, OutputEnd
from headrace_backend.engine.output_grammar import MaskOutcome, MaskState, OutputGrammar
from headrace_backend.engine.requests.endings import Endings
from headrace_backend.engine.requests.sequence import Sequence
from headrace_backend.engine.scheduling.plan_builder import InFlightStep, MaskedDraw

# The next plan is to know what must follow where that is likely to be so many tokens for each mask:
# where it is less, waiting for the masks costs more steps than it saves.
_AWAITED_SHARE: Final = 0.1


class MaskJob(NamedTuple):
    """One draw's mask, to be computed from the tokens before it."""

    # Which sample of the step draws from it.
    sample: int
    grammar: OutputGrammar
    # Tokens of the output from index `first` on, up to the draw's position; those before `first`
    # the grammar has been given before.
    first: int
    tokens: array[int]
    # Tokens that end the output where the grammar may end.
    stop_token_ids: frozenset[int]
    # Tokens that the output must have before they may.
    min_tokens: int
    # Whether it is of use to know which tokens must follow.
    looks_ahead: bool


@dataclasses.dataclass(slots=True, eq=False)
class MaskCall:
    """All masks of one step."""

    step_id: int
    # Counts lives of workers: what was asked for in an earlier one is of no use.
    life: int
    jobs: list[MaskJob]
    # In the order of the jobs: whose they are, and the positions of their draws.
    owners: list[tuple[Sequence, int]]
    # Whether enough tokens are likely to turn out as what must follow for the next plan to wait.
    is_awaited: bool


class Masks:
    """The masks that planned steps wait for."""

    def __init__(self, endings: Endings) -> None:
        """Nothing is waited for."""
        self._endings = endings
        self._life = 0
        self._waiting: list[tuple[int, list[MaskedDraw]]] = []
        # Calls that are being computed for the workers there are, and those of them that the next
        # plan is to know.
        self.num_computing = 0
        self.num_awaited = 0

    def planned(self, step: InFlightStep) -> None:
        """Notes the masked draws of a step that was planned."""
        if step.masked:
            self._waiting.append((step.step_id, step.masked))

    def worker_lost(self) -> None:
        """Nothing that was asked for is of use any more."""
        self._life += 1
        self._waiting.clear()
        self.num_computing = self.num_awaited = 0

    def take_ready(self) -> list[MaskCall]:
        """Takes the calls of steps whose draws all have their tokens."""
        if not self._waiting:
            return []
        ready = [step for step in self._waiting if all(map(_is_ready, step[1]))]
        self._waiting = [step for step in self._waiting if step not in ready]
        calls = [self._call(step_id, draws) for step_id, draws in ready]
        self.num_computing += len(calls)
        self.num_awaited += sum(call.is_awaited for call in calls)
        return calls

    def is_current(self, call: MaskCall) -> bool:
        """Whether the workers that a call was made for still wait for it."""
        return call.life == self._life

    def done(self, call: MaskCall, outcomes: list[MaskOutcome], now_ns: int) -> None:
        """Notes what is known of outputs, and ends those that are whole or whose grammar failed.

        What outputs that end draw now is dropped.
        """
        if not self.is_current(call):
            return
        self.num_computing -= 1
        self.num_awaited -= call.is_awaited
        for (sequence, position), outcome in zip(call.owners, outcomes, strict=True):
            if outcome.state in (MaskState.MASKED, MaskState.OPEN):
                sequence.note_given(position, outcome.forced)
                sequence.next_masked = max(sequence.next_masked, outcome.next_masked)
            elif not sequence.ended:
                reason = EndReason.STOP if outcome.state is MaskState.COMPLETE else EndReason.ERROR
                end = OutputEnd(sequence.log.output_index, reason, error=outcome.error)
                self._endings.end_output(sequence, end, now_ns)

    def _call(self, step_id: int, draws: list[MaskedDraw]) -> MaskCall:
        asking = [draw for draw in draws if not draw.sequence.ended]
        jobs, owners = list(map(_job, asking)), [(draw.sequence, draw.position) for draw in asking]
        looking = [draw.sequence.forced_rate for draw in asking if draw.sequence.skips_forced]
        is_awaited = bool(looking) and sum(looking) >= _AWAITED_SHARE * len(jobs)
        return MaskCall(step_id, self._life, jobs, owners, is_awaited)


def _is_ready(draw: MaskedDraw) -> bool:
    sequence = draw.sequence
    return sequence.ended or max(len(sequence.tokens), sequence.num_given) >= draw.position


def _job(draw: MaskedDraw) -> MaskJob:
    sequence = draw.sequence
    assert sequence.grammar is not None, "only rows with a grammar have masks"
    # What must come before the draw its grammar knows already.
    first = min(sequence.num_given, draw.position)
    return MaskJob(
        draw.sample,
        sequence.grammar,
        first,
        sequence.tokens[first : draw.position],
        sequence.stop_token_ids,
        sequence.min_tokens,
        sequence.skips_forced,
    )
