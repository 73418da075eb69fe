"""What a tile of a grouped GEMM on sm_90 is to know, and what becomes of its sums.

Owns a kernel's constants (`GroupedSizes`); where a program's next piece of work is and what its
sums are multiplied by, which a program asks for ahead; and how sums become results. The kernels are
`grouped_gemm_sm90`'s and `mxfp4_gemm_sm90`'s. A piece of work is a tile of pairs with a block of
outputs; `here` is its expert, its first pair, where that expert's pairs end, and its first output.
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from headrace_kernels.rounded_tokens import LARGEST, LEAST_SCALE

# Bytes of a row in a step: the copy engine's widest pattern. Of FP8 they are a block's inputs.
STEP_BYTES = 128
# Results of a row that change threads at a time, on their way to stores of 16 bytes.
STORED = 64
_STORED = gl.constexpr(STORED)
# Of `rounded_tokens`: what the largest number is divided by, and the least scale.
_STEP_E4M3, _LEAST_SCALE = gl.constexpr(1 / LARGEST[torch.float8_e4m3fn]), gl.constexpr(LEAST_SCALE)
# Results that change threads at a time, at most.
CHANGED = 128 * STORED
_CHANGED = gl.constexpr(CHANGED)


class GroupedSizes(NamedTuple):
    """What a kernel is compiled for: one constexpr."""

    # Outputs of an expert, of gates and ups as many each, and its inputs.
    num_outputs: int
    num_inputs: int
    # Experts of a token.
    per_token: int
    # Pairs of a tile, and outputs of a piece of work.
    block_m: int
    block_n: int
    # Bytes of a number that is multiplied.
    item: int
    is_gated: bool
    # Whether weights have a scale for `scale_outputs` outputs and a step's inputs, `scale_room`
    # numbers further for the next outputs, and rows of x one for a step's inputs. Otherwise an
    # output and a row have one, if any.
    in_blocks: bool
    scale_outputs: int
    scale_room: int
    # Whether outputs are rows of products, and pairs their columns.
    is_swapped: bool
    # Whether results are rounded to e4m3, all of a row's in a piece of work by one scale, and
    # whether they are bf16 before, or fp16.
    rounds: bool
    is_bf16: bool
    # Whether a step's products, in blocks, are of a quarter of the outputs and run one after the
    # other, since registers hold no more beside the sums.
    in_turn: bool
    # Whether the last product of a step in blocks runs on while later steps are copied.
    runs_on: bool

    @property
    def step(self) -> int:
        """Inputs of a step."""
        return STEP_BYTES // self.item

    @property
    def steps(self) -> int:
        """Steps of a piece of work."""
        return self.num_inputs // self.step

    @property
    def sides(self) -> int:
        """Gates and ups, or outputs alone."""
        return 2 if self.is_gated else 1

    @property
    def width(self) -> int:
        """Outputs of a piece of work, gates and ups together."""
        return self.sides * self.block_n

    @property
    def parts(self) -> int:
        """Products of a step, of as many outputs each."""
        if self.in_turn:
            return 4
        return 2 if self.in_blocks or (self.is_swapped and self.is_gated) else 1

    @property
    def part_n(self) -> int:
        """Outputs of a product."""
        return self.width // self.parts

    @property
    def columns(self) -> int:
        """Blocks of outputs, each a piece of work of a tile."""
        return -(-self.num_outputs // self.block_n)

    @property
    def sums_shape(self) -> tuple[int, int]:
        """Sums of a product."""
        return (self.part_n, self.block_m) if self.is_swapped else (self.block_m, self.part_n)


@gluon.constexpr_function
def of_sums(sizes, num_warps):
    """Sums of a product: 16 rows for each warp, and warps that are left side by side."""
    rows, columns = sizes.sums_shape
    behind = min(num_warps, rows // 16)
    beside = num_warps // behind
    return gl.NVMMADistributedLayout([3, 0], [behind, beside], [16, columns // beside, 32 // sizes.item])


@gluon.constexpr_function
def of_rows(itemsize, num_warps):
    """Sixteen bytes of a row in a thread, eight threads a row."""
    return gl.BlockedLayout([1, 16 // itemsize], [4, 8], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def _of_outputs(num_warps):
    """An output in a thread."""
    return gl.BlockedLayout([1], [32], [num_warps], [0])


@gluon.jit
def located(starts_ptr, experts_ptr, firsts_ptr, work, total, SIZES: gl.constexpr, AHEAD: gl.constexpr = False):
    """A piece of work: its expert, its first pair, where that expert's pairs end, its first output.

    Behind the last piece it is that one again. AHEAD: it is read before the kernel waits, past the
    first cache, where those of an earlier table may still be.
    """
    CACHE: gl.constexpr = ".cg" if AHEAD else ""
    COLUMNS: gl.constexpr = SIZES.columns
    work = gl.minimum(work, total - 1)
    expert = gl.load(experts_ptr + work // COLUMNS, cache_modifier=CACHE)
    first = gl.load(firsts_ptr + work // COLUMNS, cache_modifier=CACHE)
    end = gl.load(starts_ptr + expert + 1, cache_modifier=CACHE)
    return expert, first, end, work % COLUMNS * SIZES.block_n


@gluon.jit
def pairs_of(order_ptr, here, SIZES: gl.constexpr, AHEAD: gl.constexpr = False):
    """The pairs of a piece of work, [BLOCK_M]; beyond the end its expert's last one.

    Gated in turn they are places in x, beside which registers have no room for the pairs. AHEAD:
    as `located` takes it.
    """
    _, first, end, _ = here
    ROWS: gl.constexpr = gl.SliceLayout(1, of_rows(SIZES.item, gl.num_warps()))
    CACHE: gl.constexpr = ".cg" if AHEAD else ""
    places = gl.minimum(first + gl.arange(0, SIZES.block_m, layout=ROWS), end - 1)
    pairs = gl.load(order_ptr + places, cache_modifier=CACHE)
    if SIZES.is_gated and SIZES.in_turn:
        pairs = pairs // SIZES.per_token * SIZES.num_inputs
    return pairs


@gluon.jit
def places_in_x(pairs, SIZES: gl.constexpr):
    """Places in x at which the rows of the tokens of `pairs_of` begin."""
    return pairs if SIZES.in_turn else pairs // SIZES.per_token * SIZES.num_inputs


@gluon.jit
def _rows_of(here, pairs, SIZES: gl.constexpr):
    """Rows of x of a piece of work, [BLOCK_M]: tokens', or those at the places of the pairs."""
    _, first, end, _ = here
    if SIZES.is_gated and SIZES.in_turn:
        rows = pairs // SIZES.num_inputs
    elif SIZES.is_gated:
        rows = pairs // SIZES.per_token
    else:
        rows = gl.minimum(first + gl.arange(0, SIZES.block_m, layout=pairs.type.layout), end - 1)
    return rows


