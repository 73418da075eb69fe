"""Whatever the shape, the kernel that the rules choose takes it.

Operations are drawn from all rows, outputs, inputs, groups and arrangements, against fp64; and
the rules of an H200 are asked by sizes alone.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.linear.test_arranged_weights import EPS, Form, Stored
from tests.kernels.linear.test_gemm_weight_only_sm90 import hopper
from tests.support.examples import examples
from tests.support.kernel_case import DTYPES, kernels_on

from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.linear.few_bits.stream_sm90 import takes_bit_streams, takes_tile
from headrace_kernels.linear.gemm_weight_only_sm90 import WarpgroupTile
from headrace_kernels.linear.gemv_8bit import takes_gemv
from headrace_kernels.linear.gemv_int4 import Int4GemvTile
from headrace_kernels.linear.quantized import (
    Path,
    bit_stream_rule,
    gemm_rule,
    gemv_rule,
    path_rule,
    small_batch_8bit_rule,
)
from headrace_kernels.linear.small_batch import MAX_SMALL_BATCH_ROWS, takes
from headrace_kernels.linear.small_batch_8bit_sm90 import takes_small_batch_8bit
from headrace_kernels.triton_runtime import forced
from headrace_kernels.weight_formats.quantized_weight import Arrangement, QuantKind, allocate

__all__ = ["hopper"]

ROWS = st.sampled_from([0, 1, 2, 7, 8, 9, 15, 16, 17, 33, 63, 64, 65, 129, 257])
OUTPUTS = st.sampled_from([1, 2, 3, 8, 17, 34, 40, 64])
OPERATIONS = ("linear", "linear_add", "norm_linear", "norm_swiglu")
SHARED_BYTES = 232_448


@st.composite
def forms(draw: st.DrawFn) -> tuple[Form, int]:
    """A kind with a group and an arrangement that it may have, and inputs that suit them.

    Inputs are whole groups, or any number.
    """
    kind = draw(st.sampled_from(list(QuantKind)))
    is_fp8 = kind is QuantKind.FP8
    group = draw(st.sampled_from([0, 128] if is_fp8 else [0, 32, 64, 128]))
    inputs = draw(st.integers(1, 4)) * group or draw(st.sampled_from([8, 16, 32, 40, 72, 101, 128, 160, 256, 300]))
    in_blocks = is_fp8 and group > 0
    arrangement = Arrangement(
        has_zeros=kind is QuantKind.INT8 and draw(st.booleans()),
        scale_outputs=draw(st.sampled_from([8, 128])) if in_blocks else 0,
        is_ordered=draw(st.booleans()),
    )
    if in_blocks:
        inputs -= draw(st.sampled_from([0, 8, 24]))
    return (kind, group, arrangement), inputs


def multiplied(stored: Stored, x: torch.Tensor, operation: str) -> None:
    """Runs an operation and compares it with fp64."""
    weight, bias, norm = stored.weight, stored.bias, stored.norm
    normed = torch.nn.functional.rms_norm(x.double(), x.shape[1:], norm.double(), EPS)
    if operation == "linear":
        stored.check(quantized_linear.linear(x, weight, bias), x, bias)
    elif operation == "linear_add":
        found = torch.zeros(len(x), weight.num_outputs, dtype=x.dtype)
        quantized_linear.linear_add(x, weight, bias, found)
        stored.check(found, x, bias)
    elif operation == "norm_linear":
        stored.check(quantized_linear.norm_linear(x, norm, EPS, weight, bias), normed, bias)
    else:
        found = quantized_linear.norm_swiglu(x, norm, EPS, weight, bias)
        gate, value = (normed @ stored.numbers.t() + bias.double()).chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * value
        assert found.shape == expected.shape
        # Errors of both halves, of up to some percent of their rows' sizes in bf16, are multiplied.
        size = gate.square().mean().sqrt() * value.square().mean().sqrt()
        assert len(x) == 0 or float((found.double() - expected).square().mean().sqrt() / size) < 0.05


@settings(max_examples=12)
@given(forms(), ROWS, OUTPUTS, st.sampled_from(DTYPES), st.sampled_from(OPERATIONS))
def test_any_shape_is_multiplied_as_its_numbers_say(
    form: tuple[Form, int], rows: int, outputs: int, dtype: torch.dtype, operation: str
) -> None:
    arranged, inputs = form
    if operation == "norm_swiglu":
        outputs += outputs % 2
    stored = Stored(arranged, outputs, inputs, dtype)
    with kernels_on("cpu"):
        multiplied(stored, stored.x(rows), operation)


@pytest.mark.usefixtures("hopper")
@settings(max_examples=examples(200))
@given(
    forms(), st.integers(0, 600), st.sampled_from([1, 40, 64, 128, 192, 1152, 6144, 28_672]), st.integers(1, 40),
    st.sampled_from(DTYPES[:2]), st.booleans()
)  # fmt: skip
def test_what_is_chosen_takes_the_shape(
    form: tuple[Form, int], rows: int, outputs: int, times: int, dtype: torch.dtype, gated: bool
) -> None:
    """On an H200, without one: no rule chooses a kernel or a tile that its weight does not suit."""
    (kind, group, arrangement), inputs = form
    inputs *= times
    weight = allocate(kind, outputs, inputs, group or inputs, dtype, torch.device("meta"), arrangement)
    with forced():
        path, few = path_rule(rows, weight), small_batch_8bit_rule(rows, weight, gated)
        streams = bit_stream_rule(rows, weight, gated)
        if path is Path.SMALL_BATCH:
            assert rows and (few is not None or streams is not None or (rows <= MAX_SMALL_BATCH_ROWS and takes(weight)))
        if streams is not None:
            assert takes_bit_streams(weight) and takes_tile(weight, streams, gated)
            scale_bytes = streams.scale_bytes(inputs, gated) if arrangement.scale_outputs else 0
            assert streams.shared_bytes(kind, rows, gated, 4) + scale_bytes <= SHARED_BYTES - 1024
        if few is not None:
            assert takes_small_batch_8bit(weight) and path is Path.SMALL_BATCH and few.splits >= 1
        if rows == 1 and takes_gemv(weight):
            assert isinstance(gemv_rule(weight, gated), Int4GemvTile) == (kind is QuantKind.INT4)
        if path is not Path.GEMM:
            return
        tile = gemm_rule(rows, weight)
        assert 1 <= tile.splits
        if isinstance(tile, WarpgroupTile):
            assert outputs % tile.block_n == 0 and tile.shared_bytes(kind) <= SHARED_BYTES
            assert tile.splits <= math.ceil(inputs / 256)
