"""Executes step plans: rows in and out, the forward pass, the draw.

Owns the KV caches and the order inside a step. `forward` and `sample` are two calls, because the output layer runs only on tokens that are sampled, and because
what sampling needs may arrive later than what the forward pass needs. Data flows plan -> `InputBatch` -> model -> `Sampler`; sampled tokens go back into
the batch on the device, where the next step finds them.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from headrace_backend.step_plan import ForwardPlan, StepPlan
from headrace_backend.worker.input_batch import InputBatch
from headrace_backend.worker.runner import CausalModel
from headrace_backend.worker.sampler import SampledTokens, Sampler
from headrace_kernels.kv_cache import copy_blocks


class ModelRunner:
    """Computes steps, strictly in the order in which they are given."""

    def __init__(self, model: CausalModel, batch: InputBatch, sampler: Sampler, kv_caches: list[torch.Tensor]) -> None:
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
        self._device = kv_caches[0].device

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Takes and gives back rows, then computes the plan's tokens.

        Returns:
            Hidden states of the sampled tokens, [num_samples, hidden_size].
        """
        self._sampler.release(plan.released_rows)
        self._sampler.admit(plan.admissions)
        self._batch.update_tables(plan.forward)
        self._copy_blocks(plan.forward)
        if not plan.forward.rows.size:
            assert not plan.sample.rows.size, "samples without a forward pass"
            return torch.empty(0, 0, device=self._device)
        inputs = self._batch.build(plan.forward)
        hidden = self._model(inputs.token_ids, inputs.positions, self._kv_caches, inputs.metadata)
        indices = plan.sample.token_indices.astype(np.int64)
        return hidden.index_select(0, torch.from_numpy(indices).to(self._device))

    @torch.inference_mode()
    def sample(self, plan: StepPlan, hidden: torch.Tensor) -> SampledTokens | None:
        """Draws the plan's tokens from what `forward` returned; None if it samples nothing."""
        if not plan.sample.rows.size:
            return None
        sampled = self._sampler.sample(plan.sample, self._model.logits(hidden))
        self._batch.remember(plan.sample.rows, sampled.tokens)
        return sampled

    def _copy_blocks(self, plan: ForwardPlan) -> None:
        if plan.copy_sources.size:
            sources, targets = (
                torch.from_numpy(blocks.astype(np.int64)).to(self._device)
                for blocks in (plan.copy_sources, plan.copy_targets)
            )
            copy_blocks(self._kv_caches, sources, targets)


def allocate_kv_caches(
    num_layers: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """One zeroed cache per layer. Zeros, because attention multiplies what lies behind a row's end by 0, and 0 times a NaN is a NaN."""
    if device.type == "cpu":
        return [_lazy_zeros(shape, dtype) for _ in range(num_layers)]
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that the kernel hands out page by page as they are touched. torch.zeros writes them all: 4 to 14 s for 4 GiB."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
