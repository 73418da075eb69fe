"""How long a step takes, learned from the steps themselves.

A linear model over what a step computes is fitted as results come in.

Owns the features of a step, the fit, and the answer to "how many tokens of this prompt fit into so
much time". Decides nothing (`token_budget`) and reads no clock (the engine gives it durations).
Settled steps go in, predictions come out.

A step costs, in microseconds, the sum of these features, each times a coefficient that is never
negative:

    1                     weights are read once, kernels are launched
    1 if it has prompts   and again if such a step has more than 256 tokens, and than 768: it may
                          run outside of a captured graph
    decodes               rows
    tokens                by segments, each with a coefficient of its own: the first ones share the
                          reading of the weights, those of a step that is launched kernel by kernel
                          may hide behind the launching, the last ones cost their arithmetic
    context tokens        read by decodes
    attention pairs       query times key of the prompts: count * (start + count / 2), summed over
                          chunks
    masked draws          a mask each, for which the step's draws wait if it comes too late
    draft passes          most drafts of a row that the step makes for the next one: a draft model
                          runs once for each, for all rows
    drafted tokens        beside what they cost as tokens: drafting them, choosing among them
    1 if it has drafts    its rows compute several tokens: other kernels, a larger graph

Where the worker has timed its graphs of decodes with drafts, what these take longer than one of the
same rows without drafts is no feature: it is known, added to predictions and taken off what is
learned from.

The fit is least squares of the relative error, so that a step of 5 ms weighs as much as one of 200
ms. Old steps fade; those with and those without prompts fade separately, so that an hour of
decoding does not make it forget what prompts cost. What a step takes by accident (a page fault,
another process) is cut down to what steps usually deviate; when that grows beyond measure, the
device is another one, and all begins anew. Until there is data, and wherever the data say nothing
(long contexts, if there were none lately), a prior holds, scaled by how fast this device has been
compared to it.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from typing import Final

import numpy as np
import numpy.typing as npt

from headrace_backend.engine.scheduling.draft_costs import DraftCosts, DraftedGraphs

# Where segments of tokens begin; the last one has no end.
_SEGMENTS: Final = (0, 128, 256, 384, 512, 768, 1024)
_SEGMENT_ENDS: Final = (*_SEGMENTS[1:], 1 << 30)
# Tokens beyond which a step with prompts may cost more at once: another kernel for the products,
# and the end of what is always captured in graphs. (Longer ones are captured where launching takes
# as long as they do, so that nothing jumps at their end.)
_JUMPS: Final = (256, 768)
_FIRST_SEGMENT = 3
_FIRST_JUMP = _FIRST_SEGMENT + len(_SEGMENTS)
_PAIRS = _FIRST_JUMP + len(_JUMPS) + 1
_MASKED_DRAWS = _PAIRS + 1
_DRAFT_PASSES = _PAIRS + 2
_NUM_FEATURES = _PAIRS + 5
# In microseconds: a model of 8e9 parameters in bf16 on an H200 by its arithmetic. Another device is
# this times a factor until it has shown itself. What drafts cost is guessed high: a coefficient
# that is a tenth of a step is learned within some dozens of steps, one that is a thousandth hardly
# moves from its prior. But what a draft takes beside being a token is next to nothing: guessed at 4
# us, 128 of them explained half a millisecond that a graph of 256 tokens takes longer than it was
# timed, and two drafts a row were never tried where they pay most (docs/experiments.md, "128 rows
# with drafts"). A mask takes a thread of the host some 25 us, and there are eight of them.
_PRIOR_US = (
    *(4400.0, 300.0, 1.0, 3.0, 12.0, 20.0, 20.0, 20.0, 20.0, 20.0, 600.0, 600.0, 0.033, 0.0012),
    *(3.0, 400.0, 0.5, 300.0),
)
# Weight of the prior of one coefficient, in steps that consist of nothing but its feature.
_PRIOR_WEIGHT = 0.02
# A step with (without) prompts counts half as much after so many more of its kind.
_MIXED_HALF_LIFE = 300
_DECODE_HALF_LIFE = 200
# Relative errors beyond so many times the usual one are cut down to it.
_CLIP = 4.0
# What deviates always is no accident: the usual error follows within some dozens of steps.
_SPREAD_WEIGHT = 0.05
_MIN_SPREAD = 0.01
_FIRST_SPREAD = 2.0
# Once errors were below the first, errors above the second mean that this is not the device that
# the data are of.
_SETTLED_SPREAD = 0.2
_CHANGED_SPREAD = 0.5
_SPEED_WEIGHT = 0.05
# Coefficients stay above so much of the prior's, so that no step is free; and no step is shorter
# than a clock can tell.
_LEAST_OF_PRIOR = 1e-3
_LEAST_STEP_US = 1.0
# Share of a step with drafts that is left to be learned, at least.
_LEAST_LEARNED = 0.2
_REGULAR = 1e-9
# Coefficients are fitted again with every so many steps; one that has prompts is worth several that
# only decode, as those are much alike.
_REFIT_EVERY = 32
_MIXED_STEP_WORTH = 4
_FITTED_EACH_TIME = 16

_Matrix = npt.NDArray[np.float64]
_BORDERS: Final = np.array([*_SEGMENTS, 1 << 30], np.float64)


@dataclasses.dataclass(slots=True)
class StepLoad:
    """What a step computes, as far as its duration depends on it."""

    num_decodes: int = 0
    # Tokens of context that the decodes read.
    context_tokens: int = 0
    num_prefill_tokens: int = 0
    # Pairs of query and key of the prompts' chunks.
    attention_pairs: float = 0.0
    # Drafted tokens that the decodes compute beside one token each.
    num_draft_tokens: int = 0
    # Those of them that are probes.
    num_probes: int = 0
    # Most drafts of a row that are made at the step's end.
    num_draft_passes: int = 0
    # Draws of the decodes, those behind drafts too, that forms of outputs restrict.
    num_masked_draws: int = 0
    # Prefill tokens that are no prompt's but must come in outputs, and the rows that compute them.
    num_forced_tokens: int = 0
    num_forced_rows: int = 0

    def add_chunk(self, start: int, count: int) -> None:
        """Adds tokens [start, start + count) of a prompt."""
        self.num_prefill_tokens += count
        self.attention_pairs += count * (start + 0.5 * count)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of decodes and prompts."""
        return self.num_decodes + self.num_draft_tokens + self.num_prefill_tokens

    def features(self, has_prompts: bool = False, num_padded: int = 0, num_known: int = 0) -> list[float]:
        """The features of the load, in the order of the coefficients.

        Args:
            has_prompts: Whether the step counts as one with prompts although none of their tokens
                is in it yet.
            num_padded: Tokens that are computed where that is more than the step has.
            num_known: Tokens of the step whose time is known already, and left out.
        """
        tokens = max(self.num_tokens - num_known, num_padded)
        mixed = 1.0 if self.num_prefill_tokens or has_prompts else 0.0
        features = [1.0, mixed, self.num_decodes]
        for begin, end in zip(_SEGMENTS, _SEGMENT_ENDS, strict=True):
            features.append(tokens - begin if begin < tokens < end else end - begin if tokens >= end else 0.0)
        for jump in _JUMPS:
            features.append(mixed if tokens > jump else 0.0)
        features += (self.context_tokens, self.attention_pairs, self.num_masked_draws)
        features += (self.num_draft_passes, self.num_draft_tokens, 1.0 if self.num_draft_tokens else 0.0)
        return features


