"""How many drafts each row has verified in a step.

Owns the choice, by what drafts bring (each row's `Acceptance`) and what they cost (`step_time`).
Does not own room for them, in blocks or in the request (`scheduler`), nor what is drafted (the
worker). Pure: no clock.

A row whose drafts are accepted with probability p settles 1 + p + p^2 + ... + p^K tokens of a step
with K drafts. So the k-th draft of a row brings p^k tokens, and costs what one token more costs in
this step; drafts of all rows are taken in the order of what they bring, as far as they raise the
step's tokens per second. A step that reads the weights for few rows has room for drafts; where
products are bound by arithmetic they cost what they bring, and none are taken. Steps are padded to
sizes of graphs, so their time grows in steps, and totals that fill a graph are weighed too: of rows
that are alike, some then have a draft more than others.

- **Forms of outputs.** Each draft of a row with a form wants a mask more, which costs the host what
  `step_time` has learned: nothing where masks are there before the pass ends.
- **A row that misses** gets no more drafts, but a probe now and then, of one draft, before which
  half of what is known of it is forgotten. Probes are paid by what such steps turned out to take: a
  draft model may have to catch up with many steps of a row first, so where probes take long few
  rows are probed at once.
- **A new row** begins with a little less than what is usual for all, or a half where that is less:
  so a large batch of new rows tries a few drafts of each first. What is usual is one opinion, and
  not one of each new row of a step, so their first results together outweigh it.
- **First drafts and probes** take 0.5% of the time: a purse gains it, and pays for probes and for
  the drafts of new rows whose first result is that they miss. So behind such rows the next probe is
  later; and while the purse owes much, new rows begin with what is usual, however little that is,
  until probes find that it has changed or enough is saved up.
- **Costs are learned from contrast**: one in 64 steps has no drafts, and nobody drafts in the one
  before it, or nobody would see what either costs.
- **A step ahead.** The worker drafts at the end of the step before the one that verifies, so the
  plan of each step says how many drafts of a row the next one may have (`num_proposed`): a drafter
  whose drafts nobody wants need not run. What drafting takes counts in the step that drafts.

With a fixed number every row has as many, or as many as the token budget holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence as AbstractSequence
from typing import Final, NamedTuple

import numpy as np

from headrace_backend.engine.requests.acceptance import Acceptance, pooled_shares
from headrace_backend.engine.requests.sequence import Sequence
from headrace_backend.engine.scheduling.draft_costs import DraftCosts
from headrace_backend.engine.scheduling.step_time import StepLoad, StepTimeModel

# Drafts of its own that what is usual counts for in a new row, and what of a draft beside them
# failed.
_USUAL_WEIGHT: Final = 2.0
_DOUBT_WEIGHT: Final = 0.5
_USUAL_HALF_LIFE: Final = 256
# What a new row is expected to accept at least, and the weight of that: its first drafts cost a
# part of one step, and a row that repeats itself among rows that never do would wait for a probe.
_HOPED_SHARE: Final = 0.5
_HOPED_WEIGHT: Final = 1.0
# What counts as usual before anything was drafted: enough to try.
_FIRST_ACCEPTED: Final = 4.8
_FIRST_TRIED: Final = 8.0
# Shares are rounded to this, so that rows fall into few groups.
_GRAIN: Final = 0.04
# Time that probes and first drafts that miss may take, and what they may owe, in bare steps: a
# step that was held up by something else must not end them for good. Owing the second, new rows
# are hoped for no more: some ten batches of them have come in a row then, and missed.
_TRIED_SHARE: Final = 0.005
_MOST_DEBT: Final = 16
_HOPELESS_DEBT: Final = 8
# Weight of the last probes in what one takes longer than was thought; and rows that are probed at
# once, at most, before anything is known of that: each may have 2,000 tokens to catch up with.
_LATE_WEIGHT: Final = 0.25
_FIRST_PROBES: Final = 8
_STEPS_PER_CONTRAST: Final = 64
# Passes of a drafter that together take so little of a step are not weighed one by one.
_CHEAP_PASSES: Final = 0.01
# Share of accepted drafts, in grains, most drafts of a row, and whether a form restricts its draws.
_Kind = tuple[int, int, bool]


class DraftLengths:
    """Chooses the number of drafts of each row, step by step."""

    __slots__ = (
        "_fixed",
        "_late_us",
        "_model",
        "_most",
        "_num_choices",
        "_num_since_contrast",
        "_purse_us",
        "_usual",
        "num_probes",
        "num_proposed",
    )

    def __init__(self, model: StepTimeModel, fixed: int | None = None) -> None:
        """No worker drafts yet.

        Args:
            model: Knows what steps take.
            fixed: Drafts of each row in each step; None: as many as pay.
        """
        self._model = model
        self._fixed = fixed
        self._usual = Acceptance(_USUAL_HALF_LIFE, _FIRST_ACCEPTED, _FIRST_TRIED)
        self._num_choices = 0
        self.worker_ready(0)

    def worker_ready(self, most: int) -> None:
        """A worker that drafts at most so many tokens of a row in a step (0: none) takes over."""
        self._most = most
        self._num_since_contrast = 0
        # Time that they may take, in microseconds: a step's, to begin with.
        self._purse_us = math.inf
        # What a probe takes longer than is known of such drafts: a draft model may have to catch up
        # with many steps of its row first. None: there was no probe.
        self._late_us: float | None = None
        # Most drafts of a row in the step after the one chosen last.
        self.num_proposed = 0
        # Drafts of the step chosen last that are probes.
        self.num_probes = 0

    @property
    def drafts(self) -> bool:
        """Whether the worker drafts at all."""
        return self._most > 0

    def note(self, row: Acceptance, num_drafts: int, num_settled: int) -> None:
        """Notes that a step settled `num_settled` tokens of a row that had so many drafts.

        One that settled none had drafts that were of no use, like one whose drafts were all wrong.
        """
        if num_drafts:
            num_settled = max(num_settled, 1)
            if num_settled > 1:
                self._purse_us += row.staked_us
            row.staked_us = 0.0
            row.note(num_drafts, num_settled)
            self._usual.note(num_drafts, num_settled)

    def took(self, load: StepLoad, duration_us: float) -> None:
        """Charges probes with what a step of theirs alone took longer than was thought."""
        if not 0 < load.num_draft_tokens <= load.num_probes:
            return
        bare_us = self._model.predict_us(dataclasses.replace(load, num_draft_tokens=0))
        late_us = duration_us - self._model.predict_us(load)
        self._purse_us = min(max(self._purse_us - late_us, -_MOST_DEBT * bare_us), bare_us)
        each_us = min(max(late_us, 0.0), _MOST_DEBT * bare_us) / load.num_draft_tokens
        believed_us = each_us if self._late_us is None else self._late_us
        self._late_us = believed_us + _LATE_WEIGHT * (each_us - believed_us)

    def forced_pay(
        self, load: StepLoad, rows: AbstractSequence[Sequence], forced: AbstractSequence[tuple[Sequence, int]]
    ) -> bool:
        """Whether a step settles more tokens per second if rows compute tokens that must come.

        Such a row is computed as a prompt is, which takes another way through the device than rows
        that decode.

        Args:
            load: What the step computes beside these rows.
            rows: All rows behind which tokens must come.
            forced: The rows among them that would compute some, and how many.
        """
        without = dataclasses.replace(load, num_decodes=load.num_decodes + len(rows))
        without.context_tokens += sum([row.num_tokens for row in rows])
        computed = dict(forced)
        decoding = [row for row in rows if row not in computed]
        beside = dataclasses.replace(load, num_decodes=load.num_decodes + len(decoding))
        beside.context_tokens += sum([row.num_tokens for row in decoding])
        for row, count in forced:
            beside.add_chunk(row.num_tokens - 1, count + 1)
        num_settled = without.num_decodes + sum(computed.values())
        return num_settled * self._model.predict_us(without) > without.num_decodes * self._model.predict_us(beside)

    def choose(
        self,
        rows: AbstractSequence[Acceptance],
        limits: AbstractSequence[int],
        load: StepLoad,
        num_free: int,
        masked: AbstractSequence[bool] = (),
    ) -> list[int]:
        """Number of drafts of each row that decodes.

        Args:
            rows: What is known of the rows' drafts.
            limits: Most drafts that each row may have.
            load: The step without drafts.
            num_free: Tokens that the step has room for beyond `load`.
            masked: Whether a form restricts the draws of each row; empty: of none.
        """
        num_proposed = self.num_proposed
        self.num_probes = 0
        limits = [min(limit, self._most) for limit in limits]
        if self._fixed is not None:
            lengths = self._fixed_lengths(limits, num_free)
            self.num_proposed = min(self._fixed, self._most)
        else:
            lengths = self._auto_lengths(rows, limits, load, num_free, masked or [False] * len(rows))
        return [min(length, num_proposed) for length in lengths]

    def _fixed_lengths(self, limits: list[int], num_free: int) -> list[int]:
        assert self._fixed is not None, "the number is given"
        length = min(self._fixed, num_free // max(len(limits), 1))
        return [min(length, limit) for limit in limits]

    def _auto_lengths(
        self,
        rows: AbstractSequence[Acceptance],
        limits: list[int],
        load: StepLoad,
        num_free: int,
        masked: AbstractSequence[bool],
    ) -> list[int]:
        self._num_choices += 1
        if not rows:
            # Whoever joins in this step decodes in the next one.
            self.num_proposed = self._paying([Acceptance()], [self._most], StepLoad(1, 1), num_free, [False])[0]
            return []
        were_drafted = self.num_proposed > 0
        lengths = self._paying(rows, limits, load, num_free, masked)
        if were_drafted:
            self._stake(rows, [min(length, self.num_proposed) for length in lengths], load)
        self.num_proposed = 0 if self._is_contrast(max(lengths)) else max(lengths)
        probed = self._choose_probes(rows, limits, lengths, load, num_free, were_drafted)
        if were_drafted:
            self.num_probes = len(probed)
            for index in probed:
                lengths[index] = 1
                rows[index].doubt()
            for row, length in zip(rows, lengths, strict=True):
                row.drafted_in = self._num_choices if length else row.drafted_in
        elif probed:
            # The next step probes.
            self.num_proposed = max(self.num_proposed, 1)
        return lengths

    def _paying(
        self,
        rows: AbstractSequence[Acceptance],
        limits: AbstractSequence[int],
        load: StepLoad,
        num_free: int,
        masked: AbstractSequence[bool],
    ) -> list[int]:
        """The lengths with which the step settles most tokens per second."""
        costs = self._model.draft_costs_us(load)
        self._expect_usual([row for row in rows if not row.tried], costs.bare_us)
        known = zip((pooled_shares(rows) / _GRAIN).round().astype(int).tolist(), limits, masked, strict=True)
        kinds: list[_Kind] = list(known)
        best = _best_lengths(Counter(kinds), costs, len(rows), num_free)
        lengths = [best.of_kind[kind] for kind in kinds]
        if best.num_longer:
            longer = [index for index, kind in enumerate(kinds) if kind == best.longer_kind][: best.num_longer]
            for index in longer:
                lengths[index] += 1
        return lengths

    def _expect_usual(self, new: AbstractSequence[Acceptance], bare_us: float) -> None:
        """Lets new rows begin with what is usual for all, or with a hope that soon gives way."""
        if self._usual.share < _HOPED_SHARE and self._purse_us >= -_HOPELESS_DEBT * bare_us:
            share, weight = _HOPED_SHARE, _HOPED_WEIGHT
        else:
            weight = _USUAL_WEIGHT + _DOUBT_WEIGHT
            share = self._usual.share * _USUAL_WEIGHT / weight
        for row in new:
            row.expect(share, weight / len(new))

    def _stake(self, rows: AbstractSequence[Acceptance], lengths: list[int], load: StepLoad) -> None:
        """Pays for this step's drafts of rows of which no result is known.

        A row that hits with its first result gets its part back.
        """
        others = [0 if row.is_new else length for row, length in zip(rows, lengths, strict=True)]
        staking = [row for row, length in zip(rows, lengths, strict=True) if row.is_new and length]
        if not staking:
            return
        costs = self._model.draft_costs_us(load)
        with_us, without_us = (float(costs.step_us(sum(each), max(each))) for each in (lengths, others))
        self._purse_us = max(self._purse_us - (with_us - without_us), -_MOST_DEBT * costs.bare_us)
        for row in staking:
            row.staked_us += (with_us - without_us) / len(staking)

    def _is_contrast(self, num_wanted: int) -> bool:
        """Whether the next step has no drafts although some would pay."""
        self._num_since_contrast = self._num_since_contrast + 1 if num_wanted else 0
        if self._num_since_contrast < _STEPS_PER_CONTRAST:
            return False
        self._num_since_contrast = 0
        return True

    def _choose_probes(
        self,
        rows: AbstractSequence[Acceptance],
        limits: list[int],
        lengths: list[int],
        load: StepLoad,
        num_free: int,
        spends: bool,
    ) -> list[int]:
        """Rows without drafts that get one, those first that had none for longest.

        They are as many as the time saved up for probes pays, which goes if `spends`.
        """
        idle = [index for index, limit in enumerate(limits) if limit and not lengths[index]]
        costs = self._model.draft_costs_us(load)
        num_drafts, num_passes = sum(lengths), max(lengths)
        step_us = float(costs.step_us(num_drafts, num_passes))
        self._purse_us = min(self._purse_us + _TRIED_SHARE * step_us, step_us)
        num_room = min(len(idle), num_free - num_drafts)
        if num_room <= 0:
            return []
        first_us = float(costs.step_us(num_drafts + 1, max(num_passes, 1))) - step_us
        all_us = float(costs.step_us(num_drafts + num_room, max(num_passes, 1))) - step_us
        late_us = step_us / _FIRST_PROBES if self._late_us is None else self._late_us
        # Enough of them that a pass made for them alone is half of their cost at most; more than a
        # step is never saved up.
        least_us = max(min(all_us, 2 * first_us), first_us + late_us)
        if self._purse_us < min(least_us, step_us):
            return []
        each_us = max((all_us - first_us) / max(num_room - 1, 1) + late_us, 1e-9)
        num_probes = min(num_room, 1 + int(max(self._purse_us - first_us - late_us, 0.0) / each_us))
        if spends:
            self._purse_us -= first_us + (num_probes - 1) * (each_us - late_us)
        return sorted(idle, key=lambda index: rows[index].drafted_in)[:num_probes]


class _Lengths(NamedTuple):
    """Drafts of rows by their kinds; some rows of one kind have one more."""

    of_kind: dict[_Kind, int]
    longer_kind: _Kind | None = None
    num_longer: int = 0


def _best_lengths(counts: Counter[_Kind], costs: DraftCosts, num_rows: int, num_free: int) -> _Lengths:
    """The drafts of a row of each kind with which a step settles most tokens per second.

    Where drafts under a form cost a mask more, those of other rows are weighed alone too.

    Args:
        counts: Rows of each kind.
        costs: What the step takes.
        num_rows: Rows that settle a token without drafts.
        num_free: Most drafts of all rows.
    """
    none = _Lengths(dict.fromkeys(counts, 0))
    best_rate, best = num_rows / costs.bare_us, none
    groups = [counts]
    if costs.masked_us and len({is_masked for *_, is_masked in counts}) > 1:
        groups.append(Counter({kind: count for kind, count in counts.items() if not kind[2]}))
    for group in groups:
        rate, lengths = _best_of(group, costs, num_rows, num_free)
        if rate > best_rate:
            best_rate, best = rate, lengths._replace(of_kind=none.of_kind | lengths.of_kind)
    return best


def _best_of(counts: Counter[_Kind], costs: DraftCosts, num_rows: int, num_free: int) -> tuple[float, _Lengths]:
    """The best drafts of rows of these kinds, and the tokens per microsecond with them.

    Drafts are taken in the order of what they bring, all that a kind's rows have at a place
    together, or as many of them as fill a graph of the device. Arguments as those of
    `_best_lengths`.
    """
    lengths = dict.fromkeys(counts, 0)
    drafts = sorted(
        [
            (-((share * _GRAIN) ** position), is_masked, position, share, limit)
            for share, limit, is_masked in counts
            if share
            for position in range(1, limit + 1)
        ]
    )
    if not drafts:
        return 0.0, _Lengths(lengths)
    kinds = [(share, limit, is_masked) for _, is_masked, _, share, limit in drafts]
    brings, positions = -np.array([draft[0] for draft in drafts]), np.array([draft[2] for draft in drafts])
    sizes, are_masked = np.array([counts[kind] for kind in kinds]), np.array([draft[1] for draft in drafts])
    most = int(positions.max())
    # Where passes cost hardly anything, no row's drafts are in the way of another's. Elsewhere each
    # number of passes is a choice of its own: [num_depths, num_drafts].
    weighed = most * costs.pass_us > _CHEAP_PASSES * costs.bare_us
    depths = np.arange(1, most + 1)[:, None] if weighed else np.array([[most]])
    taken = np.where(positions <= depths, sizes, 0)
    ends, tokens = taken.cumsum(axis=1), num_rows + (taken * brings).cumsum(axis=1)
    masks = (taken * are_masked).cumsum(axis=1)
    passes = np.maximum.accumulate(np.where(taken, positions, 0), axis=1)
    # Totals that fill a graph end within a group of drafts: [num_depths, num_graphs], their places
    # in the order, and how many of the group are left out.
    full = costs.full_counts
    lasts = np.minimum((ends[:, :, None] < full).sum(axis=1), len(drafts) - 1)
    left_out = np.take_along_axis(ends, lasts, 1) - full
    totals = np.concatenate((ends, np.where(left_out > 0, full, num_free + 1)), axis=1)
    tokens = np.concatenate((tokens, np.take_along_axis(tokens, lasts, 1) - left_out * brings[lasts]), axis=1)
    masks = np.concatenate((masks, np.take_along_axis(masks, lasts, 1) - left_out * are_masked[lasts]), axis=1)
    passes = np.concatenate((passes, np.take_along_axis(passes, lasts, 1)), axis=1)
    rates = np.where(totals <= num_free, tokens / costs.step_us(totals, passes, masks), 0.0)
    depth, place = np.unravel_index(int(rates.argmax()), rates.shape)
    num_groups = len(drafts)
    last, num_missing = int(place), 0
    if place >= num_groups:
        last, num_missing = int(lasts[depth, place - num_groups]), int(left_out[depth, place - num_groups])
    for index in np.flatnonzero(taken[depth, : last + (num_missing == 0)]).tolist():
        lengths[kinds[index]] = drafts[index][2]
    found = _Lengths(lengths, kinds[last], int(taken[depth, last]) - num_missing if num_missing else 0)
    return float(rates[depth, place]), found
