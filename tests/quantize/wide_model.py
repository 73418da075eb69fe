"""Random models of any number of layers with the demo's tokenizer, a file for each layer.

So none is ever whole in memory.
"""

from __future__ import annotations

import json
import pathlib

import safetensors.torch
import torch
from tests.quantize.quantize_parts import DRAFT

from headrace_model_folder import expected_tensors
from headrace_model_folder.config import parse_config


def write_model(folder: pathlib.Path, num_layers: int, hidden_size: int = 64, inner_size: int = 128) -> pathlib.Path:
    """A Llama in bf16 whose weights have the usual size."""
    folder.mkdir()
    config = json.loads((DRAFT / "config.json").read_text()) | {
        "hidden_size": hidden_size,
        "intermediate_size": inner_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 64,
        "head_dim": 32,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes((DRAFT / "tokenizer.json").read_bytes())
    shapes, places = expected_tensors(parse_config(config)), {}
    generator = torch.Generator().manual_seed(1)
    for part in [*(f"model.layers.{index}." for index in range(num_layers)), ""]:
        names = [name for name in shapes if name.startswith(part) and name not in places]
        tensors = {name: _drawn(shapes[name], generator) for name in names}
        file = f"part-{part.replace('.', '-')}end.safetensors"
        safetensors.torch.save_file(tensors, folder / file)
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, generator=generator) * shape[1] ** -0.5).bfloat16()
