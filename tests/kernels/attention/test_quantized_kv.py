"""A quantized cache: errors, bits, copies, and attention on a CPU.

Kernels write the reference's bits, and scales go where their block goes.
"""

from __future__ import annotations

import random

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.kernels.attention.test_attention import Case, build
from tests.support.attention_case import Shape, copy_of, empty_cache, memory_of, store_blocks
from tests.support.examples import examples
from tests.support.kernel_case import DEVICES, Numbers, kernels_on

from headrace_kernels.attention.kv_cache import copy_blocks, write_kv
from headrace_kernels.attention.paged import paged_attention, paged_attention_reference
from headrace_kernels.attention.quantized_kv import (
    KV_TYPES,
    dequantize,
    dequantized_blocks,
    dequantized_tiles,
    num_bytes,
    quantize,
    scales_of,
    tile_bytes,
    tiles_of,
    view_of,
)
from headrace_kernels.attention.rope_kv import rope_and_write_kv, rope_and_write_kv_reference

KINDS = list(KV_TYPES)


def zeroed(num_blocks: int, heads: int, block_size: int, head_dim: int, kind: str, device: str = "cpu") -> torch.Tensor:
    memory = torch.zeros(num_blocks, 2, heads, tile_bytes(block_size, head_dim), dtype=torch.uint8, device=device)
    return view_of(memory, block_size, head_dim, KV_TYPES[kind])


