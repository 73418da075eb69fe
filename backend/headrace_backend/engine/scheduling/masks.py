"""Which masks planned steps wait for, and when each can be computed.

A row with a grammar draws from a mask. The mask of a draw needs every token before it, and a step
is planned before the step before it was read. So a plan only says that masks will follow, and the
job for them is ready when the tokens are known: at once for the first draw of an output, and
otherwise when the step before has settled. The forward pass runs meanwhile. Draws behind drafts
have masks of their own, each of which supposes that the drafts before it are right; so a job with
drafts also waits until the worker has reported them (`step.drafts`).

Owns the steps whose masks were not asked for yet. Does not compute anything: whoever drives the
engine takes the calls (`Engine.take_mask_calls`), has them computed, sends the workers the masks
and says so (`Engine.masks_filled`); which tokens must follow may be found later
(`Engine.masks_done`), even behind the step's result. Nothing here costs anything while no row has a
grammar.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence as AbstractSequence
from typing import Final, NamedTuple

from headrace_backend.engine.events import EndReason, OutputEnd
from headrace_backend.engine.output_grammar import MaskOutcome, MaskState, OutputGrammar
from headrace_backend.engine.requests.endings import Endings
from headrace_backend.engine.requests.sequence import Sequence
from headrace_backend.engine.scheduling.forced_search import ForcedSearch
from headrace_backend.engine.scheduling.in_flight_step import InFlightStep, MaskedDraw
from headrace_backend.step.drafts import StepDrafts
from headrace_request.rule_kinds import TOKEN_BYTES

# The next plan is to know what must follow where that is likely to be so many tokens for each mask:
# where it is less, waiting for the masks costs more steps than it saves.
_AWAITED_SHARE: Final = 0.1


class Bans(NamedTuple):
    """Tokens that a request bans at a draw with a mask.

    Workers do not draw them; the mask allows them all the same.
    """

    # Token sequences that are never completed, int32 little-endian.
    bad_words: tuple[bytes, ...]
    # The output's last tokens before the draw, as many as decide which of those may be completed.
    latest: bytes
    # Whether stop tokens are banned before `MaskJob.min_tokens`, since no mask decides on them.
    stops: bool


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
    # What is drafted behind the draw: each draft is followed by another draw.
    drafts: tuple[int, ...] = ()
    # None: all that the mask allows may be drawn.
    bans: Bans | None = None


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
        self._waiting: list[InFlightStep] = []
        # Drafts of steps that wait, and steps whose masks are being computed, by number.
        self._drafts: dict[int, list[int]] = {}
        self._computing: dict[int, InFlightStep] = {}
        # Calls that are being computed for the workers there are, and those of them that the next
        # plan is to know.
        self.num_computing = 0
        self._num_awaited = 0
        self._search = ForcedSearch()

    def planned(self, step: InFlightStep) -> None:
        """Notes the masked draws of a step that was planned."""
        self._search.note_computed(step.num_forced)
        if step.masked:
            self._waiting.append(step)

    def worker_lost(self) -> None:
        """Nothing that was asked for is of use any more."""
        self._life += 1
        self._waiting.clear()
        self._drafts.clear()
        self._computing.clear()
        self.num_computing = self._num_awaited = 0

    def take_drafts(self, drafts: StepDrafts, vocab_size: int) -> None:
        """Notes what a step verifies; of a step that waits for no masks any more it is of no use.

        Raises:
            ValueError: It is not what the step was planned with.
        """
        step = next((step for step in self._waiting if step.step_id == drafts.step_id), None)
        if step is None:
            return
        tokens = drafts.tokens
        if tokens.size != step.num_reported_drafts:
            raise ValueError(f"step {step.step_id}: {tokens.size} drafts are reported, not {step.num_reported_drafts}")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ValueError(f"step {step.step_id}: a draft is no token of the vocabulary")
        self._drafts[step.step_id] = tokens.tolist()

    def take_ready(self) -> list[MaskCall]:
        """Takes the calls of steps whose draws all have their tokens and drafts."""
        if not self._waiting:
            return []
        ready = [step for step in self._waiting if self._is_ready(step)]
        self._waiting = [step for step in self._waiting if step not in ready]
        calls = list(map(self._call, ready))
        self.num_computing += len(calls)
        self._num_awaited += sum(call.is_awaited for call in calls)
        return calls

    @property
    def are_awaited(self) -> bool:
        """Whether masks of a step in flight are likely to say what the next one is to compute.

        They are being computed, or wait for drafts alone.
        """
        if self._num_awaited or not self._waiting:
            return self._num_awaited > 0
        return any(step.num_reported_drafts and self._is_awaited(_asking(step)) for step in self._waiting)

    def is_current(self, call: MaskCall) -> bool:
        """Whether the workers that a call was made for still wait for it."""
        return call.life == self._life

    def filled(self, call: MaskCall, outcomes: list[MaskOutcome], now_ns: int) -> None:
        """Ends outputs that are whole or can't go on, also behind drafts that are right.

        The step's result was not read yet: what outputs that end draw in it is dropped.
        """
        if not self.is_current(call):
            return
        step = self._computing[call.step_id]
        for (sequence, position), outcome in zip(call.owners, outcomes, strict=True):
            if outcome.end is not None:
                step.ends[sequence] = (position + outcome.end.num_drafts, outcome.end.outcome)
            self._end_unless_it_goes_on(sequence, outcome, now_ns)

    def done(self, call: MaskCall, outcomes: list[MaskOutcome], now_ns: int) -> None:
        """Notes what must follow, as far as was looked; the step's result may be there already.

        An output whose grammar failed over that ends.
        """
        if not self.is_current(call):
            return
        self.num_computing -= 1
        self._num_awaited -= call.is_awaited
        step = self._computing.pop(call.step_id)
        for job, (sequence, position), outcome in zip(call.jobs, call.owners, outcomes, strict=True):
            if self._end_unless_it_goes_on(sequence, outcome, now_ns):
                sequence.note_given(position, outcome.forced)
                sequence.next_masked = max(sequence.next_masked, outcome.next_masked)
                if job.drafts and not sequence.ended:
                    _note_certain(step, sequence, job.drafts, outcome.forced or ())

    def _end_unless_it_goes_on(self, sequence: Sequence, outcome: MaskOutcome, now_ns: int) -> bool:
        """Ends an output of which its grammar says so; returns whether it has a next token."""
        if outcome.state in (MaskState.MASKED, MaskState.OPEN):
            return True
        if not sequence.ended:
            self._endings.end_output(sequence, grammar_end(sequence, outcome), now_ns)
        return False

    def _is_awaited(self, asking: list[MaskedDraw]) -> bool:
        return not self._search.is_paused(_num_looking(asking)) and _are_awaited(asking)

    def _is_ready(self, step: InFlightStep) -> bool:
        has_drafts = not step.num_reported_drafts or step.step_id in self._drafts
        return all([_is_ready(draw, has_drafts) for draw in step.masked])

    def _call(self, step: InFlightStep) -> MaskCall:
        self._computing[step.step_id] = step
        drafts = self._drafts.pop(step.step_id, [])
        asking = _asking(step)
        searches = self._search.begins(_num_looking(asking))
        jobs = [_job(draw, drafts, searches) for draw in asking]
        owners = [(draw.sequence, draw.position) for draw in asking]
        return MaskCall(step.step_id, self._life, jobs, owners, searches and _are_awaited(asking))


def grammar_end(sequence: Sequence, outcome: MaskOutcome) -> OutputEnd:
    """The end of an output that is whole, or can't go on."""
    reason = EndReason.STOP if outcome.state is MaskState.COMPLETE else EndReason.ERROR
    return OutputEnd(sequence.log.output_index, reason, error=outcome.error, broken=outcome.broken)