@gluon.jit
def factors_of(x_scale_ptr, scale_ptr, weights_ptr, here, pairs, SIZES: gl.constexpr):
    """What sums are multiplied by: weights of pairs, scales of rows, of outputs, and of ups.

    Each is a tuple, empty where there is nothing. They are spread over threads, and asked for a
    piece of work ahead, so that nothing waits for them behind the products.
    """
    expert, _, _, first_n = here
    N: gl.constexpr = SIZES.num_outputs
    of_pairs = ()
    of_x = ()
    of_outputs = ()
    of_ups = ()
    if not SIZES.is_gated:
        of_pairs = of_pairs + (gl.load(weights_ptr + pairs),)
    if x_scale_ptr is not None and not SIZES.in_blocks:
        of_x = of_x + (gl.load(x_scale_ptr + _rows_of(here, pairs, SIZES)),)
    if scale_ptr is not None and not SIZES.in_blocks:
        n = first_n + gl.arange(0, SIZES.block_n, layout=_of_outputs(gl.num_warps()))
        places = scale_ptr + expert * (SIZES.sides * N) + n
        of_outputs = of_outputs + (gl.load(places, mask=n < N, other=0.0),)
        if SIZES.is_gated:
            of_ups = of_ups + (gl.load(places + N, mask=n < N, other=0.0),)
    return of_pairs, of_x, of_outputs, of_ups


