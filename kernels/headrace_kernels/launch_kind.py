"""What of an operand a launch depends on.

A rule takes its way, a library chooses its kernel, and Triton compiles its version by it.

Owns that list. Numbers in a tensor are not on it, nor floats that a kernel is given, nor where a
tensor lies but for how that address is aligned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable

from torch import Tensor

# Bytes up to which alignments differ. Triton looks at 16, and any tensor with an allocation of its
# own has 64 or more, on whatever device.
_ALIGNMENT = 64


def launch_kind(operand: object) -> Hashable:
    """Key of an operand: operands with equal keys are launched alike.

    A tensor's key holds dtype, sizes, strides and alignment; a dataclass's (a quantized weight is
    one) the keys of its fields.

    A float stands for any other, other values for themselves.
    """
    if isinstance(operand, Tensor):
        alignment = math.gcd(operand.data_ptr(), _ALIGNMENT)
        return operand.dtype, tuple(operand.shape), operand.stride(), alignment
    if dataclasses.is_dataclass(operand):
        return tuple(launch_kind(getattr(operand, field.name)) for field in dataclasses.fields(operand))
    if isinstance(operand, float):
        return float
    assert isinstance(operand, Hashable)
    return operand