def num_certain(forced: AbstractSequence[int], drafts: AbstractSequence[int]) -> int | None:
    """Draws of an entry that will be settled, where all of them must come; None: who knows.

    Args:
        forced: Tokens that must be drawn, from the entry's first draw on.
        drafts: What the entry computes behind its first token.
    """
    for index, token in enumerate(forced):
        if index == len(drafts) or drafts[index] != token:
            return index + 1
    return None


def _note_certain(
    step: InFlightStep, sequence: Sequence, drafts: tuple[int, ...], forced: AbstractSequence[int]
) -> None:
    """Notes what a step settles for sure, unless its result says so already.

    Behind tokens that must come nobody has to wait for the result to know how many of them were
    drafted: the next step is planned with those that are left.
    """
    num_settled = num_certain(forced, drafts)
    if num_settled is not None and sequence in step.unsure:
        num_unsettled = 1 + len(drafts) - num_settled
        step.forgotten[sequence] = num_unsettled
        sequence.forget_unsettled(num_unsettled)
        sequence.num_unsure_steps -= 1
        step.unsure.remove(sequence)


def _is_ready(draw: MaskedDraw, has_drafts: bool) -> bool:
    sequence = draw.sequence
    if sequence.ended:
        return True
    is_known = max(len(sequence.tokens), sequence.num_given) >= draw.position
    return is_known and (has_drafts or not draw.num_drafts)


def _asking(step: InFlightStep) -> list[MaskedDraw]:
    return [draw for draw in step.masked if not draw.sequence.ended]


def _num_looking(asking: list[MaskedDraw]) -> int:
    """Draws of which it is of use to know what must come behind them."""
    return sum([draw.sequence.skips_forced for draw in asking])


def _are_awaited(asking: list[MaskedDraw]) -> bool:
    """Whether the next plan is to wait, as enough tokens are likely to be ones that must follow."""
    looking = [draw.sequence.forced_rate for draw in asking if draw.sequence.skips_forced]
    return bool(looking) and sum(looking) >= _AWAITED_SHARE * len(asking)


def _job(draw: MaskedDraw, drafts: list[int], searches: bool) -> MaskJob:
    sequence, position = draw.sequence, draw.position
    assert sequence.grammar is not None, "only rows with a grammar have masks"
    # What must come before the draw its grammar knows already.
    first = min(sequence.num_given, position)
    return MaskJob(
        draw.sample,
        sequence.grammar,
        first,
        sequence.tokens[first:position],
        sequence.stop_token_ids,
        sequence.min_tokens,
        searches and sequence.skips_forced,
        tuple(drafts[draw.first_draft : draw.first_draft + draw.num_drafts]),
        _bans(sequence, position),
    )


def _bans(sequence: Sequence, position: int) -> Bans | None:
    spec = sequence.request.spec
    assert spec.grammar is not None, "only rows with a grammar have masks"
    words = spec.asked.sampling.bad_words
    stops = sequence.min_tokens > 0 and not spec.grammar.decides_ends
    if not words and not stops:
        return None
    num_latest = max([len(word) // TOKEN_BYTES - 1 for word in words], default=0)
    return Bans(words, sequence.tokens[max(position - num_latest, 0) : position].tobytes(), stops)