class _Moments:
    """Sums over steps of one kind, from which least squares follow; older steps fade."""

    __slots__ = ("_decay", "sums")

    def __init__(self, half_life: int) -> None:
        self._decay = 0.5 ** (1 / half_life)
        # Products of features, and of features and duration (last row and column), divided by the
        # duration squared.
        self.sums: _Matrix = np.zeros((_NUM_FEATURES + 1, _NUM_FEATURES + 1))

    def add(self, features: list[float], duration_us: float) -> None:
        entry = np.array([*features, duration_us])
        entry /= duration_us
        self.sums *= self._decay
        self.sums += entry[:, None] * entry


class StepTimeModel:
    """Predicts durations of steps in microseconds."""

    __slots__ = (
        "_coefficients",
        "_decode_steps",
        "_log_speed",
        "_mixed_steps",
        "_num_steps",
        "_num_unfitted",
        "_settled",
        "_spread",
        "captured",
        "drafted_graphs",
    )

    def __init__(self) -> None:
        """Knows the prior only."""
        # Tokens that steps with prompts are padded to, ascending; longer ones are not padded.
        self.captured: tuple[int, ...] = ()
        # What decodes with drafts are padded to, and how long that takes.
        self.drafted_graphs = DraftedGraphs()
        self._forget()

    def _forget(self) -> None:
        self._decode_steps = _Moments(_DECODE_HALF_LIFE)
        self._mixed_steps = _Moments(_MIXED_HALF_LIFE)
        self._coefficients = list(_PRIOR_US)
        # Logarithm of how much slower than the prior steps have been.
        self._log_speed = 0.0
        self._spread = _FIRST_SPREAD
        self._settled = False
        self._num_steps = 0
        self._num_unfitted = 0

    @property
    def coefficients_us(self) -> tuple[float, ...]:
        """The coefficients in us, in the order of the module's docstring; none is negative."""
        return tuple(self._coefficients)

    def observe(self, load: StepLoad, duration_us: float) -> None:
        """Learns that a step took so long; durations that can't be are passed over."""
        if duration_us < _LEAST_STEP_US:
            return
        features = self._features(load)
        # What is known to be added by the tokens of drafts tells nothing of the coefficients. No
        # step is all of that.
        duration_us = max(duration_us - self._known_us(load), _LEAST_LEARNED * duration_us)
        duration_us = self._plausible(features, duration_us)
        moments = self._mixed_steps if load.num_prefill_tokens else self._decode_steps
        moments.add(features, duration_us)
        self._num_steps += 1
        self._num_unfitted += _MIXED_STEP_WORTH if load.num_prefill_tokens else 1
        if self._num_unfitted >= _REFIT_EVERY or self._num_steps <= _FITTED_EACH_TIME:
            self._fit()

    def predict_us(self, load: StepLoad) -> float:
        """Predicts how long such a step will take, in microseconds."""
        return _dot(self._coefficients, self._features(load)) + self._known_us(load)

    def draft_costs_us(self, load: StepLoad) -> DraftCosts:
        """What drafts add to a step that has none, by what is known now."""
        pass_us, drafted_us, any_us = self._coefficients[_DRAFT_PASSES:]
        slopes_us = self._coefficients[_FIRST_SEGMENT:_FIRST_JUMP]
        # A step with prompts takes a graph of another kind.
        graphs = DraftedGraphs() if load.num_prefill_tokens else self.drafted_graphs
        costs = (pass_us, drafted_us, any_us, slopes_us, _BORDERS, graphs, self._coefficients[_MASKED_DRAWS])
        return DraftCosts(self.predict_us(load), load.num_tokens, *costs)

    def _knows_drafts(self, load: StepLoad) -> bool:
        """Whether the time of the step's drafts as tokens was measured."""
        return bool(load.num_draft_tokens and not load.num_prefill_tokens and self.drafted_graphs)

    def _known_us(self, load: StepLoad) -> float:
        if not self._knows_drafts(load):
            return 0.0
        return float(self.drafted_graphs.added_us(load.num_decodes, load.num_draft_tokens))

    def replays(self, load: StepLoad) -> bool:
        """Whether such a step is short enough to be replayed from a graph.

        A step deep in a context may be launched kernel by kernel all the same.
        """
        return bool(self.captured) and (not load.num_prefill_tokens or load.num_tokens <= self.captured[-1])

    def padded(self, num_tokens: int) -> int:
        """Tokens that a step with prompts computes if it has so many."""
        index = bisect.bisect_left(self.captured, num_tokens)
        return self.captured[index] if index < len(self.captured) else num_tokens

    def _features(self, load: StepLoad) -> list[float]:
        if self._knows_drafts(load):
            return load.features(num_known=load.num_draft_tokens)
        return load.features(num_padded=self.padded(load.num_tokens) if load.num_prefill_tokens else 0)

    def fitting_tokens(self, load: StepLoad, start: int, limit_us: float) -> int:
        """Most tokens of a prompt, from position `start`, that keep a step within `limit_us`.

        It is 0 if there is no such number. Where steps are padded, it is the number that fills one.
        """
        count = self._fitting_unpadded(load, start, limit_us)
        total = load.num_tokens + count
        if self.captured and total < self.captured[-1]:
            index = bisect.bisect_right(self.captured, total)
            total = self.captured[index - 1] if index else 0
            # What the step is padded to already costs no more when it is filled.
            filled = self.padded(load.num_tokens) if load.num_prefill_tokens else 0
            count = max(total, filled) - load.num_tokens
        return max(0, count)

    def _fitting_unpadded(self, load: StepLoad, start: int, limit_us: float) -> int:
        """Computes `fitting_tokens` as if no step were padded.

        The cost of a chunk is piecewise quadratic and grows with its length: pieces are walked
        until the time is used up.
        """
        coefficients = self._coefficients
        first = load.num_tokens
        left_us = limit_us - _dot(coefficients, load.features(has_prompts=True))
        pairs_us = coefficients[_PAIRS]
        count = 0
        for index, (begin, end) in enumerate(zip(_SEGMENTS, _SEGMENT_ENDS, strict=True)):
            if end <= first:
                continue
            if begin >= first and begin in _JUMPS:
                left_us -= coefficients[_FIRST_JUMP + _JUMPS.index(begin)]
            if left_us <= 0:
                break
            slope_us = coefficients[_FIRST_SEGMENT + index] + pairs_us * (start + count)
            width = end - max(begin, first)
            piece_us = width * (slope_us + 0.5 * pairs_us * width)
            if piece_us > left_us:
                return count + int(_solve_piece(slope_us, pairs_us, left_us))
            left_us -= piece_us
            count += width
        return count

    def _plausible(self, features: list[float], duration_us: float) -> float:
        """The duration, cut down to what steps usually deviate from their prediction."""
        prior_us = _dot(_PRIOR_US, features)
        predicted_us = _dot(self._coefficients, features)
        limit = _CLIP * self._spread
        error = min(max(math.log(duration_us / predicted_us), -limit), limit)
        self._spread = max(_MIN_SPREAD, self._spread + _SPREAD_WEIGHT * (abs(error) - self._spread))
        if self._settled and self._spread > _CHANGED_SPREAD:
            self._forget()
            return duration_us
        self._settled |= self._spread < _SETTLED_SPREAD
        duration_us = predicted_us * math.exp(error)
        weight = max(_SPEED_WEIGHT, 1 / (self._num_steps + 1))
        self._log_speed += weight * (math.log(duration_us / prior_us) - self._log_speed)
        return duration_us

    def _fit(self) -> None:
        self._num_unfitted = 0
        sums = self._decode_steps.sums + self._mixed_steps.sums
        prior = np.array(_PRIOR_US) * math.exp(self._log_speed)
        # In units of the prior, so that one weight suits all coefficients.
        matrix = sums[:-1, :-1] * prior[:, None] * prior
        # The second part keeps it regular in floating point, however large its entries.
        matrix[np.diag_indices(_NUM_FEATURES)] += _PRIOR_WEIGHT + _REGULAR * matrix.diagonal()
        target = sums[:-1, -1] * prior + _PRIOR_WEIGHT
        self._coefficients = (np.maximum(_solve_nonnegative(matrix, target), _LEAST_OF_PRIOR) * prior).tolist()


def _solve_piece(slope: float, pairs: float, left: float) -> float:
    """The positive x with slope x + pairs x^2 / 2 = left; a very large one if x costs nothing."""
    root = slope + math.sqrt(slope * slope + 2 * pairs * left)
    return 2 * left / root if root > 0 else float(1 << 30)


def _solve_nonnegative(matrix: _Matrix, target: _Matrix) -> _Matrix:
    """Least squares with coefficients that would be negative taken out, until none is left.

    Not always the optimum under that bound, but always within it, and the same whenever no bound is
    active.
    """
    solution = np.zeros(len(target))
    free = np.arange(len(target))
    while free.size:
        found = np.linalg.solve(matrix[free[:, None], free], target[free])
        if (found >= 0).all():
            solution[free] = found
            break
        free = free[found > 0]
    return solution


def _dot(coefficients: list[float] | tuple[float, ...], features: list[float]) -> float:
    return sum([c * f for c, f in zip(coefficients, features, strict=True)])
