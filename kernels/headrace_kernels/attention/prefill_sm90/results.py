"""What becomes of the sums of prefill attention's tiles on sm_90.

Owns where a group's 64 rows of a tile lie in queries and output, how results are stored, and how
the shares of a tile's keys become its result, as `attention.merge` has it for other kernels: each
share leaves a result and its logarithmic sum to base 2, and the last one to finish merges all, in
the order of the shares, so that a result's bits do not depend on who was last.
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def lines_of(head_dim):
    """Sixteen bytes of a row of 16-bit numbers in a thread, rows over four warps."""
    return gl.BlockedLayout([1, 8], [256 // head_dim, head_dim // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def sums_of(columns):
    """Sums of a product of 64 rows by four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def merged_lines():
    """Sixteen bytes of a row of fp32 numbers in a thread, rows over four warps."""
    return gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])


@gluon.jit
def places_of_rows(kv_head, tokens, token_stride, LAYOUT: gl.constexpr, SHAPE: gl.constexpr, HALF: gl.constexpr):
    """Places at which this group's rows begin, whose tokens are `token_stride` apart, int64 [64].

    Row r is token r // group of the tile, head r % group of the group. Returns also whether each is
    one.
    """
    first_token, num_tokens, _, tile_first = tokens
    row = HALF * 64 + gl.arange(0, 64, layout=LAYOUT)
    token = tile_first + row // SHAPE.group
    is_row = (row < SHAPE.tile_tokens * SHAPE.group) & (token < num_tokens)
    head = kv_head * SHAPE.group + row % SHAPE.group
    return (first_token + token).to(gl.int64) * token_stride + head * SHAPE.head_dim, is_row


@gluon.jit
def with_sinks(sinks, kv_head, number, largest, total, SHAPE: gl.constexpr, HALF: gl.constexpr):
    """The softmax with each head's sink, a score whose value is 0; the first share counts it.

    Returns by how much sums shrink, the largest score and the total, [64].
    """
    shrink = gl.full([64], 1.0, gl.float32, layout=largest.type.layout)
    if sinks is not None:
        row = HALF * 64 + gl.arange(0, 64, layout=largest.type.layout)
        # log2(e): exp(x) is 2^(x * log2(e)).
        logit = gl.load(sinks + kv_head * SHAPE.group + row % SHAPE.group).to(gl.float32) * 1.4426950408889634
        new_largest = gl.where(number == 0, gl.maximum(largest, logit), largest)
        shrink = gl.exp2(largest - new_largest)
        total = total * shrink + gl.where(number == 0, gl.exp2(logit - new_largest), 0.0)
        largest = new_largest
    return shrink, largest, total


@gluon.jit
def store_rows(output, result, kv_head, tokens, SHAPE: gl.constexpr, HALF: gl.constexpr):
    """Writes this group's rows of a tile, [64, head_dim]."""
    LINES: gl.constexpr = lines_of(SHAPE.head_dim)
    begins, is_row = places_of_rows(
        kv_head, tokens, SHAPE.num_heads * SHAPE.head_dim, gl.SliceLayout(1, LINES), SHAPE, HALF
    )  # fmt: skip
    dims = gl.expand_dims(gl.arange(0, SHAPE.head_dim, layout=gl.SliceLayout(0, LINES)), 0)
    numbers = gl.convert_layout(result.to(output.dtype.element_ty), LINES)
    gl.store(output + (gl.expand_dims(begins, 1) + dims), numbers, mask=gl.expand_dims(is_row, 1))


