"""Greedy generation in batches with a contiguous KV cache.

It is for the evaluation only; the server has its own engine.

Prompts of different lengths share a batch: they are padded at the end, causal attention keeps the
padding out of the prompt, and each row then writes its next token over its own padding.
"""

from __future__ import annotations

import torch
from demo_model import END_ID, EOS_ID, PAD_ID, DemoModel, rotary_tables
from torch import Tensor


class KvCache:
    """Keys and values of every layer, [layers, batch, kv_heads, max_tokens, head_dim]."""

    def __init__(self, model: DemoModel, batch: int, max_tokens: int) -> None:
        weight = model.model.embed_tokens.weight
        shape = model.shape
        size = (shape.num_hidden_layers, batch, shape.num_key_value_heads, max_tokens, shape.head_dim)
        self.keys = torch.zeros(size, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)


def _forward(model: DemoModel, cache: KvCache, rotary: tuple[Tensor, Tensor], ids: Tensor, positions: Tensor) -> Tensor:
    """Runs ids [batch, tokens] at positions [batch, tokens].

    `rotary` are the tables of all positions (`rotary_tables`).

    Returns hidden states [batch, tokens, hidden].
    """
    cos, sin = (table[positions][:, None] for table in rotary)
    seen = torch.arange(cache.keys.shape[3], device=ids.device)
    mask = (seen[None, None] <= positions[:, :, None])[:, None]
    rows = torch.arange(len(ids), device=ids.device)[:, None]
    x: Tensor = model.model.embed_tokens(ids)
    for index, block in enumerate(model.model.blocks()):
        attention = block.self_attn
        query, key, value = attention.project(block.input_layernorm(x), cos, sin)
        cache.keys[index][rows, :, positions] = key.transpose(1, 2)
        cache.values[index][rows, :, positions] = value.transpose(1, 2)
        x = x + attention.attend(query, cache.keys[index], cache.values[index], mask)
        x = x + block.mlp(block.post_attention_layernorm(x))
    normed: Tensor = model.model.norm(x)
    return normed


@torch.inference_mode()
def generate(model: DemoModel, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy continuations, each up to and with its end token.

    Args:
        model: The model, in the dtype to compute with.
        prompts: Token ids of each prompt.
        max_new_tokens: Bound on the length of every answer; an answer that reaches it did not end
            by itself.

    Returns:
        The new ids of each prompt.
    """
    device = model.model.embed_tokens.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = int(lengths.max())
    padded = torch.tensor([prompt + [PAD_ID] * (longest - len(prompt)) for prompt in prompts], device=device)
    cache = KvCache(model, len(prompts), longest + max_new_tokens)
    positions = torch.arange(longest, device=device).expand(len(prompts), -1)
    rotary = rotary_tables(model.shape, device)
    hidden = _forward(model, cache, rotary, padded, positions)
    last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
    token = model.logits(last).argmax(-1)
    written, ended = [token], (token == END_ID) | (token == EOS_ID)
    for step in range(max_new_tokens - 1):
        if bool(ended.all()):
            break
        hidden = _forward(model, cache, rotary, token[:, None], (lengths + step)[:, None])
        token = model.logits(hidden[:, 0]).argmax(-1)
        written.append(token)
        ended |= (token == END_ID) | (token == EOS_ID)
    return [_until_end(row) for row in torch.stack(written, 1).tolist()]


def _until_end(ids: list[int]) -> list[int]:
    """The ids up to and with the first end token; all of them if there is none."""
    for index, token in enumerate(ids):
        if token in (END_ID, EOS_ID):
            return ids[: index + 1]
    return ids


@torch.inference_mode()
def greedy_choices(model: DemoModel, rows: list[list[int]]) -> list[list[int]]:
    """What the model would choose after every prefix of each row.

    result[i][t] follows rows[i][: t + 1].
    """
    device = model.model.embed_tokens.weight.device
    longest = max(map(len, rows))
    padded = torch.tensor([row + [PAD_ID] * (longest - len(row)) for row in rows], device=device)
    cos, sin = rotary_tables(model.shape, device)
    choices = model.logits(model.hidden(padded, cos[:longest], sin[:longest])).argmax(-1).tolist()
    return [choice[: len(row)] for choice, row in zip(choices, rows, strict=True)]
