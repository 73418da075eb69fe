"""Says in words how a model's products round their inputs on the device that runs it.

Owns the words. What is rounded is decided by the kernels' rules (`LowBitWeight.input_rounding`),
which are asked here, so that what is stated is what is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import torch

from headrace_backend.quantization.low_bit_weight import LowBitWeight
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.linear.quantized import WARM_ROWS

_NUMBERS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
_KEPT = "kept"


def describe_inputs(weights: Collection[LowBitWeight]) -> str:
    """Says how the layers' inputs are rounded: "int8 per token", "fp8 static from 33 tokens on".

    Args:
        weights: The layers' weights, on the device that multiplies by them.

    Returns:
        Each way once, that of most weights first; "" where all inputs are multiplied as they are
        and no scheme says otherwise.
    """
    # Weights of one kind round alike, and a rule is asked for some hundred numbers of rows.
    kinds = Counter((weight.launch_kind(), weight.stated_inputs) for weight in weights)
    by_kind = {weight.launch_kind(): weight for weight in weights}
    ways: Counter[str] = Counter()
    for (kind, stated), count in kinds.items():
        ways[_way(by_kind[kind], stated)] += count
    if set(ways) <= {_KEPT}:
        return ""
    return ", ".join(way for way, _ in ways.most_common())


def _way(weight: LowBitWeight, stated: InputRounding | None) -> str:
    first = next((rows for rows in range(1, max(WARM_ROWS) + 1) if weight.input_rounding(rows) is not None), None)
    if first is None:
        stated = stated or weight.quantized.inputs
        return _KEPT if stated is None else f"{_KEPT} (the folder says {_words(stated)})"
    rounding = weight.input_rounding(first)
    assert rounding is not None
    return _words(rounding) + (f" from {first} tokens on" if first > 1 else "")


def _words(rounding: InputRounding) -> str:
    if rounding.scale is not None:
        shared = "static"
    else:
        shared = f"per {rounding.group_size} inputs" if rounding.group_size else "per token"
    zeros = "" if rounding.is_symmetric else " with zero points"
    return f"{_NUMBERS[rounding.number]} {shared}{zeros}"
