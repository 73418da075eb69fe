"""Folders as other tools quantize them, written and read back by code of the tests' own.

The code follows the formats' public descriptions.

`quantize_folder` rounds the layers of a plain folder to nearest and writes them in a recipe's
layout. `restored` unpacks one layer from its tensors by numpy, one number at a time where that is
clearer, and is what the server's weights are compared with. Shares nothing with the code under
test.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch

Array = npt.NDArray[Any]
Tensors = dict[str, torch.Tensor]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
          "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way to quantize a layer, and the layout for it."""

    # gptq, gptq_v2, awq, packed, whole, fp8, fp8-inv
    layout: str
    bits: int = 4
    # Inputs of a group; 0: the whole row; -1: one scale for the tensor; 128 for fp8: blocks.
    group: int = 32
    symmetric: bool = True
    ordered: bool = False
    # "", dynamic, static, each also "... with zero points"; dynamic in fp8 blocks: groups of 128
    # inputs.
    activations: str = ""

    def config(self) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        if self.layout in ("gptq", "gptq_v2"):
            return {"quant_method": "gptq", "bits": self.bits, "group_size": self.group or -1, "sym": self.symmetric,
                    "desc_act": self.ordered, "checkpoint_format": self.layout, "lm_head": False}  # fmt: skip
        if self.layout == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group or -1, "version": "gemm",
                    "zero_point": True, "modules_to_not_convert": None}  # fmt: skip
        if self.layout == "fp8-inv" or (self.layout == "fp8" and self.group == -1 and not self.activations):
            return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                    "weight_block_size": [128, 128] if self.layout == "fp8-inv" else None}  # fmt: skip
        return self._compressed()

    def _compressed(self) -> dict[str, Any]:
        is_fp8 = self.layout == "fp8"
        strategy = {0: "channel", -1: "tensor"}.get(self.group, "block" if is_fp8 else "group")
        weights: dict[str, Any] = {"num_bits": self.bits, "type": "float" if is_fp8 else "int", "strategy": strategy,
                   "symmetric": self.symmetric, "group_size": self.group if strategy == "group" else None,
                   "dynamic": False, "actorder": "group" if self.ordered else None}  # fmt: skip
        if strategy == "block":
            weights["block_structure"] = [128, 128]
        inputs = None
        if self.activations:
            is_dynamic = self.activations.startswith("dynamic")
            inputs = {"num_bits": 8, "type": weights["type"], "symmetric": "zero points" not in self.activations,
                      "dynamic": is_dynamic, "strategy": "token" if is_dynamic else "tensor"}  # fmt: skip
            if is_dynamic and strategy == "block":
                inputs |= {"strategy": "group", "group_size": 128}
        form = "pack-quantized" if self.layout == "packed" else "float-quantized" if is_fp8 else "int-quantized"
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
                "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None}  # fmt: skip

    @property
    def rounds_inputs(self) -> str:
        """What shares a scale of inputs, "token", "group" or "static".

        It is "" where inputs stay as they are.
        """
        if self.activations.startswith("static"):
            return "static"
        is_fp8 = self.config()["quant_method"] == "fp8"
        if not self.activations and not is_fp8:
            return ""
        return "group" if self.is_float and self.group == 128 else "token"

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs [num_tokens, size] fp32 as this recipe's layers multiply them."""
        if not self.rounds_inputs:
            return x
        # In fp32, as the format's own package: the largest number of a token is half way between
        # two of int8, and fp64 would choose others.
        wide, largest, least = x, 448.0 if self.is_float else 127.0, -448.0 if self.is_float else -128.0
        if self.rounds_inputs == "group":
            return torch.cat([_rounded_inputs(part, largest, least, self) for part in wide.split(128, 1)], 1)
        return _rounded_inputs(wide, largest, least, self)

    @property
    def is_float(self) -> bool:
        return self.layout in ("fp8", "fp8-inv")


# Of static inputs.
INPUT_SCALE, INPUT_ZERO = 0.05, -9


