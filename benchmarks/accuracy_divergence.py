"""How a quantized model's distributions differ from the unquantized one's on held-out text.

The figures are the perplexity of both, and the divergence between them.

Owns the sums. Both models run in this process, on whole documents, over a cache of one row.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace_backend.models.build import ModelBuild
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.load import load_model
from headrace_backend.weights.scheme import Scheme, Schemes
from headrace_backend.worker.start_up.device import choose_dtype
from headrace_backend.worker.step.kv_caches import allocate_kv_caches, kv_type
from headrace_kernels.attention.paged import AttentionMetadata
from headrace_model_folder import ModelFolder

_BLOCK = 16
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class Divergence:
    """Over all tokens that the model is meant to say."""

    tokens: int
    perplexity: float
    # KL divergence from the unquantized model's distribution to this one's, in nats; mean.
    kl: float
    # Share of tokens at which both find the same one most likely.
    same_choice: float


def load(folder: pathlib.Path, scheme: Scheme | None, head: Scheme | None = None) -> CausalLM:
    """The model as a worker on a CPU loads it."""
    opened = ModelFolder.open(folder)
    dtype = choose_dtype("auto", opened.config, CPU)
    build = ModelBuild(opened.config, dtype, CPU, Schemes(scheme, head), records=opened.tensors)
    return load_model(build, opened, lambda *_: None)


@torch.inference_mode()
def diverge(
    model: CausalLM, plain: CausalLM, documents: Sequence[tuple[list[int], list[bool]]], kv_dtype: str = "auto"
) -> Divergence:
    """Compares a model with the unquantized one over a plain cache.

    Args:
        model: The quantized model, or the unquantized one over a quantized cache.
        plain: The unquantized model.
        documents: Token ids of each document, and which of them count.
        kv_dtype: Type of the model's cache, as EngineConfig has it.
    """
    tokens, surprise, kl, same = 0, 0.0, 0.0, 0
    for ids, said in documents:
        # A token is said by the position before it.
        positions = torch.tensor([place - 1 for place, counts in enumerate(said) if counts and place])
        found = log_probabilities(model, ids, kv_dtype)[positions]
        wanted = log_probabilities(plain, ids)[positions]
        targets = torch.tensor(ids)[positions + 1]
        tokens += len(positions)
        surprise -= float(found.gather(1, targets[:, None]).sum())
        kl += float((wanted.exp() * (wanted - found)).sum())
        same += int((found.argmax(-1) == wanted.argmax(-1)).sum())
    return Divergence(tokens, math.exp(surprise / tokens), kl / tokens, same / tokens)


def log_probabilities(model: CausalLM, ids: list[int], kv_dtype: str = "auto") -> Tensor:
    """[len(ids), vocab_size] fp32: of the next token after each, over a cache of that type."""
    count, blocks = len(ids), -(-len(ids) // _BLOCK)
    shape = (blocks, 2, model.num_kv_heads, _BLOCK, model.head_dim)
    caches = allocate_kv_caches(model.num_layers, shape, kv_type(kv_dtype, torch.float32), CPU)
    step = AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(count),
        block_size=_BLOCK,
        max_query_len=count,
        max_seq_len=count,
        query_lens_cpu=np.array([count], np.int32),
        seq_lens_cpu=np.array([count], np.int32),
    )
    hidden = model(torch.tensor(ids), torch.arange(count), caches, step)
    return model.logits(hidden).log_softmax(-1)