@gluon.jit
def store_share(
    scratch, output, result, largest, total, kv_head, tokens, share, SHAPE: gl.constexpr, HALF: gl.constexpr
):  # fmt: skip
    """Stores the result of a share; the last group of its tile's to finish merges all shares.

    Both groups of a program have a counter, at the places of a tile's first two shares.

    `scratch` has results [places, key/value heads, rows, head_dim] and logarithmic sums [places,
    key/value heads, rows] in fp32, and counters [places, key/value heads], 0 between launches.
    `result` is [64, head_dim], `largest` (times log2(e)) and `total` are [64]; `tokens` and `share`
    are those of `items.work_of`.
    """
    partial, lse, done = scratch
    number, count, place = share
    first = place - number
    row = HALF * 64 + gl.arange(0, 64, layout=largest.type.layout)
    # A row may have seen nothing of the share: what its keys left in the sums is nothing then.
    log_sum = gl.where(largest > -1.0e29, largest + gl.log2(total), -1.0e30)
    gl.store(lse + ((place * SHAPE.num_kv_heads + kv_head) * SHAPE.rows + row), log_sum)
    # In the layout of sums: to change it would take shared memory that there is not.
    SUMS: gl.constexpr = result.type.layout
    rows = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
    begins = ((place * SHAPE.num_kv_heads + kv_head) * SHAPE.rows + rows).to(gl.int64) * SHAPE.head_dim
    dims = gl.expand_dims(gl.arange(0, SHAPE.head_dim, layout=gl.SliceLayout(0, SUMS)), 0)
    gl.store(partial + (gl.expand_dims(begins, 1) + dims), result)
    # All warps have stored; then one thread releases it for the card.
    gl.thread_barrier()
    counter = done + ((first + HALF) * SHAPE.num_kv_heads + kv_head)
    if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
        gl.store(counter, 0)
        # Numbers of a row that are merged at a time, and shares whose numbers are asked for before
        # the first of them is waited for: as many as registers hold.
        DIMS: gl.constexpr = 64
        AT_ONCE: gl.constexpr = 4
        peak = _largest_sum(lse, kv_head, first, count, SHAPE, HALF, AT_ONCE)
        for begin in range(0, SHAPE.head_dim, DIMS):
            _merge(partial, lse, peak, output, kv_head, tokens, first, count, begin, SHAPE, HALF, DIMS, AT_ONCE)


@gluon.jit
def _sums_of(lse, kv_head, first, count, number, SHAPE: gl.constexpr, HALF: gl.constexpr):
    """Logarithmic sums of a share, or of the last one, and where its rows begin, [64]."""
    ROW: gl.constexpr = gl.SliceLayout(1, merged_lines())
    place = first + gl.minimum(number, count - 1)
    rows = (place * SHAPE.num_kv_heads + kv_head) * SHAPE.rows + HALF * 64 + gl.arange(0, 64, layout=ROW)
    # From L2: other multiprocessors wrote them while this one's L1 may have been filled.
    return gl.load(lse + rows, cache_modifier=".cg"), rows.to(gl.int64) * SHAPE.head_dim


@gluon.jit
def _largest_sum(lse, kv_head, first, count, SHAPE: gl.constexpr, HALF: gl.constexpr, AT_ONCE: gl.constexpr):
    """The largest logarithmic sum of each row's shares, [64]."""
    largest = gl.full([64], -1.0e30, gl.float32, layout=gl.SliceLayout(1, merged_lines()))
    for number in range(0, count, AT_ONCE):
        sums = ()
        for each in gl.static_range(AT_ONCE):
            sums = sums + (_sums_of(lse, kv_head, first, count, number + each, SHAPE, HALF)[0],)
        for each in gl.static_range(AT_ONCE):
            largest = gl.maximum(largest, sums[each])
    return largest


@gluon.jit
def _merge(
    partial, lse, largest, output, kv_head, tokens, first, count, first_dim,
    SHAPE: gl.constexpr, HALF: gl.constexpr, DIMS: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Merges DIMS numbers of all shares from place `first` on, AT_ONCE shares at a time."""
    LINES: gl.constexpr = merged_lines()
    ROW: gl.constexpr = gl.SliceLayout(1, LINES)
    dims = gl.expand_dims(first_dim + gl.arange(0, DIMS, layout=gl.SliceLayout(0, LINES)), 0)
    total = gl.zeros([64], gl.float32, layout=ROW)
    acc = gl.zeros([64, DIMS], gl.float32, layout=LINES)
    for number in range(0, count, AT_ONCE):
        sums = ()
        parts = ()
        for each in gl.static_range(AT_ONCE):
            log_sum, begins = _sums_of(lse, kv_head, first, count, number + each, SHAPE, HALF)
            sums = sums + (log_sum,)
            parts = parts + (gl.load(partial + (gl.expand_dims(begins, 1) + dims), cache_modifier=".cg"),)
        for each in gl.static_range(AT_ONCE):
            weight = gl.exp2(sums[each] - largest) * gl.where(number + each < count, 1.0, 0.0)
            total += weight
            acc += parts[each] * gl.expand_dims(weight, 1)
    begins, is_row = places_of_rows(kv_head, tokens, SHAPE.num_heads * SHAPE.head_dim, ROW, SHAPE, HALF)
    result = (acc / gl.expand_dims(total, 1)).to(output.dtype.element_ty)
    gl.store(output + (gl.expand_dims(begins, 1) + dims), result, mask=gl.expand_dims(is_row, 1))