def _rounded_inputs(wide: torch.Tensor, largest: float, least: float, recipe: Recipe) -> torch.Tensor:
    zeros = torch.zeros(len(wide), 1)
    has_zeros = "zero points" in recipe.activations
    if recipe.rounds_inputs == "static":
        scales, zeros = torch.full_like(zeros, INPUT_SCALE), zeros + (INPUT_ZERO if has_zeros else 0)
    elif has_zeros:
        low, high = wide.amin(1, keepdim=True).clamp(max=0), wide.amax(1, keepdim=True).clamp(min=0)
        scales = (high - low) / 255
        zeros = (-128 - low / scales).round()
    else:
        scales = wide.abs().amax(1, keepdim=True) / ((largest - least) / 2)
    numbers = (wide / scales + zeros).clamp(least, largest)
    numbers = numbers.to(torch.float8_e4m3fn).float() if recipe.is_float else numbers.round()
    return (numbers - zeros) * scales


def quantize_layer(weight: Array, recipe: Recipe, order: Array) -> Tensors:
    """Tensors of one layer, by suffix. `order` are its inputs as groups take them."""
    if recipe.is_float:
        return _float_layer(weight, recipe)
    num_inputs = weight.shape[1]
    group = recipe.group if recipe.group > 0 else num_inputs
    groups = np.empty(num_inputs, np.int32)
    groups[order] = np.arange(num_inputs) // group
    numbers, scales, zeros = _rounded(weight, groups, recipe)
    return {"gptq": _gptq, "gptq_v2": _gptq, "awq": _awq, "packed": _packed, "whole": _whole}[recipe.layout](
        numbers, scales, zeros, groups, recipe
    )


def _rounded(weight: Array, groups: Array, recipe: Recipe) -> tuple[Array, Array, Array]:
    """Numbers from 0 on [N, K], fp16 scales [N, G], zero points [N, G]."""
    count, top, middle = int(groups.max()) + 1, (1 << recipe.bits) - 1, 1 << (recipe.bits - 1)
    scales, zeros = np.empty((len(weight), count), np.float16), np.empty((len(weight), count), np.int64)
    numbers = np.empty(weight.shape, np.int64)
    for group in range(count):
        columns = groups == group
        part = weight[:, columns]
        if recipe.symmetric:
            scale = (np.abs(part).max(1) / (middle - 1)).astype(np.float16)
            zero = np.full(len(weight), middle)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = ((high - low) / top).astype(np.float16)
            zero = np.clip(np.round(-low / scale.astype(np.float64)), 0, top).astype(np.int64)
        scales[:, group], zeros[:, group] = scale, zero
        rounded = np.round(part / scale.astype(np.float64)[:, None]) + zero[:, None]
        numbers[:, columns] = np.clip(rounded, 0, top)
    if recipe.group == -1:
        scales[:] = scales.max()
        numbers = np.clip(np.round(weight / float(scales[0, 0])) + middle, 0, top).astype(np.int64)
    return numbers, scales, zeros


