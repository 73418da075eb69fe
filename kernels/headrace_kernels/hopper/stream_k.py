"""Products whose steps are one line, of which each program does an equal share (stream-K).

Owns how the line is shared out, how a step's products are added, and how the results end; used by
the GEMM of INT4 weights and tokens rounded to e4m3.

Y^T = W X^T is cut into tiles of BLOCK_N outputs, of which each has `steps` steps along the inputs.
The steps of all tiles are one line, tile after tile, and a program does `share` of them: some tiles
whole, a part of one, or the end of one and the beginning of the next. So every multiprocessor reads
as much of the weight whatever its sizes. A tile that several programs have parts of is in *pieces*:
each program stores its fp32 sums, and `end_kernel` adds them in the order of the inputs, so that
bits depend on the tile alone.
"""

# Triton's and Gluon's decorators have no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from headrace_kernels.hopper.ring import begin_product

# Results of a program of the kernel that ends a product in pieces. Not swept.
_END_OUTPUTS = 1024


def shared_out(steps: int, tiles: int, splits: int, programs: int) -> tuple[int, int]:
    """Steps of a program, and the most pieces that a tile so has.

    Args:
        steps: Steps of a tile.
        tiles: Tiles of outputs.
        splits: Programs that share a tile; 0: the line is cut into as many equal shares as
            programs run at a time.
        programs: How many that are, for each block of tokens.
    """
    share = triton.cdiv(steps, splits) if splits else triton.cdiv(tiles * steps, max(1, programs))
    return share, max(((each + 1) * steps - 1) // share - each * steps // share + 1 for each in range(tiles))


@gluon.jit
def added_here(total, product, scales):
    """Returns total + product * scales, computed at this place.

    The compiler would move the addition behind later products, and hold the sums of all of them.
    """
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [product, scales, total], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def add_products(
    left, token_smem, totals, scales, slot,
    MMA: gl.constexpr, BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """Adds a step's products to the fp32 sums of all parts of the tokens.

    Hopper's sums of FP8 products keep 14 bits, so those of a step begin at 0 and are added in fp32.

    Args:
        left: The weight's side, [BLOCK_N, inputs] in registers.
        token_smem: Tokens of all slots, [slots, PARTS COLUMNS, inputs].
        totals: PARTS sums, [BLOCK_N, COLUMNS] each.
        scales: [BLOCK_N, 1], by which products are multiplied.
        slot: The step's.
        MMA: Layout of the sums.
        BLOCK_N: Outputs.
        COLUMNS: Tokens of a part.
        PARTS: Parts of the tokens.
        OVERLAPS: One part is added while the next is multiplied.
    """
    added = ()
    before = totals[0]
    for part in gl.static_range(PARTS):
        tokens = token_smem.index(slot).slice(part * COLUMNS, COLUMNS, 0).permute((1, 0))
        product = begin_product(left, tokens, BLOCK_N, COLUMNS, MMA)
        if OVERLAPS:
            if part > 0:
                # The part before is multiplied, this one may be under way.
                added = added + (added_here(totals[part - 1], warpgroup_mma_wait(1, deps=[before]), scales),)
            before = product
        else:
            added = added + (added_here(totals[part], warpgroup_mma_wait(0, deps=[product]), scales),)
    if OVERLAPS:
        added = added + (added_here(totals[PARTS - 1], warpgroup_mma_wait(0, deps=[before]), scales),)
    return added


@gluon.jit
def finish(
    total, token_scale_ptr, bias_ptr, out_ptr, piece, first_m, first_n, M, N,
    BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr, SPLIT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Stores the sums [BLOCK_N, COLUMNS] of a piece, or of a whole tile scaled and with bias.

    If tiles are SPLIT, `out` is fp32 [pieces, M, N], otherwise [M, N].
    """
    n = gl.expand_dims(first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, MMA)), 1)
    m = gl.expand_dims(first_m + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA)), 0)
    mask = (m < M) & (n < N)
    if SPLIT:
        # Eight outputs of four bytes are a sector: no other layout would store better.
        gl.store(out_ptr + piece.to(gl.int64) * M * N + (m * N + n), total, mask=mask)
    else:
        total = total * gl.load(token_scale_ptr + m, mask=m < M, other=0.0)
        if bias_ptr is not None:
            total += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
        # Half sectors, which the cache puts together: another layout would take shared memory that
        # steps are copied to.
        gl.store(out_ptr + (m * N + n), total.to(out_ptr.dtype.element_ty), mask=mask)


# N is a multiple of 16, and vectors are loaded.
@triton.jit(do_not_specialize=["M", "steps", "share"])
def _end_kernel(
    sums_ptr, token_scale_ptr, bias_ptr, out_ptr, M, N, steps, share,
    PIECES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds [PIECES, M, N] in order; most tiles have fewer pieces, and others are not read."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tile = n // BLOCK_N
    pieces = ((tile + 1) * steps - 1) // share - tile * steps // share + 1
    total = tl.zeros([BLOCK], tl.float32)
    for piece in tl.static_range(PIECES):
        total += tl.load(sums_ptr + (piece * M + row) * N + n, mask=(n < N) & (piece < pieces), other=0.0)
    total = total * tl.load(token_scale_ptr + row)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


def end_pieces(
    sums: Tensor, token_scales: Tensor, bias: Tensor | None, out: Tensor, steps: int, share: int, block_n: int
) -> None:
    """Adds the pieces of a product up, scales them and adds the bias.

    Args:
        sums: [pieces, num_rows, num_outputs] fp32, as `finish` stores pieces.
        token_scales: [num_rows, 1] fp32.
        bias: [num_outputs].
        out: [num_rows, num_outputs], written; num_outputs is a multiple of 16.
        steps: Steps of a tile.
        share: Steps of a program (`shared_out`).
        block_n: Outputs of a tile.
    """
    num_rows, num_outputs = out.shape
    _end_kernel[(triton.cdiv(num_outputs, _END_OUTPUTS), num_rows)](
        sums, token_scales, bias, out, num_rows, num_outputs, steps, share,
        PIECES=len(sums), BLOCK_N=block_n, BLOCK=_END_OUTPUTS,
    )  # fmt: skip
