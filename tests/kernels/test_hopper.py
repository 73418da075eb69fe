"""What launchers of sm_90's kernels ask on the host; the frame in the kernels is run with each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.kernel_code import without_places

from headrace_kernels.hopper.launch import aligned, programs_at_a_time, tile_descriptor
from headrace_kernels.hopper.stream_k import shared_out


def test_a_matrix_is_copied_only_where_the_copy_engine_could_not_read_it() -> None:
    memory = torch.randn(9 * 8)
    whole, shifted = memory[:64].view(8, 8), memory[1:65].view(8, 8)
    assert aligned(whole) is whole
    for matrix in (shifted, whole.t()):
        found = aligned(matrix)
        assert torch.equal(found, matrix) and found.is_contiguous() and found.data_ptr() % 16 == 0


@pytest.mark.parametrize(
    ("dtype", "columns", "swizzle"),
    [
        (torch.bfloat16, 64, 128),
        (torch.float8_e4m3fn, 64, 64),
        (torch.float32, 8, 32),
        # Wider rows are several patterns side by side.
        (torch.int16, 128, 128),
    ],
)
def test_tiles_lie_in_the_widest_pattern_that_their_rows_fill(dtype: torch.dtype, columns: int, swizzle: int) -> None:
    descriptor = tile_descriptor(torch.zeros(16, 128, dtype=dtype), 8, columns)
    assert descriptor.block_shape == [8, columns]
    assert descriptor.layout.swizzle_byte_width == swizzle
    assert descriptor.layout.element_bitwidth == 8 * dtype.itemsize


def test_registers_or_shared_memory_limit_how_many_programs_run_at_a_time() -> None:
    assert programs_at_a_time(num_warps=4, registers=255, slot_bytes=1 << 10) == 2
    assert programs_at_a_time(num_warps=4, registers=64, slot_bytes=75 << 10) == 3
    assert programs_at_a_time(num_warps=8, registers=255, slot_bytes=227 << 10) == 1


@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 8), st.integers(0, 200))
def test_a_line_of_steps_is_shared_out_whole(steps: int, tiles: int, splits: int, programs: int) -> None:
    """The pieces named are those of the tile with the most, and no program is too many."""
    share, pieces = shared_out(steps, tiles, splits, programs)
    owners = [step // share for step in range(tiles * steps)]
    of_tiles = [set(owners[tile * steps : (tile + 1) * steps]) for tile in range(tiles)]
    assert pieces == max(map(len, of_tiles))
    assert len(set(owners)) <= (tiles * splits if splits else max(1, programs))


def test_code_is_compared_without_the_places_of_its_source() -> None:
    begin, end = "\t.loc\t1 20 3\n$L__tmp0:\n", '\t.file\t1 "a.py"\n\t.section .debug_str\n{ x }\n'
    ptx = begin + "\tadd.s32 \t%r1, %r2, 4; // first\n" + end
    assert without_places(ptx) == "\tadd.s32 \t%r1, %r2, 4;\n"
