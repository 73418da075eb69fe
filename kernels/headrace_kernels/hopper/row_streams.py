"""What kernels of few rows share that stream a weight through shared memory, each byte once.

Owns the copies of a step's weight and x in one box each, the descriptors of those boxes, classes of
rows, and how sums of slices become a program's outputs. Kernels are
`linear.dense_small_batch_sm90`'s, which says what slices are, and `linear.stream_8bit_sm90`'s.
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace_kernels.hopper.launch import box_descriptor

# Rows that a program multiplies: those of a product are the first of these that has room.
ROW_CLASSES = (8, 16, 32)
MAX_WARPGROUP_ROWS = ROW_CLASSES[-1]
# Bytes of a row that the copy engine's widest pattern has.
_PATTERN_BYTES = 128


def rows_class(num_rows: int) -> int:
    """Rows that a program multiplies, of `ROW_CLASSES`."""
    return next(rows for rows in ROW_CLASSES if num_rows <= rows)


def weight_descriptor(words: Tensor, slices: int, subs: int, block_n: int, gated: bool) -> TensorDescriptor:
    """Steps of a program's outputs: [128 bytes of inputs, gate or up, slice, output, word].

    Args:
        words: [N, K] numbers, or [2 N, K] with the gate first.
        slices: Parts of the inputs side by side.
        subs: Pieces of 128 bytes of each slice in a step.
        block_n: Outputs of a program, of each half.
        gated: A program has outputs of both halves.
    """
    sides, width = 2 if gated else 1, _PATTERN_BYTES // words.element_size()
    share = words.shape[1] // slices
    view = words.view(sides, -1, slices, share // width, width).permute(3, 0, 2, 1, 4)
    return box_descriptor(view, [subs, sides, slices, block_n, width])


def x_descriptor(x: Tensor, slices: int, pieces: int, rows: int) -> TensorDescriptor:
    """Steps of all rows: [64 inputs, slice, row, input], as many pieces of 64 as a step has."""
    width = _PATTERN_BYTES // x.element_size()
    view = x.view(len(x), slices, -1, width).permute(2, 1, 0, 3)
    return box_descriptor(view, [pieces, slices, rows, width])


@gluon.jit
def copy_weight(weight_desc, arrived, weight_smem, slot, first_n, step, SUBS: gl.constexpr):
    """A step's weight, of the outputs from `first_n` on."""
    corner = [step * SUBS, 0, 0, first_n, 0]
    tma.async_copy_global_to_shared(weight_desc, corner, arrived.index(slot), weight_smem.index(slot))


@gluon.jit
def copy_x(x_desc, arrived, x_smem, slot, step, PIECES: gl.constexpr):
    """A step's inputs of all rows, the same as of the weight."""
    tma.async_copy_global_to_shared(x_desc, [step * PIECES, 0, 0, 0], arrived.index(slot), x_smem.index(slot))


@gluon.jit
def diagonal(sums, SLICES: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, STORE: gl.constexpr):
    """Adds up the diagonal's blocks of [SLICES BLOCK_N, SLICES ROWS]: [BLOCK_N, ROWS] in STORE.

    They change threads once, through shared memory, out of which each block is read by itself.
    """
    if SLICES > 1:
        # Outputs side by side, as a thread of STORE has them.
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
        smem = gl.allocate_shared_memory(gl.float32, [SLICES * BLOCK_N, SLICES * ROWS], FLAT)
        smem.store(sums)
        added = smem.slice(0, BLOCK_N, 0).slice(0, ROWS, 1).load(STORE)
        for part in gl.static_range(1, SLICES):
            added += smem.slice(part * BLOCK_N, BLOCK_N, 0).slice(part * ROWS, ROWS, 1).load(STORE)
    else:
        added = gl.convert_layout(sums, STORE)
    return added
