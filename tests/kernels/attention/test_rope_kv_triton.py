"""Rotation, norms of heads and cache write in one kernel, against fp64; which slots it touches."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.support.any_two import any_two_meet
from tests.support.kernel_case import DEVICES, DTYPES, Numbers, assert_rounded, kernels_on, poisoned_memory

from headrace_kernels.attention.rope import rope_rows
from headrace_kernels.attention.rope_frequencies import default_frequencies, rope_table
from headrace_kernels.attention.rope_kv import rope_and_write_kv, rope_and_write_kv_reference
from headrace_kernels.rms_norm import rms_norm_reference

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Heads:
    """A model's heads."""

    query: int
    kv: int
    size: int
    normed: bool = False
    # Dimensions that turn; 0: all.
    rotary: int = 0
    # Whether neighbours turn together.
    interleaved: bool = False
    # Whether weights of norms are fp32, whatever the heads are.
    wide_norms: bool = False


class Step:
    """A step's projection and a cache, all of it fresh random numbers."""

    def __init__(
        self, heads: Heads, slots: list[int], numbers: Numbers, block_size: int = 16, num_blocks: int = 4
    ) -> None:
        self.heads, self.slots, self.block_size = heads, slots, block_size
        device = numbers.device
        table = rope_table(default_frequencies(heads.rotary or heads.size, 10_000.0), 512).to(device)
        self.rotations = rope_rows(table, numbers.integers(0, 512, len(slots)))
        self.qkv = numbers.randn(len(slots), heads.query + 2 * heads.kv, heads.size)
        self.kv_cache = numbers.randn(num_blocks, 2, heads.kv, block_size, heads.size)
        kept = torch.float32 if heads.wide_norms else numbers.dtype
        self.weights = [numbers.randn(heads.size).to(kept) if heads.normed else None for _ in range(2)]
        self.slot_mapping = torch.tensor(slots, device=device, dtype=torch.int64)

    def run(self) -> torch.Tensor:
        """The rotated queries; the cache is written."""
        device = self.qkv.device.type
        with kernels_on(device), poisoned_memory(device):
            return rope_and_write_kv(
                self.qkv,
                self.rotations,
                self.kv_cache,
                self.slot_mapping,
                self.heads.query,
                *self.weights,
                EPS,
                self.heads.interleaved,
            )

    def check(self) -> None:
        """Runs the kernel and compares all that it gave, and that it left the rest of the cache."""
        raw, before, count = self.qkv.clone(), self.kv_cache.clone(), self.heads.query
        query = self.run()
        assert torch.equal(self.qkv, raw)
        self._check_rotated(query, self.qkv[:, :count], self.weights[0])
        tokens = [i for i, slot in enumerate(self.slots) if slot >= 0]
        slots = self.slot_mapping[tokens]
        # [slots, 2, heads, size]
        stored = self.kv_cache.permute(0, 3, 1, 2, 4).flatten(0, 1)[slots]
        keys, values = self.qkv[tokens, count : -self.heads.kv], self.qkv[tokens, -self.heads.kv :]
        self._check_rotated(stored[:, 0], keys, self.weights[1], self.rotations[tokens])
        assert torch.equal(stored[:, 1], values)
        untouched = torch.ones(before.shape[0] * self.block_size, dtype=torch.bool, device=before.device)
        untouched[slots] = False
        now, old = (cache.permute(0, 3, 1, 2, 4).flatten(0, 1)[untouched] for cache in (self.kv_cache, before))
        assert torch.equal(now, old)

    def _check_rotated(
        self, found: torch.Tensor, raw: torch.Tensor, weight: torch.Tensor | None, rotations: torch.Tensor | None = None
    ) -> None:
        wide = raw.double()
        if weight is not None:
            wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        turning = self.heads.rotary or self.heads.size
        wide, still = wide[..., :turning], wide[..., turning:]
        is_paired = self.heads.interleaved
        a, b = (wide[..., 0::2], wide[..., 1::2]) if is_paired else wide.chunk(2, dim=-1)
        cosine, _, sine = (self.rotations if rotations is None else rotations).double()[:, None].unbind(2)
        rotated = torch.stack((a * cosine - b * sine, b * cosine + a * sine), dim=-1 if is_paired else -2).flatten(-2)
        expected = torch.cat((rotated, still), dim=-1)
        # Both parts of a plane may cancel, so an error is relative to the plane. Normed heads are
        # rounded twice more before.
        sums = a.abs() + b.abs()
        sums = sums.repeat_interleave(2, dim=-1) if is_paired else sums.repeat(1, 1, 2)
        plane = torch.cat((sums, still.abs()), dim=-1)
        assert_rounded(found, expected, 1 if weight is None else 3, plane)


