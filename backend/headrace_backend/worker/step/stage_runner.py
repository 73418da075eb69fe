"""Computes one pipeline stage's part of each step, between the stage before and the one behind.

    plan ──> first stage: tokens of earlier steps, as far as this one needs them ─┐
             others: the stream of the stage before ──────────────────────────────┤
                                                                                  v
             runner ──> stream to the next stage, or last stage: drawn tokens to the first

Owns what is exchanged around a step, and when. Every stage reads the same plans in the same order,
so it knows by itself what comes: of each step with tokens a stream, of each with draws as
many tokens. Steps that only give rows back send nothing. Start-up's own steps go past this, to the
runner alone: each stage profiles and warms up by itself.

Tokens are waited for only by a step that computes one of them. So a stage goes on with the step of
other rows while the last stage is still at the one before: how many steps are under way is the
engine's choice (`engine.scheduling.rows.micro_batches`).
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from headrace_backend.parallel.stage_links import Receipt, StageLinks
from headrace_backend.step.masks import StepMasks
from headrace_backend.step.plan import ForwardPlan, Int32Column, StepPlan
from headrace_backend.worker.sampling.sampler import SampledTokens
from headrace_backend.worker.step.runner import Launched, Runner, zero_tokens


class StageRunner:
    """A runner whose steps go through several stages."""

    def __init__(self, runner: Runner, links: StageLinks, hidden_size: int, like: torch.Tensor) -> None:
        """Joins its parts.

        Args:
            runner: Computes the stage's part of a step.
            links: The links to other stages.
            hidden_size: Elements of a token's residual stream.
            like: A tensor of the stream's type, on its device.
        """
        self._runner = runner
        self._links = links
        self._hidden_size = hidden_size
        self._like = like
        # In the first stage: the rows of steps whose draws have not been waited for, and these.
        self._drawn: deque[tuple[Int32Column, Receipt]] = deque()

    @property
    def launched(self) -> Launched:
        """Implements `Runner.launched`."""
        return self._runner.launched

    @property
    def draws(self) -> bool:
        """Implements `StepRunner.draws`."""
        return self._links.is_last

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Implements `Runner.forward`, with what the stage before sends."""
        links = self._links
        if not plan.forward.rows.size:
            return self._runner.forward(plan)
        stream = None
        if links.is_first:
            self._take_tokens(plan.forward)
        else:
            stream = links.receive_stream(self._like.new_empty(plan.num_tokens, self._hidden_size)).wait()
        hidden = self._runner.forward(plan, stream)
        if not links.is_last:
            links.send_stream(hidden)
        if links.is_first and plan.sample.rows.size:
            self._drawn.append((plan.sample.rows, links.receive_tokens(zero_tokens(plan, hidden.device))))
        return hidden

    @torch.inference_mode()
    def sample(self, plan: StepPlan, hidden: torch.Tensor, masks: StepMasks | None = None) -> SampledTokens | None:
        """Implements `Runner.sample` in the last stage, and sends what is drawn to the first."""
        if not self._links.is_last:
            return None
        sampled = self._runner.sample(plan, hidden, masks)
        if plan.sample.rows.size:
            assert sampled is not None, "the plan has draws"
            self._links.send_tokens(sampled.tokens)
        return sampled

    def reset(self) -> None:
        """Implements `StepRunner.reset`, where no draws are under way."""
        assert not self._drawn, "stages that lost a step are replaced"
        self._runner.reset()

    def _take_tokens(self, plan: ForwardPlan) -> None:
        """Waits for the tokens that a step computes, and for those that must long be there.

        The engine has no more steps in flight than one for each stage and one more.
        """
        wanted = plan.rows[plan.known_counts < plan.counts]
        num_needed = 0
        for number, (rows, _) in enumerate(self._drawn, 1):
            if np.isin(rows, wanted, assume_unique=True).any():
                num_needed = number
        for _ in range(max(num_needed, len(self._drawn) - self._links.num_stages)):
            rows, tokens = self._drawn.popleft()
            self._runner.remember(rows, tokens.wait())
