"""Folders as bitsandbytes stores NF4 in them, with numpy alone.

Tensors are flattened, in blocks of 64, with scales in 8 bits under nested scales of 256.

Independent of the product's NF4: written from the QLoRA paper and the names and shapes of the
stored tensors.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import safetensors.torch
import torch

Floats = npt.NDArray[np.float32]
NUMBERS = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32)  # fmt: skip


def scale_table() -> Floats:
    """The 256 values of a scale, of both signs; 0 and 1 among them.

    Each decade has twice as many as the one below.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade
        for part in range(parts):
            middle = 0.1 + 0.9 * (part + 0.5) / parts
            numbers += [middle * 10.0 ** (decade - 6), -middle * 10.0 ** (decade - 6)]
    return np.array(sorted(numbers), np.float32)


def nearest(values: Floats, table: Floats) -> npt.NDArray[np.uint8]:
    return np.abs(values[..., None] - table).argmin(-1).astype(np.uint8)


def quantize(values: Floats, double: bool) -> tuple[dict[str, npt.NDArray[Any]], Floats]:
    """A weight's stored tensors by the end of their names, and the values they stand for.

    The name "" is the weight's own.
    """
    blocks = values.reshape(-1, 64)
    scales = np.abs(blocks).max(1).astype(np.float32)
    # In parts, because `nearest` compares each value with all 16.
    divisors = np.array_split(np.maximum(scales, 1e-30)[:, None], 64)
    parts = zip(np.array_split(blocks, 64), divisors, strict=True)
    codes = np.concatenate([nearest(part / divisor, NUMBERS) for part, divisor in parts])
    flat = codes.reshape(-1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": list(values.shape)}
    stored: dict[str, npt.NDArray[Any]] = {"": (flat[0::2] << 4 | flat[1::2])[:, None], ".quant_map": NUMBERS}
    if double:
        offset = np.float32(scales.mean())
        padded = np.zeros(-(-len(scales) // 256) * 256, np.float32)
        padded[: len(scales)] = scales - offset
        nested = np.abs(padded.reshape(-1, 256)).max(1)
        table = scale_table()
        bits = nearest((padded.reshape(-1, 256) / np.maximum(nested, 1e-30)[:, None]), table).reshape(-1)[: len(scales)]
        scales = (table[bits] * np.repeat(nested, 256)[: len(scales)] + offset).astype(np.float32)
        stored |= {".absmax": bits, ".nested_absmax": nested, ".nested_quant_map": table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
    else:
        stored[".absmax"] = scales
    stored[".quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return stored, (NUMBERS[codes] * scales[:, None]).reshape(values.shape)


def write(
    source: pathlib.Path, target: pathlib.Path, double: bool = True, skip: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """A folder's layers in NF4, all but those whose names contain one of `skip`.

    Returns the numbers that the tensors stand for.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, target / file.name)
    stored: dict[str, npt.NDArray[Any]] = {}
    exact: dict[str, torch.Tensor] = {}
    for name, tensor in safetensors.torch.load_file(source / "model.safetensors").items():
        values = tensor.float().numpy()
        if values.ndim == 1 or ".layers." not in name or any(part in name for part in skip):
            stored[name], exact[name] = values, torch.from_numpy(values)
            continue
        parts, numbers = quantize(values, double)
        stored |= {name + end: part for end, part in parts.items()}
        exact[name] = torch.from_numpy(numbers)
    safetensors.numpy.save_file(stored, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    return exact