@gluon.jit
def block_places(here, pairs, SIZES: gl.constexpr, BESIDE: gl.constexpr):
    """Places at which scales of blocks begin: of rows of x, and of both halves of the outputs.

    BESIDE: layout of one number for each pair beside sums.
    """
    places = ()
    if SIZES.in_blocks:
        expert, _, _, first_n = here
        N: gl.constexpr = SIZES.num_outputs
        SHARED: gl.constexpr = SIZES.scale_outputs
        rows = gl.convert_layout(_rows_of(here, pairs, SIZES), BESIDE)
        output = expert * (SIZES.sides * N) + first_n
        other = output + (N if SIZES.is_gated else SIZES.block_n // 2)
        places = (rows, output // SHARED * SIZES.scale_room, other // SHARED * SIZES.scale_room)
    return places


@gluon.jit
def block_scales(x_scale_ptr, scale_ptr, x_room, places, step, SIZES: gl.constexpr):
    """What a step's sums in blocks are multiplied by: of rows, and of both halves of outputs."""
    scales = ()
    if SIZES.in_blocks:
        rows, output, other = places
        scales = (
            gl.load(x_scale_ptr + step * x_room + rows), gl.load(scale_ptr + output + step),
            gl.load(scale_ptr + other + step),
        )  # fmt: skip
    return scales


@gluon.jit
def no_sums(SIZES: gl.constexpr, MMA: gl.constexpr):
    """Sums of no steps, of each part."""
    PARTS: gl.constexpr = SIZES.parts
    SHAPE: gl.constexpr = SIZES.sums_shape
    sums = ()
    for _ in gl.static_range(PARTS):
        sums = sums + (gl.zeros(SHAPE, gl.float32, layout=MMA),)
    return sums


@gluon.jit
def waited(running, under_way: gl.constexpr, PARTS: gl.constexpr):
    """Sums of products, of which so many may run on."""
    if PARTS == 2:
        sums = warpgroup_mma_wait(under_way, deps=[running[0], running[1]])
    else:
        sums = (warpgroup_mma_wait(under_way, deps=[running[0]]),)
    return sums


@gluon.jit
def gated_here(gate, up, GATING: gl.constexpr):
    """`gating.gated` for kernels in Gluon, up to the last bits of fp32.

    The language's division and exponential look for very small and very large numbers beside the
    card's own approximations, whose results are 0, 1 or NaN for those as well. The tensor cores
    wait for all of that, and gates and ups of many tokens take an H200 3% less without it
    (docs/experiments.md, "what bounds grouped GEMMs").
    """
    # exp(-x) = 2^(x NEGATED)
    NEGATED: gl.constexpr = -1.4426950408889634
    if GATING.is_clamped:
        LIMIT: gl.constexpr = GATING.limit
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        SLOPE: gl.constexpr = GATING.alpha * NEGATED
        exponent = gate * SLOPE
    elif GATING.is_gelu:
        # 2 sqrt(2 / pi) before the bracket.
        BRACKET: gl.constexpr = 1.5957691216057308 * NEGATED
        exponent = BRACKET * (gate + 0.044715 * gate * gate * gate)
    else:
        exponent = gate * NEGATED
    sigmoid = gl.inline_asm_elementwise(
        "{ .reg .f32 t; ex2.approx.ftz.f32 t, $1; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }", "=f,f",
        [exponent], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return gate * sigmoid * up


@gluon.jit
def _scaled(sums, of_pairs, of_outputs, bias_ptr, first_output, left, WIDTH: gl.constexpr):
    """Sums times factors of rows and of outputs, plus the bias of `left` outputs."""
    LAYOUT: gl.constexpr = sums.type.layout
    for each in gl.static_range(len(of_outputs)):
        sums *= gl.expand_dims(gl.convert_layout(of_outputs[each], gl.SliceLayout(0, LAYOUT)), 0)
    for each in gl.static_range(len(of_pairs)):
        sums *= gl.expand_dims(gl.convert_layout(of_pairs[each], gl.SliceLayout(1, LAYOUT)), 1)
    if bias_ptr is not None:
        n = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
        bias = gl.load(bias_ptr + first_output + n, mask=n < left, other=0.0).to(gl.float32)
        sums += gl.expand_dims(bias, 0)
    return sums


@gluon.jit
def store_results(
    y, out_ptr, rows, is_row, first_n,
    N: gl.constexpr, BLOCK_M: gl.constexpr, WIDTH: gl.constexpr, IS_SWAPPED: gl.constexpr,
):  # fmt: skip
    """Stores [BLOCK_M, WIDTH] results, 16 bytes at a time."""
    # Swapped, a warp has 16 outputs: halves of fewer are not in the same threads.
    NARROW: gl.constexpr = WIDTH <= _STORED or (IS_SWAPPED and WIDTH <= 16 * gl.num_warps())
    if not NARROW:
        low, high = gl.split(y.reshape((BLOCK_M, 2, WIDTH // 2)).permute((0, 2, 1)))
        store_results(low, out_ptr, rows, is_row, first_n, N, BLOCK_M, WIDTH // 2, IS_SWAPPED)
        store_results(high, out_ptr, rows, is_row, first_n + WIDTH // 2, N, BLOCK_M, WIDTH // 2, IS_SWAPPED)
    elif BLOCK_M * WIDTH > _CHANGED:
        HALF: gl.constexpr = BLOCK_M // 2
        low, high = gl.split(y.reshape((2, HALF, WIDTH)).permute((1, 2, 0)))
        low_rows, high_rows = gl.split(rows.reshape((2, HALF)).permute((1, 0)))
        is_low, is_high = gl.split(is_row.reshape((2, HALF)).permute((1, 0)))
        store_results(low, out_ptr, low_rows, is_low, first_n, N, HALF, WIDTH, IS_SWAPPED)
        store_results(high, out_ptr, high_rows, is_high, first_n, N, HALF, WIDTH, IS_SWAPPED)
    else:
        LAYOUT: gl.constexpr = of_rows(2, gl.num_warps())
        n = gl.expand_dims(first_n + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT)), 0)
        places = gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT)), 1).to(gl.int64) * N + n
        mask = gl.expand_dims(gl.convert_layout(is_row, gl.SliceLayout(1, LAYOUT)), 1) & (n < N)
        gl.store(out_ptr + places, gl.convert_layout(y, LAYOUT), mask=mask)


@gluon.jit
def _side_by_side(low, high):
    """Two halves of rows as one, by the threads that have them."""
    return gl.join(low, high).permute((0, 2, 1)).reshape((low.shape[0], 2 * low.shape[1]))


@gluon.jit
def _store_rounded(
    y, out_ptr, out_scale_ptr, out_room, first, end, first_n, N: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Stores results as `rounded_tokens.store_rounded` does, to the bit.

    The rows from `first` up to `end` become e4m3 of one scale each. Scales of a group of BLOCK_N
    results have room for `out_room` rows.
    """
    BESIDE: gl.constexpr = gl.SliceLayout(1, y.type.layout)
    wide = y.to(gl.float32)
    # Without their signs, numbers are ordered as their bits are, with infinity and then NaN above
    # all.
    largest = gl.max(wide.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(gl.float32, bitcast=True)
    scale = largest * _STEP_E4M3.value
    # NaN is not less, and stays.
    scale = gl.where(scale < _LEAST_SCALE.value, _LEAST_SCALE.value, scale)
    # A division as IEEE says, of 1 if the scale is finite.
    inverse = gl.div_rn(scale * 0.0 + 1.0, scale)
    numbers = (wide * gl.expand_dims(inverse, 1)).to(gl.float8e4nv)
    row = first + gl.arange(0, BLOCK_M, layout=BESIDE)
    gl.store(out_scale_ptr + (first_n // BLOCK_N * out_room + row), scale, mask=row < end)
    ROWS: gl.constexpr = of_rows(1, gl.num_warps())
    row = gl.expand_dims(first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS)), 1)
    n = gl.expand_dims(first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, ROWS)), 0)
    gl.store(out_ptr + (row.to(gl.int64) * N + n), gl.convert_layout(numbers, ROWS), mask=(row < end) & (n < N))


@gluon.jit
def finish(
    sums, bias_ptr, out_ptr, out_scale_ptr, out_room, here, pairs, factors, SIZES: gl.constexpr, GATING: gl.constexpr
):  # fmt: skip
    """Stores what becomes of sums, those of gate and up in one, in two or in four parts."""
    expert, first, end, first_n = here
    of_pairs, of_x, of_outputs, of_ups = factors
    N: gl.constexpr = SIZES.num_outputs
    BLOCK_M: gl.constexpr = SIZES.block_m
    BLOCK_N: gl.constexpr = SIZES.block_n
    SWAPPED: gl.constexpr = SIZES.is_swapped
    place = first + gl.arange(0, BLOCK_M, layout=pairs.type.layout)
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    if SIZES.is_gated:
        if SIZES.parts == 4:
            gate = _side_by_side(sums[0], sums[1])
            up = _side_by_side(sums[2], sums[3])
        elif SIZES.parts == 2:
            gate, up = sums
        else:
            gate, up = gl.split(sums[0].reshape((BLOCK_M, 2, BLOCK_N)).permute((0, 2, 1)))
        output = expert * (2 * N) + first_n
        gate = _scaled(gate, of_x, of_outputs, bias_ptr, output, N - first_n, BLOCK_N)
        up = _scaled(up, of_x, of_ups, bias_ptr, output + N, N - first_n, BLOCK_N)
        inner = gated_here(gate, up, GATING)
        if SIZES.rounds:
            inner = inner.to(gl.bfloat16 if SIZES.is_bf16 else gl.float16)
            _store_rounded(inner, out_ptr, out_scale_ptr, out_room, first, end, first_n, N, BLOCK_M, BLOCK_N)
        else:
            store_results(inner.to(DTYPE), out_ptr, place, place < end, first_n, N, BLOCK_M, BLOCK_N, SWAPPED)
    else:
        WIDTH: gl.constexpr = SIZES.part_n
        PARTS: gl.constexpr = SIZES.parts
        for part in gl.static_range(PARTS):
            n = first_n + part * WIDTH
            y = _scaled(sums[part], of_x, of_outputs, bias_ptr, expert * N + n, N - n, WIDTH)
            y = _scaled(y, of_pairs, (), None, 0, 0, WIDTH)
            store_results(y.to(DTYPE), out_ptr, pairs, place < end, n, N, BLOCK_M, WIDTH, SWAPPED)
