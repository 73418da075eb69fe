"""SwiGLU: silu(gate) * up over the two halves of one projection."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """See `swiglu`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def swiglu(gate_up: Tensor) -> Tensor:
    """The gated activation of an MLP.

    Args:
        gate_up: [num_tokens, 2 * size], the gate in the first half, the value in the second.

    Returns:
        [num_tokens, size] in the type of gate_up.
    """
    return swiglu_reference(gate_up)
