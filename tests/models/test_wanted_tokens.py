"""Hidden states of some tokens alone: those that all tokens' would be, over the same cache."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import torch
from tests.models.checkpoints import load, write_checkpoint

from headrace_backend.models.causal_lm import CausalLM
from headrace_kernels.attention.paged import AttentionMetadata

# fp32 sums over other numbers of rows; hidden states are of order 1.
TOLERANCE = 1e-5
PROMPT = torch.arange(1, 14)


def prefill(model: CausalLM, wanted: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states of a prompt in one block, and what it left in the cache."""
    length = len(PROMPT)
    caches = [torch.zeros(1, 2, model.num_kv_heads, 16, model.head_dim) for _ in range(model.num_layers)]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(length),
        block_size=16,
        max_query_len=length,
        max_seq_len=length,
        query_lens_cpu=np.array([length], np.int32),
        seq_lens_cpu=np.array([length], np.int32),
    )
    with torch.inference_mode():
        return model(PROMPT, torch.arange(length), caches, metadata, wanted), caches


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-tied-bias", "phi3-partial"])
def test_the_last_layer_computes_wanted_tokens_alone(name: str, tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path, name)
    model = load(tmp_path)
    hidden, caches = prefill(model, None)
    seen: list[int] = []
    for layer in model.model.layers:
        layer.get_submodule("mlp").register_forward_hook(lambda mlp, arguments, out: seen.append(len(out)))
    wanted = torch.tensor([12, 3, 3, 0], dtype=torch.int32)
    found, found_caches = prefill(model, wanted)
    assert seen == [13] * (model.num_layers - 1) + [4]
    torch.testing.assert_close(found, hidden[wanted], atol=TOLERANCE, rtol=0)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found_caches, caches, strict=True))