def words(values: Array, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Packs the last axis into int32, lowest bits first.

    The i-th place takes value `order[i]` of a word's.
    """
    per_word = 32 // bits
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % per_word)])
    parts = padded.reshape(*values.shape[:-1], -1, per_word).astype(np.uint32)
    total = np.zeros(parts.shape[:-1], np.uint32)
    for place, index in enumerate(order or range(per_word)):
        total |= parts[..., index] << np.uint32(bits * place)
    return torch.from_numpy(total.view(np.int32).copy())


def _gptq(numbers: Array, scales: Array, zeros: Array, groups: Array, recipe: Recipe) -> Tensors:
    stored = zeros - (1 if recipe.layout == "gptq" else 0)
    return {
        "qweight": words(numbers, recipe.bits).t().contiguous(),
        "qzeros": words(stored.T, recipe.bits),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(groups),
    }


def _awq(numbers: Array, scales: Array, zeros: Array, groups: Array, recipe: Recipe) -> Tensors:
    return {
        "qweight": words(numbers.T, 4, AWQ_ORDER),
        "qzeros": words(zeros.T, 4, AWQ_ORDER),
        "scales": torch.from_numpy(scales.T.copy()),
    }


def _packed(numbers: Array, scales: Array, zeros: Array, groups: Array, recipe: Recipe) -> Tensors:
    tensors = {
        "weight_packed": words(numbers, recipe.bits),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor(numbers.shape),
    }
    if not recipe.symmetric:
        tensors["weight_zero_point"] = words(zeros.T, recipe.bits).t().contiguous()
    if recipe.ordered:
        tensors["weight_g_idx"] = torch.from_numpy(groups)
    return tensors


def _whole(numbers: Array, scales: Array, zeros: Array, groups: Array, recipe: Recipe) -> Tensors:
    middle = 1 << (recipe.bits - 1)
    tensors = {
        "weight": torch.from_numpy((numbers - middle).astype(np.int8)),
        "weight_scale": torch.from_numpy(scales[:1, 0] if recipe.group == -1 else scales),
    }
    if not recipe.symmetric:
        tensors["weight_zero_point"] = torch.from_numpy((zeros - middle).astype(np.int8))
    if recipe.rounds_inputs == "static":
        tensors["input_scale"] = torch.tensor([INPUT_SCALE])
    if recipe.activations == "static with zero points":
        tensors["input_zero_point"] = torch.tensor([INPUT_ZERO], dtype=torch.int8)
    return tensors


def _float_layer(weight: Array, recipe: Recipe) -> Tensors:
    wide = torch.from_numpy(weight).float()
    if recipe.group == 128 or recipe.layout == "fp8-inv":
        rows, columns = -(-wide.shape[0] // 128), -(-wide.shape[1] // 128)
        scales = torch.empty(rows, columns)
        for row in range(rows):
            for column in range(columns):
                scales[row, column] = wide[128 * row :, 128 * column :][:128, :128].abs().max() / 448
        spread = scales.repeat_interleave(128, 0)[: len(wide)].repeat_interleave(128, 1)[:, : wide.shape[1]]
    else:
        scales = (wide.abs().amax(1, keepdim=True) if recipe.group == 0 else wide.abs().max().view(1)) / 448
        spread = scales.expand_as(wide) if recipe.group == 0 else scales
    name = "weight_scale_inv" if recipe.layout == "fp8-inv" else "weight_scale"
    tensors = {"weight": (wide / spread).clamp(-448, 448).to(torch.float8_e4m3fn), name: scales}
    if recipe.rounds_inputs == "static":
        tensors["input_scale"] = torch.tensor([INPUT_SCALE])
    if recipe.activations == "static with zero points":
        tensors["input_zero_point"] = torch.tensor([INPUT_ZERO], dtype=torch.int8)
    return tensors


def _e4m3_values() -> Array:
    """What each byte stands for: sign, 4 bits of exponent, 3 of mantissa."""
    values = np.empty(256)
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values[code] = -size if code & 128 else size
    return values


def _unpacked(packed: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """The inverse of `words`, one place at a time."""
    per_word, raw = 32 // bits, packed.numpy().view(np.uint32).astype(np.int64)
    found = np.empty((*raw.shape, per_word), np.int64)
    for place, index in enumerate(order or range(per_word)):
        found[..., index] = (raw >> (bits * place)) % (1 << bits)
    return found.reshape(*raw.shape[:-1], -1)


def restored(tensors: Mapping[str, torch.Tensor], recipe: Recipe) -> Array:
    """The weight [N, K] fp64 that a layer's tensors stand for."""
    if recipe.is_float:
        return _restored_float(tensors)
    middle = 1 << (recipe.bits - 1)
    if recipe.layout in ("gptq", "gptq_v2", "awq"):
        is_awq = recipe.layout == "awq"
        order = AWQ_ORDER if is_awq else None
        numbers = (
            _unpacked(tensors["qweight"], 4, order).T
            if is_awq
            else _unpacked(tensors["qweight"].t().contiguous(), recipe.bits)
        )
        zeros = (_unpacked(tensors["qzeros"], recipe.bits, order) + (recipe.layout == "gptq")).T
        scales = tensors["scales"].double().numpy().T
    elif recipe.layout == "packed":
        numbers, scales = _unpacked(tensors["weight_packed"], recipe.bits), tensors["weight_scale"].double().numpy()
        zeros = np.full(scales.shape, middle)
        if not recipe.symmetric:
            zeros = _unpacked(tensors["weight_zero_point"].t().contiguous(), recipe.bits).T[: len(numbers)]
    else:
        numbers = tensors["weight"].numpy().astype(np.int64)
        scales = tensors["weight_scale"].double().numpy().reshape(-1, max(tensors["weight_scale"].shape[-1], 1))
        zeros = tensors.get("weight_zero_point", torch.zeros(scales.shape)).numpy().astype(np.int64)
    groups = tensors.get("g_idx", tensors.get("weight_g_idx"))
    num_groups = scales.shape[1]
    places = np.arange(numbers.shape[1]) * num_groups // numbers.shape[1] if groups is None else groups.numpy()
    return np.asarray((numbers - zeros[:, places]) * scales[:, places])


def _restored_float(tensors: Mapping[str, torch.Tensor]) -> Array:
    numbers = _e4m3_values()[tensors["weight"].view(torch.uint8).numpy()]
    scales = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    assert scales is not None
    factors = scales.double().numpy()
    if factors.ndim == 2 and factors.shape[1] >= 1 and factors.shape != (len(numbers), 1):
        factors = np.kron(factors, np.ones((128, 128)))[: numbers.shape[0], : numbers.shape[1]]
    return np.asarray(numbers * factors)


def layer_names(num_layers: int) -> list[str]:
    """All layers that are quantized."""
    return [f"model.layers.{layer}.{name}" for layer in range(num_layers) for name in LAYERS]


def _projections(stored: Tensors) -> list[str]:
    """The quantized layers of a folder, fused ones among them, in the order of a forward pass."""
    linear = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj")
    kinds = ("self_attn.qkv_proj", *LAYERS[:4], *linear, "mlp.gate_up_proj", *LAYERS[4:])
    names = sorted({int(name.split(".")[2]) for name in stored if name.startswith("model.layers.")})
    layers = [f"model.layers.{layer}.{kind}" for layer in names for kind in kinds]
    experts = sorted(name.removesuffix(".weight") for name in stored if ".experts." in name or ".shared_expert" in name)
    experts = [name for name in experts if not name.endswith("shared_expert_gate")]
    return [name for name in layers if f"{name}.weight" in stored] + experts


@dataclasses.dataclass
class Quantized:
    """A folder in a recipe's format, and one of plain fp32 with the same weights."""

    path: pathlib.Path
    plain: pathlib.Path
    tensors: Tensors
    weights: dict[str, torch.Tensor]

    def rewrite(self) -> None:
        """Writes the tensors as they are now."""
        safetensors.torch.save_file(
            {name: value.contiguous() for name, value in self.tensors.items()}, self.path / "model.safetensors"
        )

    def change_config(self, **changes: Any) -> None:
        """Changes `quantization_config`; None removes a field."""
        file = self.path / "config.json"
        config = json.loads(file.read_text())
        config["quantization_config"] |= changes
        file.write_text(json.dumps(config))


def quantize_folder(
    source: pathlib.Path,
    into: pathlib.Path,
    recipe: Recipe | Mapping[str, Recipe | None],
    config: Mapping[str, Any] | None = None,
    one_order: bool = True,
) -> Quantized:
    """Writes a folder in a recipe's format.

    Args:
        source: A plain folder with one file of weights.
        into: Two folders are made in it.
        recipe: Recipe of all layers, or one for each layer, None for layers that stay plain.
        config: `quantization_config` where recipes are several.
        one_order: Whether layers of the same inputs have them in the same order.
    """
    path, plain = into / "quantized", into / "plain"
    for folder in (path, plain):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "draft", "scripts"))
    stored = safetensors.torch.load_file(source / "model.safetensors")
    values = json.loads((source / "config.json").read_text())
    tensors, weights = dict(stored), {}
    plain_tensors = {name: value.float() for name, value in stored.items()}
    for index, name in enumerate(_projections(stored)):
        own = recipe if isinstance(recipe, Recipe) else recipe[name]
        if own is None:
            continue
        weight = tensors.pop(f"{name}.weight").double().numpy()
        inputs = {"o_proj": 1, "down_proj": 2, "w2": 2}.get(name.rsplit(".", 1)[1], 0) if one_order else index
        order = (
            np.random.default_rng(inputs).permutation(weight.shape[1]) if own.ordered else np.arange(weight.shape[1])
        )
        found = quantize_layer(weight, own, order)
        tensors.update((f"{name}.{suffix}", value) for suffix, value in found.items())
        weights[name] = torch.from_numpy(restored(found, own))
        plain_tensors[f"{name}.weight"] = weights[name].float()
    safetensors.torch.save_file(
        {name: value.contiguous() for name, value in plain_tensors.items()}, plain / "model.safetensors"
    )
    (plain / "config.json").write_text(json.dumps({**values, "torch_dtype": "float32"}))
    stated = dict(config) if config is not None else recipe.config() if isinstance(recipe, Recipe) else {}
    (path / "config.json").write_text(json.dumps({**values, "quantization_config": stated}))
    made = Quantized(path, plain, tensors, weights)
    made.rewrite()
    return made
