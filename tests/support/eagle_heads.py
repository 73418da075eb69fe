"""EAGLE-3 heads for tests: folders as people publish them, and a head's mathematics in plain torch.

The mathematics are written from the paper's figures, without caches, blocks, batches or ranks: what
a head drafts behind a whole sequence. Tokens are fed as in training, each with the state of the one
before it, and a sequence's first token, which has none, adds a key and a value of zeros.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]


def head_config(target: dict[str, Any], draft_vocab_size: int, layers: Sequence[int], **changes: Any) -> dict[str, Any]:
    """A config.json of a head for a target's."""
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("rms_norm_eps", "rope_theta", "head_dim", "max_position_embeddings", "attention_bias"),
    )
    own = {name: target[name] for name in same if target.get(name) is not None}
    own |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": draft_vocab_size}
    return own | {"eagle_aux_hidden_state_layer_ids": list(layers)} | changes


def random_head(config: dict[str, Any], seed: int = 0, scale: float = 0.3) -> Tensors:
    """Tensors of a head under the names that most published folders have, without an embedding."""
    generator = torch.Generator().manual_seed(seed)
    size, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or size // heads
    query, key = heads * head_dim, config["num_key_value_heads"] * head_dim
    fused = len(config["eagle_aux_hidden_state_layer_ids"]) * config.get("target_hidden_size", size)
    shapes = {"fc": (size, fused), "lm_head": (config["draft_vocab_size"], size)}
    shapes |= {
        f"midlayer.self_attn.{name}_proj": (outputs, 2 * size)
        for name, outputs in (("q", query), ("k", key), ("v", key))
    }
    shapes |= {"midlayer.self_attn.o_proj": (size, query), "midlayer.mlp.down_proj": (size, inner)}
    shapes |= {f"midlayer.mlp.{name}_proj": (inner, size) for name in ("gate", "up")}
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    if config.get("model_type") == "qwen3":
        for name in ("q_norm", "k_norm"):
            tensors[f"midlayer.self_attn.{name}.weight"] = 1 + 0.2 * torch.randn(head_dim, generator=generator)
    tensors["norm.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + 0.2 * torch.randn(fused, generator=generator)
    if config.get("fc_norm"):
        streams = len(config["eagle_aux_hidden_state_layer_ids"])
        for place in range(streams):
            tensors[f"fc_norm.{place}.weight"] = 1 + 0.2 * torch.randn(fused // streams, generator=generator)
    ids = torch.randperm(config["vocab_size"], generator=generator)[: config["draft_vocab_size"]].sort().values
    return tensors | maps(ids, config["vocab_size"])


def maps(ids: Tensor, vocab_size: int) -> Tensors:
    """`d2t` and `t2d` of a head whose tokens are these of its target's."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def write_head(path: pathlib.Path, config: dict[str, Any], tensors: Tensors) -> pathlib.Path:
    """Writes a folder."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


class PlainHead:
    """A head that computes whole sequences."""

    def __init__(self, config: dict[str, Any], tensors: Tensors, embedding: Tensor) -> None:
        """Takes its tensors, and the embedding of its target."""
        self.config, self.tensors, self.embedding = config, tensors, embedding
        self.head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.target_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))

    def states(self, streams: Tensor) -> Tensor:
        """[n, hidden_size] states of tokens from their streams side by side."""
        if self.config.get("norm_before_fc"):
            streams = self._norm("input_norm", streams)
        if self.config.get("fc_norm"):
            parts = streams.chunk(len(self.config["eagle_aux_hidden_state_layer_ids"]), dim=-1)
            streams = torch.cat([self._norm(f"fc_norm.{place}", part) for place, part in enumerate(parts)], dim=-1)
        return streams @ self.tensors["fc.weight"].T

    def forward(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens 1 to n of a sequence, each behind the state of the one before it.

        Returns:
            Logits [n, draft_vocab_size] of what follows each, and the head's own states [n,
            hidden_size] of them.
        """
        normed = self._norm("midlayer.hidden_norm", states)
        residual = normed if self.config.get("norm_before_residual") else states
        both = torch.cat((self._norm("midlayer.input_layernorm", self.embedding[tokens]), normed), dim=-1)
        residual = residual + self._attention(both)
        inner = self._norm("midlayer.post_attention_layernorm", residual)
        gate, up = (self._linear(f"midlayer.mlp.{name}_proj", inner) for name in ("gate", "up"))
        residual = residual + self._linear("midlayer.mlp.down_proj", torch.nn.functional.silu(gate) * up)
        hidden = self._norm("norm", residual)
        return self._linear("lm_head", hidden), hidden if self.config.get("norm_output") else residual

    def drafts(self, tokens: Sequence[int], streams: Tensor, count: int) -> list[int]:
        """The likeliest `count` tokens behind a sequence, one after the other.

        Args:
            tokens: At least two, the last of them not computed by the target yet.
            streams: [len(tokens) - 1, streams side by side] of the target, of all but the last.
            count: Tokens to draft.
        """
        behind, states = torch.tensor(list(tokens[1:])), self.states(streams)
        found: list[int] = []
        for _ in range(count):
            logits, own = self.forward(behind, states)
            found.append(int(self.target_ids[logits[-1].argmax()]))
            behind, states = torch.cat((behind, torch.tensor(found[-1:]))), torch.cat((states, own[-1:]))
        return found

    def _attention(self, both: Tensor) -> Tensor:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        query, key, value = (
            self._linear(f"midlayer.self_attn.{name}_proj", both).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
            for name in "qkv"
        )
        if "midlayer.self_attn.q_norm.weight" in self.tensors:
            query, key = (
                self._norm(f"midlayer.self_attn.{name}", part) for name, part in (("q_norm", query), ("k_norm", key))
            )
        query, key = self._rotated(query), self._rotated(key)
        key, value = (part.repeat_interleave(heads // kv_heads, dim=0) for part in (key, value))
        scores = query @ key.transpose(1, 2) / math.sqrt(self.head_dim)
        visible = torch.ones(len(both), len(both), dtype=torch.bool).tril()
        window = self.config.get("sliding_window")
        if window is not None:
            visible = visible.triu(1 - window)
        scores = scores.masked_fill(~visible, -torch.inf)
        # The first token's key is zeros, and so is its score.
        first = torch.zeros(heads, len(both), 1)
        if window is not None:
            # Tokens from 1 on; the window has moved past the first.
            first[:, window - 1 :] = -torch.inf
        scores = torch.cat((first, scores), dim=-1)
        mixed = scores.softmax(dim=-1)[:, :, 1:] @ value
        return self._linear("midlayer.self_attn.o_proj", mixed.transpose(0, 1).flatten(1))

    def _rotated(self, heads: Tensor) -> Tensor:
        half = self.head_dim // 2
        frequencies = self.config.get("rope_theta", 10_000.0) ** (-torch.arange(half) / half)
        angles = torch.arange(1, heads.shape[1] + 1)[:, None] * frequencies
        first, second = heads.split(half, dim=-1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
        )

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.get("rms_norm_eps", 1e-6)).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]


def write_random_head(path: pathlib.Path, model: pathlib.Path, draft_vocab_size: int = 1024) -> pathlib.Path:
    """Writes a random head for a model folder: of a part of its vocabulary, over three layers."""
    config = head_config(json.loads((model / "config.json").read_text()), draft_vocab_size, (2, 4, 5))
    return write_head(path, config, random_head(config, scale=0.05))
