"""Tensors and quantization_config of the folder that is written, in compressed-tensors' layout.

    <projection>.weight_packed      int32 [outputs, ceil(inputs x bits / 32)], lowest bits first,
                                    number + 2^(bits-1)
    <projection>.weight_scale       [outputs, groups] in the type of the original weight
    <projection>.weight_zero_point  int32 [ceil(outputs x bits / 32), groups], packed alike down the
    rows; only with zero points
    <projection>.weight_shape       int64 [2]
    <projection>.weight             of fp8: e4m3fn [outputs, inputs], with weight_scale [outputs, 1]

Owns both directions, since a run that is resumed goes on from what it wrote. Groups lie side by
side, also with --act-order (`actorder: weight`), so that there is no weight_g_idx.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headrace_quantize.config import QuantizeConfig
from headrace_quantize.rounding.numbers import NumberFormat, QuantizedMatrix

_WORD_BITS = 32
_BLOCK_NUMBERS = 1 << 22


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Packs whole numbers from -2^(bits-1) into int32 words along the last dimension.

    The last word is padded with zero bits.

    Args:
        numbers: [rows, columns], any type.
        bits: 4 or 8, so that none lies in two words.
    """
    return torch.cat([_packed(rows, bits) for rows in _row_blocks(numbers)])


def _packed(numbers: Tensor, bits: int) -> Tensor:
    per_word = _WORD_BITS // bits
    shifted = numbers.to(torch.int64) + (1 << (bits - 1))
    padded = functional.pad(shifted, (0, -shifted.shape[1] % per_word))
    places = torch.arange(0, _WORD_BITS, bits, device=numbers.device)
    words = (padded.view(len(padded), -1, per_word) << places).sum(-1)
    # The upper half of the unsigned range wraps around.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack(words: Tensor, bits: int, num_columns: int) -> Tensor:
    """What `pack` was given, fp32 [rows, num_columns]."""
    return torch.cat([_unpacked(rows, bits, num_columns) for rows in _row_blocks(words)])


def _row_blocks(matrix: Tensor) -> tuple[Tensor, ...]:
    """The rows in blocks, since packing takes several times the memory of what is packed."""
    return torch.split(matrix, max(_BLOCK_NUMBERS // matrix.shape[1], 1))


def _unpacked(words: Tensor, bits: int, num_columns: int) -> Tensor:
    places = torch.arange(0, _WORD_BITS, bits, device=words.device, dtype=torch.int32)
    numbers = (words[:, :, None] >> places) & ((1 << bits) - 1)
    return (numbers.flatten(1)[:, :num_columns] - (1 << (bits - 1))).float()


def tensors_of(name: str, matrix: QuantizedMatrix) -> dict[str, Tensor]:
    """Returns the tensors of one projection, on the host.

    Args:
        name: Name of the projection, without ".weight".
        matrix: Numbers, scales and zero points of the projection.
    """
    form = matrix.format
    found = {f"{name}.weight_scale": matrix.scales.to(form.scale_dtype)}
    if form.is_float:
        found[f"{name}.weight"] = matrix.numbers.to(torch.float8_e4m3fn)
    else:
        found[f"{name}.weight_packed"] = pack(matrix.numbers, form.bits)
        found[f"{name}.weight_shape"] = torch.tensor(matrix.numbers.shape)
        if not form.symmetric:
            found[f"{name}.weight_zero_point"] = pack(matrix.zeros.t(), form.bits).t()
    return {key: tensor.cpu().contiguous() for key, tensor in found.items()}


def matrix_of(name: str, tensors: Mapping[str, Tensor], form: NumberFormat) -> QuantizedMatrix:
    """The inverse of `tensors_of`."""
    scales = tensors[f"{name}.weight_scale"].float()
    if form.is_float:
        return QuantizedMatrix(form, tensors[f"{name}.weight"].float(), scales, torch.zeros_like(scales))
    num_outputs, num_inputs = tensors[f"{name}.weight_shape"].tolist()
    numbers = unpack(tensors[f"{name}.weight_packed"], form.bits, num_inputs)
    if form.symmetric:
        return QuantizedMatrix(form, numbers, scales, torch.zeros_like(scales))
    zeros = unpack(tensors[f"{name}.weight_zero_point"].t(), form.bits, num_outputs).t()
    return QuantizedMatrix(form, numbers, scales, zeros)


def quantization_config(config: QuantizeConfig, kept: tuple[str, ...]) -> dict[str, Any]:
    """What config.json gets.

    Args:
        config: The request.
        kept: Projections that are as they were.
    """
    is_float = config.scheme == "fp8"
    form = "float-quantized" if is_float else "pack-quantized"
    scheme = {
        "format": form,
        "input_activations": _ACTIVATIONS if is_float else None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": _weights(config, is_float),
    }
    return {
        "config_groups": {"group_0": scheme},
        "format": form,
        "global_compression_ratio": None,
        "ignore": ["lm_head", *kept],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


# Whoever multiplies in e4m3 rounds activations as they come, a scale for each token.
_ACTIVATIONS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": True,
    "group_size": None,
    "num_bits": 8,
    "observer": None,
    "observer_kwargs": {},
    "strategy": "token",
    "symmetric": True,
    "type": "float",
}


def _weights(config: QuantizeConfig, is_float: bool) -> dict[str, Any]:
    return {
        "actorder": "weight" if config.act_order else None,
        "block_structure": None,
        "dynamic": False,
        "group_size": config.group,
        "num_bits": config.number_bits,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "channel" if config.group is None else "group",
        "symmetric": config.symmetric,
        "type": "float" if is_float else "int",
    }
