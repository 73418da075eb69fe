"""Folders of GLM-4.5 with the layer that predicts the token after the next, and what it predicts.

transformers leaves that layer out. A folder is written from its model of one layer more, whose last
one becomes the layer behind, with random norms and projection before it; so is the oracle.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 98,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
    "attention_bias": True,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
}


def write_mtp_model(path: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Writes a folder as people publish it, of random weights.

    Args:
        path: The folder.
        changes: Fields of config.json that are other than `SIZES`.
    """
    config = transformers.Glm4MoeConfig(**{**SIZES, **changes})
    config.eos_token_id, config.bos_token_id, config.pad_token_id = changes.get("eos_token_id"), None, None
    num_layers, size = config.num_hidden_layers, config.hidden_size
    config.num_hidden_layers += 1
    torch.manual_seed(1)
    model = transformers.Glm4MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        # Biases and norms that do something.
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, float(name.endswith("norm.weight")), 0.2)
    model.save_pretrained(path)
    stated = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(stated | {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1})
    )
    tensors = load_file(path / "model.safetensors")
    prefix = f"model.layers.{num_layers}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = 1 + 0.2 * torch.randn(size)
    tensors[f"{prefix}eh_proj.weight"] = torch.randn(size, 2 * size) * 0.3
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors.get(
        "lm_head.weight", tensors["model.embed_tokens.weight"]
    ).clone()
    save_file(tensors, path / "model.safetensors")
    return path


def make_agreeing(path: pathlib.Path) -> None:
    """Changes a folder so that the layer behind the last one predicts what the model says.

    Layers add next to nothing to the stream, and the layer behind looks at the embedding alone. So
    both say what follows a token from the token itself.
    """
    tensors = load_file(path / "model.safetensors")
    num_layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    prefix = f"model.layers.{num_layers}."
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(1e-4)
    size = len(tensors["model.norm.weight"])
    tensors[f"{prefix}enorm.weight"] = torch.ones(size)
    tensors[f"{prefix}eh_proj.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    tensors[f"{prefix}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path / "model.safetensors")


class MtpOracle:
    """What the layer behind the last one should draft, by transformers' own layer."""

    def __init__(self, path: pathlib.Path) -> None:
        """Reads a folder twice: as it is published, and as a model of one layer more."""
        self.model = transformers.Glm4MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        config = transformers.Glm4MoeConfig.from_pretrained(path)
        num_layers = config.num_hidden_layers
        config.num_hidden_layers += 1
        longer = transformers.Glm4MoeForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).eval()
        self._layer, self._rotary = longer.model.layers[num_layers], longer.model.rotary_emb
        # A cache of one layer.
        self._layer.self_attn.layer_idx = 0
        self._config = config
        tensors = load_file(path / "model.safetensors")
        prefix = f"model.layers.{num_layers}."
        self._own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """The likeliest `count` tokens behind a sequence whose last token is not computed yet."""
        states = self.model.model(torch.tensor([list(tokens[:-1])])).last_hidden_state[0]
        behind, found = list(tokens[1:]), list[int]()
        for _ in range(count):
            own = self._states(torch.tensor(behind), states)
            found.append(int(self.model.lm_head(own[-1]).argmax()))
            behind, states = [*behind, found[-1]], torch.cat((states, own[-1:]))
        return found

    def _states(self, tokens: Tensor, states: Tensor) -> Tensor:
        """The layer's own states of tokens 1 to n, each behind the state of the one before it."""
        embedded = self._norm("enorm", self.model.model.embed_tokens(tokens))
        both = torch.cat((embedded, self._norm("hnorm", states)), dim=-1)
        stream = (both @ self._own["eh_proj.weight"].T)[None]
        positions = torch.arange(1, 1 + len(tokens))[None]
        # The first token has no state before it: its key and value are zeros.
        cache = transformers.DynamicCache()
        nothing = torch.zeros(1, self._config.num_key_value_heads, 1, self._config.head_dim)
        cache.update(nothing, nothing.clone(), 0)
        mask = torch.ones(len(tokens), 1 + len(tokens)).tril(1).log()[None, None]
        out = self._layer(
            stream,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            position_embeddings=self._rotary(stream, positions),
        )
        return self._norm("shared_head.norm", out[0])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self._config.rms_norm_eps).rsqrt()
        return x * scale * self._own[f"{name}.weight"]
