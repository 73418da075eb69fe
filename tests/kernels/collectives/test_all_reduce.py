"""All-reduce by each other's memory.

Ranks are processes with the interpreter over shared memory, and must agree to the bit with the
reference, and with each other.
"""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
import random

import numpy as np
import pytest
import torch
from tests.kernels.collectives.rank_in_interpreter import EPS, Case, Result, Setting, called
from tests.support.examples import examples
from tests.support.kernels_ahead import KernelsAhead
from tests.support.warm_python import WarmPython
from torch import Tensor

from headrace_kernels.collectives import all_reduce, all_reduce_kernels
from headrace_kernels.collectives.all_reduce import (
    PROGRAMS,
    Peers,
    all_reduce_add_rms_norm_reference,
    all_reduce_reference,
    can_norm,
    can_one_shot,
    can_rounded_norm,
    memory_bytes,
    one_shot_bytes,
    takes,
    takes_norm,
    takes_rounded_norm,
)
from headrace_kernels.collectives.words import SENTINEL
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rms_norm import rounded_add_rms_norm
from headrace_kernels.rounded_tokens import RoundedTokens
from headrace_kernels.triton_runtime import INTERPRETED, forced

_WORDS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
ROUNDINGS = {
    "e4m3": InputRounding(torch.float8_e4m3fn),
    "groups": InputRounding(torch.float8_e4m3fn, 128),
    "int8": InputRounding(torch.int8),
}
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="ranks without cards are processes with the interpreter")


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bfloat16:
        # The interpreter does not round to bf16: numbers whose sums need no rounding.
        return torch.randint(-30, 30, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def case(way: str, *shape: int, world_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    x = drawn(world_size, *shape, seed=seed + sum(shape), dtype=dtype)
    if way in ("one", "two"):
        return Case(way, x)
    residual = drawn(*shape, seed=seed + 1, dtype=dtype)
    return Case(way, x, residual, drawn(shape[-1], seed=seed + 2, dtype=dtype), ROUNDINGS.get(way))


@functools.cache
def _interpreters() -> WarmPython:
    """Processes for ranks of all tests."""
    return WarmPython(["torch", "headrace_kernels.collectives.all_reduce"], os.environ | {"TRITON_INTERPRET": "1"})


Results = list[list[Result]]


def run_ranks(folder: pathlib.Path, world_size: int, cases: list[Case], setting: Setting) -> Results:
    """Results by rank of all cases, one after the other without anything between them."""
    torch.save((setting, cases), folder / "cases.pt")
    memory = os.memfd_create("ranks")
    fill(memory, world_size, setting)
    path = f"/proc/{os.getpid()}/fd/{memory}"
    ranks = [
        ("tests.kernels.collectives.rank_in_interpreter", [str(rank), str(world_size), path, str(folder)])
        for rank in range(world_size)
    ]
    try:
        ended = _interpreters().run(ranks)
    finally:
        os.close(memory)
    assert [rank.returncode for rank in ended] == [0] * world_size, [rank.stderr[-3000:] for rank in ended]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def fill(memory: int, world_size: int, setting: Setting) -> None:
    """Fills all words with the sentinel."""
    num_bytes = memory_bytes(setting.capacity_bytes, world_size)
    os.pwrite(memory, np.full(world_size * num_bytes // 4, SENTINEL, np.int32).tobytes(), 0)


def bits(x: Tensor) -> Tensor:
    return x.view(_WORDS[x.dtype])


def check_same(found: Tensor, expected: Tensor) -> None:
    """To the bit, zeros' signs included; a NaN is as good as another."""
    number = ~expected.isnan()
    assert torch.equal(found.isnan(), ~number)
    assert torch.equal(bits(found)[number], bits(expected)[number])


def same_tokens(found: Tensor | RoundedTokens, expected: RoundedTokens) -> bool:
    """To the bit, NaN included."""
    assert isinstance(found, RoundedTokens)
    numbers = torch.equal(found.numbers.view(torch.uint8), expected.numbers.view(torch.uint8))
    return numbers and torch.equal(bits(found.scales), bits(expected.scales))


def check_rounded(results: list[Result], each: Case) -> None:
    """Compares with all-reduce and the norm's own kernel, to the bit.

    The stream is as the reference has it.
    """
    assert each.residual is not None and each.weight is not None and each.rounding is not None
    residual = each.residual.clone()
    with forced():
        total = all_reduce_reference(each.x.unbind())
        expected = rounded_add_rms_norm(total, residual, each.weight, EPS, each.rounding)
    for out, after in results:
        assert same_tokens(out, expected) and after is not None
        check_same(after, residual)


def check(found: Results, cases: list[Case]) -> None:
    for index, each in enumerate(cases):
        results = [rank[index] for rank in found]
        if each.rounding is not None:
            check_rounded(results, each)
            continue
        first, _ = results[0]
        assert isinstance(first, Tensor)
        for out, _ in results[1:]:
            assert isinstance(out, Tensor) and torch.equal(bits(out), bits(first)), f"ranks differ in call {index}"
        if each.residual is None or each.weight is None:
            check_same(first, all_reduce_reference(each.x.unbind()))
            continue
        residual = each.residual.clone()
        normed = all_reduce_add_rms_norm_reference(each.x.unbind(), residual, each.weight, EPS)
        for _, after in results:
            assert after is not None
            check_same(after, residual)
        # The norm's own sum has another order than the reference's: an ulp of 16 bits, some of
        # fp32.
        tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[each.x.dtype]
        torch.testing.assert_close(first, normed, rtol=tolerance, atol=tolerance, equal_nan=True)


# With fewer programs they agree in all that follows.
@pytest.mark.slow
@needs_interpreter
def test_ranks_agree_with_as_many_programs_as_on_cards(tmp_path: pathlib.Path) -> None:
    cases = [case(way, *shape, world_size=2) for way, *shape in (("one", 9000), ("two", 9000), ("norm", 3, 40))]
    check(run_ranks(tmp_path, 2, cases, Setting(PROGRAMS, 128 << 10)), cases)


def drawn_case(draw: random.Random, world_size: int, seed: int) -> Case:
    """Draws sizes around warps, programs and the limits.

    Two shots have sizes around what leaves the last ranks less or nothing.
    """
    way = draw.choice(["one", "one", "two", "norm", *ROUNDINGS])
    dtypes = [torch.bfloat16, torch.float16] if way in ROUNDINGS else [torch.float32, torch.bfloat16, torch.float16]
    dtype = draw.choice(dtypes)
    vector = 16 // dtype.itemsize
    if way == "norm":
        shape = [draw.choice([1, 2]), vector * draw.choice([1, 5, 127, 128, 200])]
    elif way in ROUNDINGS:
        # Up to what four programs have of each rank's rows, the last ones' fewer or none; 1,032 is
        # just more than the norm's own kernel has two of in a program.
        shape = [draw.choice([1, 2, world_size + 1, 3 * world_size - 1]), draw.choice([1032, 1288])]
    elif way == "one":
        shape = [vector * draw.choice([1, 31, 32, 33, 127, 128, 129, 400, 511, 512])]
    else:
        shape = [vector * draw.choice([1, 2, 3, 5, 127, 128, 129, 1023, 2047, 2048])]
    return case(way, *shape, world_size=world_size, dtype=dtype, seed=seed)


def drawn_cases(world_size: int) -> list[Case]:
    """Small tensors follow large ones, of whose words none may be left in any buffer."""
    draw = random.Random(world_size)
    return [drawn_case(draw, world_size, seed) for seed in range(examples(60) // world_size)]


# Two ranks do the same below; what more of them add is the order of sums, in the next test.
@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("world_size", [3, 4])
def test_buffers_come_round_whatever_follows_what(tmp_path: pathlib.Path, world_size: int) -> None:
    cases = drawn_cases(world_size)
    check(run_ranks(tmp_path, world_size, cases, Setting()), cases)


def awkward(dtype: torch.dtype) -> Tensor:
    """Every bit pattern of 16 bits that is near a border, beside every other; as fp32 the pairs."""
    # Of bf16, the interpreter has no subnormal numbers.
    edges = [
        0,
        0x80 if dtype == torch.bfloat16 else 1,
        0x7C00,
        0x7C01,
        0x7E00,
        0x7F7F,
        0x7F80,
        0x7F81,
        0x7FC0,
        0x7FFE,
        0x7FFF,
    ]
    patterns = torch.tensor([pattern | sign for pattern in edges for sign in (0, 0x8000)])
    pairs = torch.cartesian_prod(patterns, patterns).to(torch.int16)
    assert bool((pairs == -1).all(dim=1).any()), "the sentinel is among them"
    return pairs.view(torch.int32).flatten().view(dtype)


def awkward_rounded_cases() -> list[Case]:
    """Rows of one rank with NaN and infinity, of zeros, and with a largest number that decides."""
    rows = drawn(2, 5, 1032, seed=3, dtype=torch.float16)
    rows[1, 0, 7], rows[0, 1, 1031], rows[0, 2, 0] = float("nan"), float("inf"), 60_000.0
    rows[:, 3] = 0.0
    stream = drawn(5, 1032, seed=4, dtype=torch.float16)
    stream[3] = 0.0
    about = (rows, stream, drawn(1032, seed=5, dtype=torch.float16))
    return [Case("rounded", *about, rounding) for rounding in ROUNDINGS.values()]


def awkward_cases(way: str) -> list[Case]:
    """Zeros of either sign on all ranks, infinities, and NaNs of all kinds.

    The sentinel is among the NaNs.
    """
    cases = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        alone = awkward(dtype)
        zeros = torch.full_like(alone, -0.0)
        for parts in ([alone, zeros], [zeros, alone], [zeros, zeros], [alone, alone]):
            x = torch.stack(parts)
            norm = (torch.full_like(alone[None], -0.0), torch.ones_like(alone)) if way == "norm" else (None, None)
            cases.append(Case(way, x[:, None] if way == "norm" else x, *norm))
    return cases


OF_TWO = {
    "drawn": drawn_cases(2),
    "rounded": awkward_rounded_cases(),
    **{way: awkward_cases(way) for way in ("one", "two", "norm")},
}


@pytest.fixture(scope="module")
def found_by_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """Results of all calls of two ranks, made in one run.

    To start a rank takes longer than its calls.
    """
    results = run_ranks(tmp_path_factory.mktemp("two"), 2, list(itertools.chain(*OF_TWO.values())), Setting())
    of_rank = [iter(rank) for rank in results]
    return {name: [list(itertools.islice(rank, len(cases))) for rank in of_rank] for name, cases in OF_TWO.items()}


@needs_interpreter
def test_buffers_of_two_come_round_whatever_follows_what(found_by_two: dict[str, Results]) -> None:
    check(found_by_two["drawn"], OF_TWO["drawn"])


@needs_interpreter
@pytest.mark.parametrize("way", ["one", "two", "norm"])
def test_no_bit_pattern_is_waited_for_or_changed(found_by_two: dict[str, Results], way: str) -> None:
    check(found_by_two[way], OF_TWO[way])


@needs_interpreter
# In the interpreter, a product of infinity and zero.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rounded_norms_of_awkward_sums_are_those_of_the_norms_own_kernel(found_by_two: dict[str, Results]) -> None:
    check(found_by_two["rounded"], OF_TWO["rounded"])


def peers_of_two() -> Peers:
    return Peers.of([1 << 40, 1 << 41], 1, 1 << 20, torch.device("cpu"))


def test_what_does_not_fit_is_left_to_others() -> None:
    peers = peers_of_two()
    assert takes(torch.empty(1 << 18), peers) and not takes(torch.empty((1 << 18) + 4), peers)
    assert can_one_shot(torch.empty(1 << 17), peers) and not can_one_shot(torch.empty((1 << 17) + 4), peers)
    assert not takes(torch.empty(5), peers)
    assert not takes(torch.empty(8, 8)[:, :4], peers)
    with pytest.raises(AssertionError, match="begins with an allocation"):
        takes(torch.empty(9)[1:], peers)
    assert not can_norm(torch.empty(0, 64), peers)
    assert not can_norm(torch.empty(2, 62), peers)
    assert can_norm(torch.empty(PROGRAMS // 2, 64), peers) and not can_norm(torch.empty(PROGRAMS // 2 + 1, 64), peers)
    assert can_norm(torch.empty(1, 4096), peers) and not can_norm(torch.empty(1, 4100), peers)
    assert can_rounded_norm(torch.empty(2 * PROGRAMS, 2048, dtype=torch.bfloat16), peers)
    assert not can_rounded_norm(torch.empty(2 * PROGRAMS + 1, 2048, dtype=torch.bfloat16), peers)
    three = Peers.of([1 << shift for shift in range(40, 43)], 0, 1 << 20, torch.device("cpu"))
    # All 64 rows of 16 KiB would fit the memory, the first rank's 22 not its slot.
    assert can_rounded_norm(torch.empty(63, 8192, dtype=torch.bfloat16), three)
    assert not can_rounded_norm(torch.empty(64, 8192, dtype=torch.bfloat16), three)
    for shape in ((0, 2048), (4, 1024), (4, 2044), (4, 8200)):
        assert not can_rounded_norm(torch.empty(shape, dtype=torch.float16), peers)
    assert not can_rounded_norm(torch.empty(4, 2048), peers)
    four = Peers.of([1 << shift for shift in range(40, 44)], 0, 1 << 22, torch.device("cpu"))
    rows = one_shot_bytes(4) // (4 * 4096)
    assert takes_norm(torch.empty(rows, 4096), four)
    for rounded_rows, is_taken in ((63, False), (64, True), (128, True)):
        x = torch.empty(rounded_rows, 8192, dtype=torch.bfloat16)
        assert can_rounded_norm(x, four) and takes_rounded_norm(x, four) is is_taken
    assert can_norm(torch.empty(rows + 1, 4096), four) and not takes_norm(torch.empty(rows + 1, 4096), four)


def test_nothing_is_not_sent() -> None:
    peers = peers_of_two()
    assert all_reduce.one_shot(torch.empty(0, 64), peers).shape == (0, 64)
    assert all_reduce.two_shot(torch.empty(0, 64), peers).shape == (0, 64)
    assert not peers.state.any()


def send_from_other_rank(each: Case, memory: Tensor, slot_bytes: int) -> None:
    """Writes into rank 0's memory, int32, what rank 1 of two sends it in the first call.

    In two shots that is rank 0's half of the tensor, and the sum of the other half.
    """
    slot = slot_bytes // 4
    sent = {slot: each.x[1]}
    if each.way not in ("one", "norm"):
        total = all_reduce_reference(each.x.unbind())
        sent = {slot: each.x[1].flatten().chunk(2)[0], 3 * slot: total.flatten().chunk(2)[1]}
    for place, part in sent.items():
        words = part.flatten().view(torch.int32)
        memory[place : place + len(words)] = words


@needs_interpreter
@pytest.mark.parametrize("way", ["one", "two", "norm", "e4m3"])
def test_a_call_reads_and_sends_nothing_before_the_kernel_ahead_has_ended(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, is_rounded = Setting(), way == "e4m3"
    each = case(way, 2, 1032 if is_rounded else 64, world_size=2, dtype=torch.float16 if is_rounded else torch.float32)
    own, other = torch.full((2, memory_bytes(setting.capacity_bytes, 2) // 4), SENTINEL, dtype=torch.int32)
    monkeypatch.setattr(all_reduce, "PROGRAMS", setting.programs)
    peers = Peers.of([own.data_ptr(), other.data_ptr()], 0, setting.capacity_bytes, own.device)
    # So this rank's call comes to its end though no other is here.
    send_from_other_rank(each, own, peers.slot_bytes)
    x, residual = each.x[0].clone(), None if each.residual is None else each.residual.clone()
    written = [x, peers.state] if residual is None else [x, peers.state, residual]

    class Ahead(KernelsAhead):
        def _wait(self) -> None:
            assert self.waits or bool((other == SENTINEL).all()), "sent before the first wait"
            super()._wait()

    with monkeypatch.context() as patch:
        ahead = Ahead(patch, all_reduce_kernels, tuple(written))
        found = called(each, x, residual, peers)
    check([[found]], [each])
    assert ahead.waits == ahead.released == setting.programs
    assert bool((other != SENTINEL).any())