def hostile(heads: int, head_dim: int, seed: int) -> torch.Tensor:
    """Heads of all magnitudes, with outliers, zeros, exact halves of steps."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, head_dim, generator=generator) * torch.randn(heads, head_dim, generator=generator).exp()
    x *= 10.0 ** torch.linspace(-28, 30, heads)[:, None]
    x[0] = 0.0
    x[1] = torch.arange(head_dim) / 2 - head_dim / 4
    x[2, 0] *= 1000
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_number_is_off_by_half_a_step_at_most(kind: str, seed: int) -> None:
    x = hostile(40, 96, seed).double()
    numbers, scales = quantize(x.float(), KV_TYPES[kind])
    error = (dequantize(numbers, scales).double() - x.float().double()).abs()
    amax = x.float().double().abs().amax(-1, keepdim=True)
    bound = amax / 254 if kind == "int8" else torch.maximum(x.float().double().abs() / 16, amax / 2**18.8)
    assert (error <= bound * (1 + 1e-5)).all()
    # The bound is tight, so that no coarser rounding hides below it.
    assert (error / bound.clamp(min=1e-60)).amax() > 0.9
    assert (dequantize(numbers, scales).double().abs().amax(-1, keepdim=True) - amax).abs().le(amax * 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_restored_as_their_numbers_and_scales_say(kind: str) -> None:
    """All bytes but NaN, scales from the smallest to the largest."""
    codes = torch.arange(-126, 127, dtype=torch.int8)
    codes = codes[codes != -1].repeat(16)[: 16 * 240].view(1, 16, 240)
    cache = zeroed(1, 1, 16, 240, kind)
    cache.view(torch.int8)[0, 1] = codes
    scales_of(cache)[0, 1] = 10.0 ** torch.linspace(-32, 35, 16)
    found = dequantized_tiles(
        tiles_of(cache).flatten(0, 2), 16, 240, KV_TYPES[kind], torch.full((2, 3840), float("nan"))
    )
    assert torch.equal(found.view(2, 16, 240), dequantized_blocks(cache, torch.tensor([0]))[0, :, 0])
    assert torch.equal(found[1].view(16, 240), dequantize(codes.view(KV_TYPES[kind]), scales_of(cache)[0, 1])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_shows_in_its_scale_alone(kind: str) -> None:
    x = torch.ones(4, 16)
    x[1, 3], x[2, 5], x[3, 7] = float("nan"), float("inf"), -float("inf")
    numbers, scales = quantize(x, KV_TYPES[kind])
    assert scales[0].isfinite() and scales[1:].isnan().all()
    assert numbers.float().isfinite().all()


def test_a_layout_without_room_for_scales_is_refused() -> None:
    for cache in (torch.zeros(2, 2, 3, 16, 8, dtype=torch.int8), zeroed(4, 2, 16, 8, "int8").transpose(2, 3)):
        with pytest.raises(ValueError, match="view of tiles"):
            tiles_of(cache)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_numbers_and_scales_and_rows_are_aligned(kind: str) -> None:
    cache = zeroed(5, 3, 16, 80, kind)
    assert num_bytes(cache) == 5 * 2 * 3 * 16 * (80 + 4) == cache.untyped_storage().nbytes()
    for block in range(5):
        for head in range(3):
            assert (cache[block, 1, head].data_ptr() - cache.data_ptr()) % 16 == 0
            assert (scales_of(cache)[block, 1, head].data_ptr() - cache.data_ptr()) % 16 == 0


def heads_of(numbers: Numbers, tokens: int, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    qkv = numbers.randn(tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    angles = 6 * torch.rand(tokens, shape.head_dim // 2, device=numbers.device)
    return qkv, torch.stack((angles.cos(), -angles.sin(), angles.sin()), dim=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_the_kernel_writes_the_references_bits(kind: str, tokens: int, device: str) -> None:
    """Values are compared by their bits, keys by the values they stand for.

    Keys are rotated in another order of additions.
    """
    shape = Shape(4, 3, 80, 16, None, torch.float16, kind)
    numbers = Numbers(device, torch.float16, seed=tokens)
    qkv, rotations = heads_of(numbers, tokens, shape)
    qkv[0, -1] = 0.0
    slots = torch.tensor(random.Random(tokens).sample(range(96), tokens), device=device)
    slots[tokens // 2] = -1 if tokens > 1 else 7
    found, expected = (zeroed(6, 3, 16, 80, kind, device) for _ in range(2))
    with kernels_on(device):
        rope_and_write_kv(qkv, rotations, found, slots, shape.num_heads)
    rope_and_write_kv_reference(qkv, rotations, expected, slots, shape.num_heads)
    assert torch.equal(tiles_of(found)[:, 1], tiles_of(expected)[:, 1])
    every = torch.arange(6, device=device)
    keys = [dequantized_blocks(cache, every)[:, 0] for cache in (found, expected)]
    # A key that fp16 rounds to its neighbour may land a step away.
    step = keys[1].abs().amax(-1, keepdim=True) / 100 if kind == "int8" else keys[1].abs() / 7 + 1e-3
    assert ((keys[0] - keys[1]).abs() <= step).all()
    assert torch.equal(keys[0].any(-1), keys[1].any(-1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_is_no_number_is_written_as_such_and_spoils_no_other(kind: str, device: str) -> None:
    shape = Shape(2, 2, 16, 16, None, torch.float32, kind)
    qkv, rotations = heads_of(Numbers(device, torch.float32), 3, shape)
    qkv[1, 2, 3], qkv[2, 5, 3] = float("nan"), float("inf")
    cache = zeroed(1, 2, 16, 16, kind, device)
    with kernels_on(device):
        rope_and_write_kv(qkv, rotations, cache, torch.tensor([0, 1, 2], device=device), 2)
    bad = scales_of(cache)[0, :, :, :3].isnan()
    assert bad.nonzero().tolist() == [[0, 0, 1], [1, 1, 2]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_copied_with_their_block(kind: str, device: str) -> None:
    shape = Shape(2, 2, 24, 16, kv=kind)
    cache = empty_cache(9, shape, device)
    store_blocks(cache, list(range(9)), torch.randn(9, 2, 2, 16, 24, device=device))
    before = copy_of(cache)
    with kernels_on(device):
        copy_blocks([cache], torch.tensor([3, 5, 3], device=device), torch.tensor([0, 3, 8], device=device))
    now, old = memory_of(cache), memory_of(before)
    for target, source in [(0, 3), (1, 1), (2, 2), (3, 5), (4, 4), (5, 5), (6, 6), (7, 7), (8, 3)]:
        assert torch.equal(now[target], old[source])


def write_contexts(case: Case, kv_cache: torch.Tensor) -> None:
    """The case's keys and values, to where its own cache has them."""
    size = case.metadata.block_size
    for row, context in enumerate(case.contexts):
        positions = torch.arange(context.shape[2])
        slots = case.metadata.block_tables[row].long()[positions // size] * size + positions % size
        write_kv(context[0].transpose(0, 1), context[1].transpose(0, 1), kv_cache, slots)


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.settings(max_examples=examples(40), deadline=None)
@hypothesis.given(
    rows=strategies.lists(
        strategies.tuples(strategies.integers(0, 90), strategies.just(1) | strategies.integers(1, 40)),
        min_size=1,
        max_size=6,
    ),
    group=strategies.sampled_from([1, 2, 8]),
    block_size=strategies.sampled_from([16, 32]),
    window=strategies.none() | strategies.integers(1, 70),
)
def test_attention_of_a_cpu_is_exact_over_what_the_cache_holds(
    kind: str, rows: list[tuple[int, int]], group: int, block_size: int, window: int | None
) -> None:
    case = build(rows, 2, group, block_size, window)
    cache = zeroed(case.kv_cache.shape[0], 2, block_size, 8, kind)
    scales_of(cache).fill_(float("nan"))
    write_contexts(case, cache)
    case.contexts = [dequantize(*quantize(context, KV_TYPES[kind])) for context in case.contexts]
    for attention in (paged_attention, paged_attention_reference):
        found = attention(case.query, cache, case.metadata, 0.3, window)
        torch.testing.assert_close(found.double(), case.oracle(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_quantizing_changes_attention_little(kind: str) -> None:
    case = build([(200, 1), (60, 30)], 2, 2, 16, None, head_dim=64)
    cache = zeroed(case.kv_cache.shape[0], 2, 16, 64, kind)
    write_contexts(case, cache)
    found = paged_attention_reference(case.query, cache, case.metadata, 0.125)
    plain = paged_attention_reference(case.query, case.kv_cache, case.metadata, 0.125)
    error = (found - plain).norm() / plain.norm()
    assert 1e-4 < error < (0.02 if kind == "int8" else 0.08)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_write_the_references_bits_at_model_sizes(kind: str, dtype: torch.dtype) -> None:
    with kernels_on("cuda"):
        qkv, rotations = heads_of(Numbers("cuda", dtype), 2048, Shape(32, 8, 128))
        slots = torch.randperm(4096, device="cuda")[:2048]
        found, expected = (zeroed(256, 8, 16, 128, kind, "cuda") for _ in range(2))
        rope_and_write_kv(qkv, rotations, found, slots, 32)
        rope_and_write_kv_reference(qkv, rotations, expected, slots, 32)
        assert torch.equal(tiles_of(found)[:, 1], tiles_of(expected)[:, 1])
