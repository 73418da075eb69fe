"""Draws of steps whose rows are dealt out to the ranks, each of which draws its share.

Owns which steps those are and what happens on either side of a share's draw: its rows' logits come
and are changed, and the tokens of all rows are gathered and noted. A row is changed and drawn by
one rank, as every rank would: what a change depends on, such as counts of a row's tokens, every
rank keeps for every row. Does not own the draw between, which a runner may replay from a graph.

    logits of all rows, part of the vocabulary -> begin -> draw of a share -> end -> all tokens

A step with a row that reports log probabilities is not dealt out: the rank that answers needs that
row's logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from headrace_backend.parallel.row_dealer import RowDealer
from headrace_backend.step.masks import StepMasks
from headrace_backend.step.plan import SamplePlan, UInt8Column
from headrace_backend.worker.sampling.sampler import SampledTokens, Sampler


class OwnDraws(NamedTuple):
    """What one rank draws of a step."""

    # Its samples; there may be none.
    plan: SamplePlan
    # fp32 [number of them, vocab_size], changed as their rows ask.
    logits: torch.Tensor
    # Of their rows.
    traits: UInt8Column


class DealtDraws:
    """The draws that one rank shares with others."""

    def __init__(self, dealer: RowDealer, sampler: Sampler) -> None:
        self._dealer = dealer
        self._sampler = sampler

    @classmethod
    def of(cls, dealer: RowDealer | None, sampler: Sampler) -> DealtDraws | None:
        """None where there are no ranks to deal rows out to."""
        return None if dealer is None else cls(dealer, sampler)

    def takes(self, plan: SamplePlan) -> bool:
        """Whether the rows of a step are dealt out; alike on all ranks."""
        return self.pays(plan.rows.size) and not self._sampler.reports_logprobs(plan)

    def pays(self, num_rows: int) -> bool:
        """Whether any step of at most so many rows is dealt out."""
        return self._dealer.pays(num_rows)

    def share(self, num_rows: int) -> int:
        """Most rows that a rank draws of so many."""
        return self._dealer.shares(num_rows).length

    def begin(
        self, plan: SamplePlan, part: torch.Tensor, room: torch.Tensor, masks: StepMasks | None = None
    ) -> OwnDraws:
        """Deals the rows' logits out and launches the changes of this rank's.

        Args:
            plan: All of the step's samples.
            part: fp32 [num_samples, part_size] this rank's part of the vocabulary.
            room: fp32 [at least twice the share, vocab_size], in which the logits come to lie,
                first of all.
            masks: The step's masks; None: no row of the plan has one.
        """
        own = self._dealer.own_rows(plan.rows.size)
        logits, own_plan = self._dealer.deal(part, room), plan.within(own)
        traits = self._sampler.change(own_plan, logits, masks=None if masks is None else masks.within(own))
        return OwnDraws(own_plan, logits, traits)

    def marked(self, tokens: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """What a share's draw gave, int64 [share], as `end` takes it. Can be captured."""
        return self._dealer.marked(tokens, finite)

    def end(self, plan: SamplePlan, marked: torch.Tensor) -> SampledTokens:
        """Gathers what all ranks have drawn, and keeps what the rows' next draws depend on.

        Args:
            plan: All of the step's samples.
            marked: int64 [share] this rank's draws, and then anything.
        """
        tokens, finite = self._dealer.gather(marked, plan.rows.size)
        self._sampler.note(plan, tokens)
        return SampledTokens(tokens, finite, None)
