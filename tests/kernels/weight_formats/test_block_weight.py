"""Weights in blocks: every bit of a file's rows comes back as its description says.

It does wherever the rows lie, in no more memory than the file's.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.support.gguf_numbers import BLOCK_KINDS, KINDS, Bytes, decode, quantize

from headrace_kernels.weight_formats.block_weight import BlockKind, BlockWeight, allocate, dequantize_rows, plane_inputs
from headrace_kernels.weight_formats.gguf_blocks import store_file_rows

CPU = torch.device("cpu")


def stored(name: str, rows: Bytes, dtype: torch.dtype = torch.float32) -> BlockWeight:
    kind = KINDS[name]
    num_inputs = rows.shape[1] // kind.num_bytes * kind.inputs
    weight = allocate(BlockKind(name), len(rows), num_inputs, dtype, CPU)
    store_file_rows(torch.from_numpy(rows), weight, 0)
    return weight


def restored(weight: BlockWeight, rows: slice | torch.Tensor | None = None) -> torch.Tensor:
    rows = slice(0, weight.num_outputs) if rows is None else rows
    count = len(rows) if isinstance(rows, torch.Tensor) else rows.stop - rows.start
    out = torch.full((count, weight.num_inputs), torch.nan)
    dequantize_rows(weight, rows, out)
    return out


def same_bits(found: torch.Tensor, expected: np.ndarray) -> None:
    """NaN where NaN is, and otherwise the very same number."""
    numbers = found.numpy()
    np.testing.assert_array_equal(np.isnan(numbers), np.isnan(expected))
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(numbers[finite].view(np.uint32), expected[finite].view(np.uint32))


@settings(max_examples=examples(60), deadline=None)
@given(
    name=st.sampled_from(BLOCK_KINDS),
    num_rows=st.integers(1, 5),
    num_blocks=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_bytes_are_decoded_bit_by_bit(name: str, num_rows: int, num_blocks: int, seed: int) -> None:
    """Also scales that are NaN, infinite, negative, subnormal."""
    rows = np.random.default_rng(seed).integers(0, 256, (num_rows, num_blocks * KINDS[name].num_bytes), np.uint8)
    same_bits(restored(stored(name, rows)), decode(name, rows))


@pytest.mark.parametrize("name", BLOCK_KINDS)
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x55])
def test_blocks_of_one_byte_are_decoded(name: str, byte: int) -> None:
    rows = np.full((3, 4 * KINDS[name].num_bytes), byte, np.uint8)
    same_bits(restored(stored(name, rows)), decode(name, rows))


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_each_bit_of_a_block_has_its_own_place(name: str) -> None:
    """One bit is set at a time, behind scales that are 1.

    A reader that takes a bit for another's shows, whatever the other bits do.
    """
    size = KINDS[name].num_bytes
    base = np.zeros(size, np.uint8)
    base[:] = quantize(name, np.linspace(-1, 1, KINDS[name].inputs, dtype=np.float32)[None])[0]
    rows = np.repeat(base[None], 8 * size, 0)
    bits = np.arange(8 * size)
    rows[bits, bits // 8] ^= (1 << bits % 8).astype(np.uint8)
    same_bits(restored(stored(name, rows)), decode(name, rows))


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_memory_is_the_files_and_five_percent(name: str) -> None:
    weight = allocate(BlockKind(name), 64, 4096, torch.bfloat16, torch.device("meta"))
    file_bytes = 64 * 4096 // KINDS[name].inputs * KINDS[name].num_bytes
    assert weight.num_bytes <= 1.05 * file_bytes
    assert weight.num_bytes == sum(
        part.nbytes for part in stored(name, np.zeros((64, file_bytes // 64), np.uint8)).parts
    )


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_rows_may_come_in_any_pieces_and_be_asked_for_in_any_order(name: str) -> None:
    kind = KINDS[name]
    rows = np.random.default_rng(5).integers(0, 256, (7, 3 * kind.num_bytes), np.uint8)
    whole = stored(name, rows)
    parts = allocate(BlockKind(name), 7, 3 * kind.inputs, torch.float32, CPU)
    for first, end in ((4, 7), (0, 1), (1, 4)):
        store_file_rows(torch.from_numpy(rows[first:end]), parts, first)
    for found, expected in zip(parts.parts, whole.parts, strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    order = torch.tensor([6, 0, 3, 3, 5])
    same_bits(restored(whole, order), decode(name, rows)[order.numpy()])


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_quantized_numbers_are_near_the_originals(name: str) -> None:
    """The tests' own quantizers round to nearest; a decoder with swapped fields is far off."""
    values = np.random.default_rng(1).normal(0, 0.05, (4, 512)).astype(np.float32)
    error = np.linalg.norm(restored(stored(name, quantize(name, values))).numpy() - values) / np.linalg.norm(values)
    bits = int(name.removeprefix("I")[1])
    assert error < {2: 0.35, 3: 0.25, 4: 0.11, 5: 0.06, 6: 0.03, 8: 0.01}[bits]


def test_inputs_that_blocks_do_not_fill_are_refused() -> None:
    with pytest.raises(ValueError, match="Q4_K needs a multiple of 256 inputs"):
        allocate(BlockKind.Q4_K, 4, 704, torch.float32, CPU)
    with pytest.raises(ValueError, match="takes bfloat16, float16 or float32"):
        allocate(BlockKind.Q4_0, 4, 32, torch.float64, CPU)


def test_parts_of_tiles_never_straddle_groups() -> None:
    for kind in BlockKind:
        for num_inputs in (256, 512, 768, 4096, 14336):
            assert weight_group(kind) % plane_inputs(kind, num_inputs) == 0


def weight_group(kind: BlockKind) -> int:
    return allocate(kind, 1, 256, torch.float32, torch.device("meta")).format.group
