"""Folders of gpt-oss with experts in MXFP4, as they are published."""

from __future__ import annotations

import json
import pathlib

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace_kernels.weight_formats.mxfp4 import allocate_mxfp4, quantize_mxfp4_rows

_PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def quantize_folder(path: pathlib.Path) -> dict[str, torch.Tensor]:
    """Rounds the experts of a plain folder in one file.

    Returns the numbers that transformers takes them for, by the names of its parameters.
    """
    tensors, numbers = load_file(path / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = published(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": _PLAIN}
    (path / "config.json").write_text(json.dumps(config))
    return numbers


def published(plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of weights [experts, inputs, outputs], rounded."""
    count, inputs, outputs = plain.shape
    rows = plain.transpose(1, 2).reshape(-1, inputs)
    weight = allocate_mxfp4(len(rows), inputs, torch.float32, torch.device("cpu"))
    quantize_mxfp4_rows(rows, weight, 0)
    words = weight.packed.to(torch.int32).unflatten(1, (-1, 1, 32))
    codes = (words >> torch.arange(0, 16, 4, dtype=torch.int32)[:, None] & 15).flatten(1)[:, :inputs]
    blocks = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    scales = weight.scales[:, : inputs // 32]
    return blocks.reshape(count, outputs, -1, 16).contiguous(), scales.reshape(count, outputs, -1).contiguous()
