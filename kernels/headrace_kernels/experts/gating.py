"""What an expert does between its projections: silu(gate) * up, or another form of it.

    gelu:    gelu(gate) * up, GELU in its approximation by tanh, as in `swiglu`
    clamped: (up + 1) * gate * sigmoid(alpha * gate), the gate at most `limit`, up within +-`limit`

A kernel is compiled for one `Gating`, and computes it in fp32.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.swiglu import swiglu_reference


class Gating(NamedTuple):
    """How gate and up become an inner element: one constexpr of every kernel."""

    is_clamped: bool = False
    alpha: float = 1.0
    limit: float = 0.0
    is_gelu: bool = False


SILU = Gating()
GELU = Gating(is_gelu=True)
# 2 sqrt(2 / pi), as in `swiglu`.
_GELU_SLOPE = tl.constexpr(1.5957691216057308)


def gated_reference(gate_up: Tensor, gating: Gating) -> Tensor:
    """[num_tokens, gates and as many ups] -> [num_tokens, inner] in the same type."""
    if not gating.is_clamped:
        return swiglu_reference(gate_up, "gelu_tanh" if gating.is_gelu else "silu")
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    return ((up + 1) * (gate * (gate * gating.alpha).sigmoid())).to(gate_up.dtype)


@triton.jit
def gated(gate, up, GATING: tl.constexpr):
    """Inner elements of gates and ups, fp32. NaN stays NaN."""
    if GATING.is_clamped:
        gate = tl.where(gate > GATING.limit, GATING.limit, gate)
        up = tl.where(up > GATING.limit, GATING.limit, tl.where(up < -GATING.limit, -GATING.limit, up))
        inner = (up + 1.0) * gate * tl.sigmoid(GATING.alpha * gate)
    elif GATING.is_gelu:
        inner = gate * tl.sigmoid(_GELU_SLOPE * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        inner = gate * tl.sigmoid(gate) * up
    return inner
