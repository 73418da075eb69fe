"""A quantized folder as a reader takes it.

Its tensors, the weights they stand for, and transformers' model with such weights.
"""

from __future__ import annotations

import json
import pathlib

import safetensors.torch
import torch
import transformers

from headrace_quantize.compressed_tensors import matrix_of
from headrace_quantize.rounding.numbers import NumberFormat

Tensors = dict[str, torch.Tensor]


def tensors_in(folder: pathlib.Path) -> Tensors:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: Tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        found |= safetensors.torch.load_file(folder / file)
    assert found.keys() == index["weight_map"].keys()
    assert sum(tensor.nbytes for tensor in found.values()) == index["metadata"]["total_size"]
    return found


def dequantized(folder: pathlib.Path, form: NumberFormat) -> Tensors:
    """The weights as a reader dequantizes them, by the names of the original."""
    tensors = tensors_in(folder)
    found = {name: tensor for name, tensor in tensors.items() if ".weight_" not in name}
    for name in tensors:
        if name.endswith(".weight_scale"):
            projection = name.removesuffix(".weight_scale")
            found[f"{projection}.weight"] = matrix_of(projection, tensors, form).dequantized()
    return found


def transformers_model(original: pathlib.Path, weights: Tensors | None) -> transformers.PreTrainedModel:
    """A model of transformers with these weights; None: the original's."""
    weights = safetensors.torch.load_file(original / "model.safetensors") if weights is None else weights
    config = transformers.AutoConfig.from_pretrained(original)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing = model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys
    model.tie_weights()
    return model
