"""Places of the scales of 8-bit numbers, in groups and in blocks, for kernels.

Owns what `quantized_weight` says of their layout, for device functions. Scales of INT4's groups lie
as those of INT8's do; kernels load these with zero points, which lie alike.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from headrace_kernels.weight_formats.quantized_weight import BLOCKS_ROOM

_ROOM = tl.constexpr(BLOCKS_ROOM)


@triton.jit
def scale_places(rows, group, NUM_ROWS, LAYOUT: tl.constexpr):
    """Places of the scales of some outputs in some groups of inputs, which broadcast to each other.

    NUM_ROWS: all outputs of the weight.
    """
    if LAYOUT.kind == "fp8":
        GROUPS: tl.constexpr = (LAYOUT.num_inputs + LAYOUT.group - 1) // LAYOUT.group
        ROOM: tl.constexpr = (GROUPS + _ROOM - 1) // _ROOM * _ROOM
        places = rows // LAYOUT.scale_outputs * ROOM + group
    else:
        places = group * NUM_ROWS + rows
    return places
