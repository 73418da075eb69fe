"""The demo model for training and evaluation: a plain PyTorch Llama in two sizes.

Owns the architecture (RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embeddings)
and the writing and reading of `config.json` and `model.safetensors`. Parameter names are those of
`LlamaForCausalLM`, so a state dict is a checkpoint. Does not own the optimizer (`train.py`) nor the
sampling loop (`demo_generation.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as functional
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

BOS_ID, EOS_ID, END_ID, PAD_ID = 0, 1, 2, 3


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model; the names are those of config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048


def target_shape(vocab_size: int) -> ModelShape:
    """About 7 M parameters: 13.3 MiB in bf16."""
    return ModelShape(vocab_size, 256, 704, 8, 8, 4)


def draft_shape(vocab_size: int) -> ModelShape:
    """About 0.9 M parameters: 1.7 MiB in bf16."""
    return ModelShape(vocab_size, 128, 352, 2, 4, 2)


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in the input's dtype."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight.float()).to(x.dtype)


def rotary_tables(shape: ModelShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the positions' angles, each [max_position_embeddings, head_dim], fp32."""
    steps = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    positions = torch.arange(shape.max_position_embeddings, device=device, dtype=torch.float32)
    angles = torch.outer(positions, shape.rope_theta**-steps).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions to [batch, heads, tokens, head_dim].

    Halves are paired as in Llama's Hugging Face layout.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over the whole row, or over the positions of a cache."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.head_dim = shape.head_dim
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, tokens, hidden] -> query, key and value as [batch, heads, tokens, head_dim]."""
        batch, tokens, _ = x.shape
        query = self.q_proj(x).view(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)
        key = self.k_proj(x).view(batch, tokens, self.num_kv_heads, self.head_dim).transpose(1, 2)
        value = self.v_proj(x).view(batch, tokens, self.num_kv_heads, self.head_dim).transpose(1, 2)
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention over key and value, causal if there is no mask.

        Returns [batch, tokens, hidden].
        """
        groups = self.num_heads // self.num_kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return projected

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same shape, causal."""
        return self.attend(*self.project(x, cos, sin), None)


class Mlp(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        projected: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Block(nn.Module):
    """One decoder layer, norms first."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers and final norm; named as in the HF checkpoint."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def blocks(self) -> list[Block]:
        """The layers in order."""
        return [cast(Block, layer) for layer in self.layers]


class DemoModel(nn.Module):
    """A causal Llama with tied embeddings."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self._initialise()

    def _initialise(self) -> None:
        """Normal weights; what writes to the residual stream starts at zero.

        So every layer starts as identity.
        """
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif name.endswith("embed_tokens.weight"):
                nn.init.normal_(parameter, std=0.02)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def hidden(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Token ids [batch, tokens] -> normed hidden states [batch, tokens, hidden]."""
        x: Tensor = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))
        for block in self.model.blocks():
            x = block(x, cos, sin)
        normed: Tensor = self.model.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab], through the tied embedding."""
        return functional.linear(hidden, self.model.embed_tokens.weight)


def save_folder(model: DemoModel, folder: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors as transformers would.

    The weights are bf16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **model.shape.__dict__,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": [END_ID, EOS_ID],
        "pad_token_id": PAD_ID,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    generation = {
        "bos_token_id": BOS_ID,
        "eos_token_id": [END_ID, EOS_ID],
        "pad_token_id": PAD_ID,
        "do_sample": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load_folder(folder: Path, device: torch.device, dtype: torch.dtype) -> DemoModel:
    """Reads a folder that `save_folder` wrote.

    Raises:
        RuntimeError: If the checkpoint's tensors are not exactly the model's.
    """
    config = json.loads((folder / "config.json").read_text())
    shape = ModelShape(**{field: config[field] for field in ModelShape.__dataclass_fields__})
    model = DemoModel(shape)
    model.load_state_dict(load_file(str(folder / "model.safetensors")))
    return model.to(device=device, dtype=dtype).eval()