SHAPES = (
    Heads(4, 2, 16),
    Heads(14, 2, 64, normed=True),
    Heads(3, 3, 80),
    Heads(7, 1, 96, normed=True),
    Heads(8, 1, 128),
    # Some dimensions turn: most, few, and a number of planes that is no power of two.
    Heads(3, 1, 128, rotary=96),
    Heads(4, 2, 16, normed=True, rotary=4),
    Heads(3, 3, 80, rotary=20),
    Heads(4, 2, 16, interleaved=True),
    Heads(4, 2, 16, normed=True, wide_norms=True),
    Heads(3, 1, 80, normed=True, rotary=20, interleaved=True),
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_heads_are_rotated_and_stored(heads: Heads, dtype: torch.dtype, device: str) -> None:
    Step(heads, [17, 3, -1, 63, 0], Numbers(device, dtype)).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normed", [False, True])
# One tile of each sort, and several of which the last are not whole, as the last program's tokens.
@pytest.mark.parametrize(("query", "kv"), [(2, 1), (70, 40)])
def test_a_token_is_rotated_the_same_alone_and_among_others(query: int, kv: int, normed: bool, device: str) -> None:
    heads, slots = Heads(query, kv, 16, normed), list(range(10))
    step = Step(heads, slots, Numbers(device, torch.float32))
    step.check()
    whole = step.run()
    few = Step(heads, slots, Numbers(device, torch.float32))
    few.qkv, few.rotations, few.slot_mapping = few.qkv[9:], few.rotations[9:], few.slot_mapping[9:]
    assert torch.equal(few.run(), whole[9:]) and torch.equal(few.kv_cache[0, :, :, 9], step.kv_cache[0, :, :, 9])


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_without_tokens_changes_nothing(device: str) -> None:
    step = Step(Heads(2, 1, 16), [], Numbers(device, torch.float32))
    before = step.kv_cache.clone()
    assert step.run().shape == (0, 2, 16) and torch.equal(step.kv_cache, before)


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(
    rotary=strategies.sampled_from([0, 2, 4, 6]),
    slots=strategies.lists(
        strategies.integers(-1, 4 * 8 - 1), min_size=1, max_size=9, unique_by=lambda s: s if s >= 0 else object()
    ),
    normed=strategies.booleans(),
    interleaved=strategies.booleans(),
)
def test_exactly_the_mapped_slots_are_written(slots: list[int], normed: bool, rotary: int, interleaved: bool) -> None:
    Step(Heads(3, 2, 8, normed, rotary, interleaved), slots, Numbers("cpu", torch.float16), block_size=8).check()


@pytest.mark.parametrize(("normed", "rotary"), [(False, 0), (True, 0), (False, 12), (True, 12)])
def test_the_reference_is_the_operations_one_after_the_other(normed: bool, rotary: int) -> None:
    step = Step(Heads(4, 2, 16, normed, rotary), [5, -1, 9], Numbers("cpu", torch.float32))
    cache = step.kv_cache.clone()
    query = rope_and_write_kv_reference(
        step.qkv, step.rotations, cache, step.slot_mapping, 4, step.weights[0], step.weights[1], EPS
    )
    step.check()
    torch.testing.assert_close(step.run(), query)
    torch.testing.assert_close(step.kv_cache, cache)
    if normed:
        assert step.weights[0] is not None
        assert not torch.allclose(query, rms_norm_reference(query, step.weights[0], EPS))


MODEL_HEADS = (
    Heads(32, 8, 128),
    Heads(32, 8, 128, normed=True),
    Heads(14, 2, 64),
    Heads(16, 4, 256, normed=True),
    Heads(24, 8, 128, rotary=96),
    Heads(24, 8, 128, normed=True, rotary=96),
    Heads(32, 2, 128, rotary=64, interleaved=True),
)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "tokens", "dtype"), any_two_meet(MODEL_HEADS, (1, 4, 65, 2048), DTYPES), ids=str)
def test_heads_of_models_are_rotated_and_stored(heads: Heads, tokens: int, dtype: torch.dtype) -> None:
    numbers = Numbers("cuda", dtype, seed=tokens)
    slots = torch.randperm(4096, generator=torch.Generator().manual_seed(tokens))[:tokens].tolist()
    slots[tokens // 2] = -1
    Step(heads, slots, numbers, num_blocks=256).check()


@pytest.mark.gpu
def test_a_cache_of_more_than_2_to_the_31_numbers_is_addressed() -> None:
    num_blocks = 2**31 // (2 * 8 * 16 * 128) + 2
    step = Step(Heads(8, 8, 128), [1], Numbers("cuda", torch.bfloat16))
    step.kv_cache = torch.zeros(num_blocks, 2, 8, 16, 128, device="cuda", dtype=torch.bfloat16)
    step.slot_mapping = torch.tensor([num_blocks * 16 - 1], device="cuda")
    step.run()
    assert torch.equal(step.kv_cache[-1, 1, :, 15], step.qkv[0, -8:])
    assert int(step.kv_cache[:-1].count_nonzero()) == 0
