"""Executes step plans on a CPU: rows in and out, the forward pass, the draw.

Owns the order inside a step. `forward` and `sample` are two calls, because the output layer runs
only on tokens that are sampled, and because what sampling needs may arrive later than what the
forward pass needs. A GPU has a runner of its own (`gpu_runner`), with the same two calls.

    plan -> CpuBatch.build -> model -> hidden states -> Sampler -> tokens, which the next step finds
    in `CpuBatch`
"""

from __future__ import annotations

import numpy as np
import torch

from headrace_backend.step.plan import SamplePlan, StepPlan
from headrace_backend.worker.sampling.prompt_logprobs import hidden_indices, prompt_logprobs
from headrace_backend.worker.sampling.sampler import SampledTokens, Sampler
from headrace_backend.worker.step.cpu_batch import CpuBatch
from headrace_backend.worker.step.kv_caches import copy_planned_blocks
from headrace_backend.worker.step.runner import NOTHING_LAUNCHED, CausalModel, Launched, split_hidden
from headrace_kernels.finite_rows import finite_rows


class CpuRunner:
    """Computes steps, strictly in the order in which they are given."""

    def __init__(self, model: CausalModel, batch: CpuBatch, sampler: Sampler, kv_caches: list[torch.Tensor]) -> None:
        """Takes its parts.

        Args:
            model: The model.
            batch: Block tables and last tokens.
            sampler: Sampling parameters and the draw.
            kv_caches: Per layer [num_blocks, 2, num_kv_heads, block_size, head_dim].
        """
        self._model = model
        self._batch = batch
        self._sampler = sampler
        self._kv_caches = kv_caches
        self.launched = NOTHING_LAUNCHED

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Takes and gives back rows, then computes the plan's tokens.

        Returns:
            As Runner says.
        """
        self._sampler.release(plan.released_rows)
        self._sampler.admit(plan.admissions)
        self._batch.update_tables(plan.forward)
        copy_planned_blocks(plan.forward, self._kv_caches)
        if not plan.forward.rows.size:
            assert not plan.sample.rows.size, "samples without a forward pass"
            self.launched = NOTHING_LAUNCHED
            return torch.empty(0, 0)
        first_piece = self._model.first_piece(plan.num_tokens, is_captured=False)
        inputs = self._batch.build(plan.forward, first_piece)
        self.launched = Launched(plan.num_tokens, captured=False)
        hidden = self._model(inputs.token_ids, inputs.positions, self._kv_caches, inputs.metadata)
        indices = plan.wanted_indices.astype(np.int64)
        if plan.prompt_logprobs.counts.size:
            indices = np.concatenate((indices, hidden_indices(plan.prompt_logprobs)))
        return hidden.index_select(0, torch.from_numpy(indices))

    @torch.inference_mode()
    def sample(self, plan: StepPlan, hidden: torch.Tensor) -> SampledTokens | None:
        """See Runner."""
        sampled_from, checked, telling = split_hidden(plan, hidden)
        prompts = prompt_logprobs(plan.prompt_logprobs, telling, self._model.logits)
        finite = finite_rows(checked) if len(checked) else None
        if not len(sampled_from):
            return SampledTokens.none(prompts, finite, hidden.device)
        sampled = self._draw(plan.sample, sampled_from)
        self._batch.remember(plan.sample.rows, sampled.tokens)
        sampled.prompts, sampled.checked = prompts, finite
        return sampled

    def reset(self) -> None:
        """Gives back all rows.

        Block tables and last tokens are written anew when a row is taken.
        """
        self._sampler.release_all()

    def _draw(self, plan: SamplePlan, hidden: torch.Tensor) -> SampledTokens:
        """Rows that want nothing but their most likely token need no logits beyond this rank's own."""
        if self._sampler.is_greedy(plan):
            return self._sampler.greedy(*self._model.most_likely(hidden))
        return self._sampler.sample(plan, self._model.logits(hidden))
