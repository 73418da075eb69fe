"""What a step takes with drafts.

Owns the arithmetic for many numbers of drafts at once; what its coefficients are is learned by
`step_time`. A step with drafts is replayed from the smallest graph that holds its tokens, padding
included, so its time grows in steps, and not evenly: one of 72 tokens takes no longer than one of
48. Workers time these graphs once, when they have captured them (`DraftedGraphs`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as AbstractSequence

import numpy as np
import numpy.typing as npt

Counts = int | npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]


class DraftedGraphs:
    """The graphs of steps in which rows that decode have drafts, by their tokens."""

    __slots__ = ("sizes", "times_us")

    def __init__(self, graphs: AbstractSequence[tuple[int, float]] = ()) -> None:
        """Takes tokens of each graph, and its microseconds when all are padding; none: unknown."""
        ordered = sorted(graphs)
        # int64 [num_graphs], ascending.
        self.sizes = np.array([size for size, _ in ordered], np.int64)
        # A larger graph is taken as no faster than a smaller one, whatever the noise.
        times = np.array([time_us for _, time_us in ordered], np.float64)
        self.times_us: Times = np.maximum.accumulate(times) if ordered else times

    def __bool__(self) -> bool:
        return bool(self.sizes.size)

    def time_us(self, num_tokens: Counts) -> Times:
        """Time of the graph that holds so many tokens; beyond the largest one in proportion.

        There must be a graph.
        """
        places = np.minimum(np.searchsorted(self.sizes, num_tokens), self.sizes.size - 1)
        beyond = np.maximum(np.asarray(num_tokens) / self.sizes[-1], 1.0)
        times: Times = self.times_us[places] * beyond
        return times

    def added_us(self, num_tokens: int, num_drafts: Counts) -> Times:
        """What the graph of a step with drafts takes longer than one of its tokens without them."""
        added: Times = self.time_us(np.add(num_tokens, num_drafts)) - self.time_us(num_tokens)
        return added


@dataclasses.dataclass(slots=True, frozen=True)
class DraftCosts:
    """What a step takes with drafts, in microseconds."""

    # Without any, and how many tokens it then has.
    bare_us: float
    num_tokens: int
    # A pass of the drafter; what a draft takes beside being a token; having any.
    pass_us: float
    drafted_us: float
    any_us: float
    # What a token takes, by segments that begin at the borders (the last border is their end);
    # where graphs were timed, these say it instead.
    slopes_us: AbstractSequence[float]
    borders: Times
    graphs: DraftedGraphs = dataclasses.field(default_factory=DraftedGraphs)
    # A mask of the draw behind a draft.
    masked_us: float = 0.0

    def step_us(self, num_drafts: Counts, num_passes: Counts, num_masked: Counts = 0) -> Times:
        """How long the step takes with drafts.

        Args:
            num_drafts: Drafts of all rows; this and the others may be arrays that broadcast.
            num_passes: Drafts of the row that has most.
            num_masked: Drafts of rows whose draws a form restricts.
        """
        times: Times = self.bare_us + self._tokens_us(num_drafts) + np.multiply(num_drafts, self.drafted_us)
        times = times + np.multiply(num_passes, self.pass_us)
        times += np.where(np.greater(num_drafts, 0), self.any_us, 0.0) + np.multiply(num_masked, self.masked_us)
        return times

    def _tokens_us(self, num_drafts: Counts) -> Times:
        if self.graphs:
            return self.graphs.added_us(self.num_tokens, num_drafts)
        costs_us = np.cumsum([0.0, *np.diff(self.borders) * self.slopes_us])
        tokens_us = np.interp(np.add(self.num_tokens, num_drafts), self.borders, costs_us)
        added: Times = tokens_us - np.interp(self.num_tokens, self.borders, costs_us)
        return added

    @property
    def full_counts(self) -> npt.NDArray[np.int64]:
        """Numbers of drafts that fill a graph, ascending; none where graphs were not timed."""
        counts: npt.NDArray[np.int64] = self.graphs.sizes - self.num_tokens
        return counts[counts > 0]
