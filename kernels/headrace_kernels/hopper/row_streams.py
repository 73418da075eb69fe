"""What kernels of few rows share that stream a weight through shared memory, each byte once.

Owns the copies of a step's weight and x in one box each, the descriptors of those boxes, classes of
rows, and how sums of slices become results with all that is fused. Kernels are
`linear.dense_small_batch_sm90`'s, which says what slices are, and `linear.few_bits.stream_sm90`'s.
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# mypy: disable-error-code="no-untyped-call,assignment"

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
def _diagonal(sums, SLICES: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, STORE: gl.constexpr):
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


@gluon.constexpr_function
def _of_results(num_warps):
    """Four outputs of a row in a thread."""
    return gl.BlockedLayout([4, 1], [8, 4], [1, num_warps], [0, 1])


@gluon.jit
def result_places(out_ptr, first_n, M, N: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr):
    """A program's outputs [BLOCK_N, 1], where results go [BLOCK_N, ROWS], and which there are."""
    STORE: gl.constexpr = _of_results(gl.num_warps())
    n = gl.expand_dims(first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, STORE)), 1)
    m = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORE)), 0)
    return n, out_ptr + (m * N + n), (m < M) & (n < N)


@gluon.jit
def asked_for(bias_ptr, n, places, mask, N: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr):
    """What is added to results: the residual stream, the bias, and with SwiGLU the other half's.

    Each is a tuple, empty where nothing is added. They are asked for before the products, so that
    nothing waits for them behind these.
    """
    residual = ()
    bias = ()
    up_bias = ()
    if ADD:
        residual = residual + (gl.load(places, mask=mask, other=0.0).to(gl.float32),)
    if bias_ptr is not None:
        bias = bias + (gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32),)
        if GATED:
            up_bias = up_bias + (gl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(gl.float32),)
    return residual, bias, up_bias


@gluon.jit
def rms_factors(squares, SIZE: gl.constexpr, eps):
    """1 / rms of rows from their sums of squares [ROWS], in the layout of results: [1, ROWS]."""
    STORE: gl.constexpr = _of_results(gl.num_warps())
    factors = gl.convert_layout(gl.rsqrt(squares / SIZE + eps), gl.SliceLayout(0, STORE))
    return gl.expand_dims(factors, 0)


@gluon.jit
def _side(
    sums, factors, bias, SLICES: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, STORE: gl.constexpr
):  # fmt: skip
    """A side's sums [BLOCK_N, ROWS] times all factors, with its bias if there is one."""
    y = _diagonal(sums, SLICES, BLOCK_N, ROWS, STORE)
    for each in gl.static_range(len(factors)):
        y *= factors[each]
    for each in gl.static_range(len(bias)):
        y += bias[each]
    return y


@gluon.jit
def store_results(
    y, up, factors, up_factors, added, out_ptr, places, mask,
    SLICES: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Stores a program's results.

    Args:
        y: Sums of the outputs, or of the gate's.
        up: Sums of the other half's; not read without SwiGLU.
        factors: A tuple of what y is multiplied by, [BLOCK_N, 1] or [1, ROWS] each.
        up_factors: A tuple of what up is multiplied by.
        added: What was `asked_for`.
        out_ptr: Pointer to results.
        places: Places of the results (`result_places`).
        mask: Results that there are.
        SLICES: Parts of the inputs side by side, whose sums are added up.
        BLOCK_N: Outputs.
        ROWS: Rows.
        GATED: SwiGLU of y and up.
    """
    STORE: gl.constexpr = _of_results(gl.num_warps())
    residual, bias, up_bias = added
    y = _side(y, factors, bias, SLICES, BLOCK_N, ROWS, STORE)
    if GATED:
        up = _side(up, up_factors, up_bias, SLICES, BLOCK_N, ROWS, STORE)
        y = y / (1.0 + gl.exp(-y)) * up
    for each in gl.static_range(len(residual)):
        y += residual[each]
    gl.store(places, y.to(out_ptr.dtype.element_ty), mask=mask)
