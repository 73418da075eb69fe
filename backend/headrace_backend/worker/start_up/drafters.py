"""Who drafts in a worker, as configured, and how it is joined to a runner.

Owns the choice, and the caches of a draft model or head: their blocks have the numbers of the
model's, so that prefix hits, copies and preemption hold for both.
"""

from __future__ import annotations

import torch

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.draft_head import DraftHead
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.speculation.deferred_steps import DeferredSteps, window_tokens
from headrace_backend.worker.speculation.drafter import Drafter, HeadDrafter
from headrace_backend.worker.speculation.ngram_drafter import NgramDrafter
from headrace_backend.worker.speculation.speculation import RowDrafts, Speculation
from headrace_backend.worker.speculation.suffix_drafter import SuffixDrafter
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.step.buffers import DeviceRows
from headrace_backend.worker.step.cpu_draft_model import CpuDraftModel
from headrace_backend.worker.step.cpu_runner import CpuBatch
from headrace_backend.worker.step.drafting_model import DraftingModel, SmallModel
from headrace_backend.worker.step.gpu_draft_model import GpuDraftModel
from headrace_backend.worker.step.head_drafts import HeadDrafts
from headrace_backend.worker.step.kv_caches import allocate_kv_caches, kv_type
from headrace_backend.worker.step.shape import AttentionSizes


def drafting_model(
    draft: CausalLM | DraftHead, num_blocks: int, sizes: WorkerSizes, device: torch.device
) -> DraftingModel:
    """A loaded draft model, or a head that is joined to its target, over caches of its own.

    Args:
        draft: Model or head.
        num_blocks: Blocks of the target's cache.
        sizes: Block size, type of the cache and rows of the batch.
        device: Device of the caches.
    """
    shape = (num_blocks, 2, draft.num_kv_heads, sizes.block_size, draft.head_dim)
    num_layers = 1 if isinstance(draft, DraftHead) else draft.num_layers
    caches = allocate_kv_caches(num_layers, shape, kv_type(sizes.kv_dtype, draft.dtype), device)
    if isinstance(draft, DraftHead):
        return HeadDrafts(draft, caches[0], sizes.max_num_seqs)
    return SmallModel(draft, caches, draft.num_heads)


def cpu_speculation(
    model: CausalLM, sizes: WorkerSizes, sampler: Sampler, tables: CpuBatch, draft: DraftingModel | None
) -> Speculation | None:
    """Who drafts on a CPU; None: nobody.

    Args:
        model: The model that verifies.
        sizes: Who drafts, and how much.
        sampler: The rows' parameters.
        tables: The rows' blocks.
        draft: The drafting model, where one drafts.
    """
    if sizes.speculate == "off":
        return None
    rows = _rows(model, sizes, torch.device("cpu"))
    if draft is None:
        return _joined(lookup_drafter(sizes, rows), rows, model)
    return _joined(CpuDraftModel(draft, sampler, rows, tables, model.shard.collectives), rows, model)


def gpu_speculation(
    model: CausalLM, sizes: WorkerSizes, sampler: Sampler, tables: DeviceRows, draft: DraftingModel | None
) -> Speculation | None:
    """Who drafts on a GPU; None: nobody. Arguments as of `cpu_speculation`."""
    if sizes.speculate == "off":
        return None
    rows = _rows(model, sizes, tables.block_tables.device)
    if draft is None:
        return _joined(lookup_drafter(sizes, rows), rows, model)
    attention = AttentionSizes.of(draft.num_heads, draft.kv_caches[0], draft.dtype)
    deferred, followed_graphs = None, tuple[int, ...]()
    # A head needs what the model computed, which the next step overwrites.
    if draft.attends_in_follow:
        window, followed_graphs = window_tokens(sizes.max_model_len), sizes.followed_graphs
        most = max(followed_graphs, default=sizes.max_num_batched_tokens)
        deferred = DeferredSteps(sizes.max_num_seqs, window, most)
    passes = (sizes.batch_graphs, model.shard.collectives, deferred, followed_graphs)
    return _joined(GpuDraftModel(draft, sampler, rows, tables, attention, *passes), rows, model)


def lookup_drafter(sizes: WorkerSizes, rows: RowDrafts) -> Drafter:
    """A drafter that needs no model, as configured."""
    assert sizes.speculate in ("ngram", "suffix"), "a drafting model is loaded"
    kind = SuffixDrafter if sizes.speculate == "suffix" else NgramDrafter
    return kind(rows.tokens_per_row - 1, sizes.max_num_seqs, sizes.max_model_len, rows.drafts.device)


def _rows(model: CausalLM, sizes: WorkerSizes, device: torch.device) -> RowDrafts:
    return RowDrafts(sizes.max_num_seqs, sizes.tokens_per_row, device, has_states=any(model.state_elements()))


def _joined(drafter: Drafter | HeadDrafter, rows: RowDrafts, model: CausalLM) -> Speculation:
    return Speculation(drafter, rows, model.vocab_size, has_peers=model.shard.collectives is not None)
