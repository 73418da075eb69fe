"""Tokens of 8 bits: every kernel rounds as the reference says.

Tokens are rounded by a kernel of its own and by those that make them; in the interpreter, and at
a model's sizes on a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from tests.support.any_two import any_two_meet
from tests.support.kernel_case import DEVICES, DTYPES, Numbers, kernels_on, poisoned_memory

from headrace_kernels import card
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rms_norm import (
    add_rms_norm,
    rms_norm,
    rounded_add_rms_norm,
    rounded_add_rms_norm_reference,
    rounded_rms_norm,
    rounded_rms_norm_reference,
)
from headrace_kernels.rounded_tokens import (
    LARGEST,
    RoundedTokens,
    as_taken,
    round_tokens,
    round_tokens_reference,
    unrounded,
)
from headrace_kernels.swiglu import rounded_swiglu, rounded_swiglu_reference, swiglu
from headrace_kernels.triton_runtime import compilation_count

EPS = 1e-5
E4M3 = torch.float8_e4m3fn
PER_TOKEN, IN_GROUPS = InputRounding(E4M3), InputRounding(E4M3, 128)
# How a token's numbers are rounded: with its scale, or with one for each 128 of them.
ROUNDINGS = (PER_TOKEN, IN_GROUPS, InputRounding(torch.int8))
numbers_of_8_bits = pytest.mark.parametrize("number", LARGEST, ids=["e4m3", "int8"])
roundings = pytest.mark.parametrize("rounding", ROUNDINGS, ids=["e4m3", "e4m3 groups", "int8"])
devices = pytest.mark.parametrize("device", DEVICES)
# An 8B Llama's tokens, those of Qwen3-30B-A3B and -8B, and those of models that no power of two
# divides evenly: Qwen3-32B and -14B. From one token to a chunk of a prompt.
MODEL_TOKENS = (1, 65, 256, 2048, 8192)
MODEL_SIZES = ((4096, 14_336), (2048, 12_288), (5120, 25_600), (5120, 17_408))


def skip_unless_multiplied(number: torch.dtype, device: str) -> None:
    """Kernels round to e4m3 where cards multiply it."""
    if device == "cuda" and number is E4M3 and not card.has_fp8_products(torch.device("cuda")):
        pytest.skip("needs FP8 tensor cores")


def same(found: RoundedTokens, expected: RoundedTokens) -> bool:
    """To the bit, NaN included."""
    numbers = torch.equal(found.numbers.view(torch.uint8), expected.numbers.view(torch.uint8))
    return numbers and torch.equal(found.scales.view(torch.int32), expected.scales.view(torch.int32))


def assert_nearest(tokens: RoundedTokens, x: torch.Tensor) -> None:
    """Numbers are the nearest there are to x over a scale that just fits."""
    scales, exact = tokens.scales.double(), x.double()
    torch.testing.assert_close(
        scales, exact.abs().amax(1, keepdim=True) / LARGEST[tokens.numbers.dtype], rtol=1e-6, atol=1e-11
    )
    error = (tokens.numbers.double() * scales - exact).abs()
    if tokens.numbers.dtype is torch.int8:
        # Half a step; a thousandth for fp32 on the way.
        allowed = 0.5005 * scales.expand_as(exact)
    else:
        # Half a unit in the last of 4 bits, or half of the smallest numbers' step.
        allowed = 1.001 * torch.maximum(exact.abs() * 2**-4, scales * 2**-10)
    assert bool((error <= allowed).all())


@numbers_of_8_bits
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_takes_the_nearest_numbers(dtype: torch.dtype, number: torch.dtype) -> None:
    x = Numbers("cpu", dtype).randn(5, 300) * torch.logspace(-3, 2, 5, dtype=dtype)[:, None]
    x[2] = 0
    tokens = round_tokens_reference(x, InputRounding(number))
    assert tokens.numbers.dtype is number and not tokens.numbers[2].float().any()
    assert_nearest(tokens, x)


def assert_as_reference(found: RoundedTokens, expected: RoundedTokens, device: str) -> None:
    assert torch.equal(found.scales, expected.scales)
    ours, theirs = found.numbers.float(), expected.numbers.float()
    off = ours != theirs
    if found.numbers.dtype is torch.int8:
        # A card multiplies and adds in one: what is half way but for less than fp32's rounding may
        # go the other way.
        assert bool(((ours - theirs).abs() <= 1).all()) and float(off.float().mean()) <= (
            3e-3 if device == "cuda" else 0
        )
        return
    if device == "cpu":
        # The interpreter's cast cuts numbers off at half, and does not carry into the exponent:
        # what rounds up to a power of two comes out at half of it.
        off &= (ours - theirs).abs() > (theirs.abs() / 8).clamp(min=2**-9)
        off &= (ours * 2 != theirs) | (theirs.abs().log2() % 1 != 0)
    assert not off.any()


@numbers_of_8_bits
@devices
@pytest.mark.parametrize("rows, size", [(1, 1), (4, 333), (9, 64), (2, 2100)])
def test_the_kernel_equals_its_reference(rows: int, size: int, number: torch.dtype, device: str) -> None:
    skip_unless_multiplied(number, device)
    x = Numbers(device, torch.bfloat16).randn(rows, size) * 3
    with kernels_on(device), poisoned_memory(device):
        found = round_tokens(x, InputRounding(number))
    assert_as_reference(found, round_tokens_reference(x, InputRounding(number)), device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_a_token_are_rounded_as_tokens_are(dtype: torch.dtype) -> None:
    x = Numbers("cpu", dtype).randn(5, 300) * torch.logspace(-3, 2, 300, dtype=dtype)
    tokens = round_tokens_reference(x, IN_GROUPS)
    assert tokens.scales.shape == (5, 3) and tokens.scales.stride(0) == 1
    for first in (0, 128, 256):
        part = round_tokens_reference(x[:, first : first + 128], PER_TOKEN)
        assert same(RoundedTokens(tokens.numbers[:, first : first + 128], tokens.scales[:, first // 128, None]), part)
    torch.testing.assert_close(tokens.values(), x.float(), rtol=2**-4, atol=float(tokens.scales.max()) * 2**-9)


@numbers_of_8_bits
@devices
@pytest.mark.parametrize("rows, size", [(4, 333), (9, 64), (3, 512), (2, 2100)])
def test_the_kernel_equals_its_reference_in_groups(rows: int, size: int, number: torch.dtype, device: str) -> None:
    skip_unless_multiplied(number, device)
    x = Numbers(device, torch.bfloat16).randn(rows, size) * torch.logspace(-3, 2, size, device=device).bfloat16()
    with kernels_on(device), poisoned_memory(device):
        found = round_tokens(x, InputRounding(number, 128))
    assert found.scales.shape == (rows, -(-size // 128))
    assert_as_reference(found, round_tokens_reference(x, InputRounding(number, 128)), device)


@numbers_of_8_bits
@devices
@pytest.mark.parametrize("rows, size", [(4, 333), (9, 64)])
def test_the_kernel_equals_its_reference_at_a_static_scale(
    rows: int, size: int, number: torch.dtype, device: str
) -> None:
    skip_unless_multiplied(number, device)
    x = Numbers(device, torch.bfloat16).randn(rows, size) * 3
    # One that reaches all numbers, and one that cuts most off at either end.
    for static in (10 / LARGEST[number], 1 / LARGEST[number]):
        rounding = InputRounding(number, scale=static)
        with kernels_on(device), poisoned_memory(device):
            found = round_tokens(x, rounding)
        expected = round_tokens_reference(x, rounding)
        assert_as_reference(found, expected, device)
        assert bool((found.scales == torch.tensor(static)).all())
        least, most = (float(edge) for edge in expected.numbers.float().aminmax())
        is_cut_off = (least, most) == (-128 if number is torch.int8 else -448, LARGEST[number])
        assert is_cut_off == (static < 3 / LARGEST[number])


@numbers_of_8_bits
@devices
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_what_is_not_finite_spoils_its_token_at_a_static_scale_too(
    bad: float, number: torch.dtype, device: str
) -> None:
    skip_unless_multiplied(number, device)
    x = torch.ones(3, 64, device=device)
    x[1, 7] = bad
    rounding = InputRounding(number, scale=0.5)
    with kernels_on(device):
        found = round_tokens(x, rounding)
    expected = round_tokens_reference(x, rounding)
    for tokens in (found, expected):
        assert tokens.scales.isnan().flatten().tolist() == [False, True, False]


@numbers_of_8_bits
@devices
def test_ties_go_to_the_even_number(number: torch.dtype, device: str) -> None:
    skip_unless_multiplied(number, device)
    # The largest number makes the scale 1.
    halves = (
        torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5]) if number is torch.int8 else torch.tensor([17.0, 19, -17, -19])
    )
    x = torch.cat((torch.tensor([LARGEST[number]]), halves))[None, :].to(device)
    even = [0, 2, 2, 0, -2, -2] if number is torch.int8 else [16, 20, -16, -20]
    assert round_tokens_reference(x, InputRounding(number)).numbers.float()[0, 1:].tolist() == even
    if device == "cuda" or number is torch.int8:
        with kernels_on(device):
            assert round_tokens(x, InputRounding(number)).numbers.float()[0, 1:].tolist() == even


@numbers_of_8_bits
@devices
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_token_that_is_not_finite_spoils_itself_alone(bad: float, number: torch.dtype, device: str) -> None:
    skip_unless_multiplied(number, device)
    x = Numbers(device, torch.bfloat16).randn(3, 40)
    clean = x.clone()
    x[1, 7] = bad
    with kernels_on(device):
        found, expected = round_tokens(x, InputRounding(number)), round_tokens(clean, InputRounding(number))
    assert not found.scales[1].isfinite().any()
    assert same(
        RoundedTokens(found.numbers[::2], found.scales[::2]), RoundedTokens(expected.numbers[::2], expected.scales[::2])
    )


@pytest.mark.parametrize(("num_tokens", "filled"), [(1, 128), (128, 128), (129, 256), (300, 384)])
def test_tokens_are_filled_up_with_what_lies_behind_them(num_tokens: int, filled: int) -> None:
    tokens = RoundedTokens.empty((num_tokens, 48), PER_TOKEN, torch.device("cpu"))
    tokens.numbers.copy_(torch.arange(num_tokens * 48).view(num_tokens, 48) % 15)
    tokens.scales.copy_(torch.arange(num_tokens)[:, None])
    more = tokens.filled_up(128)
    assert more.numbers.shape == (filled, 48) and more.scales.shape == (filled, 1)
    assert same(RoundedTokens(more.numbers[:num_tokens], more.scales[:num_tokens]), tokens)
    in_groups = RoundedTokens.empty((num_tokens, 48), InputRounding(E4M3, 16), torch.device("cpu")).filled_up(64)
    room = -(-num_tokens // 64) * 64
    assert in_groups.scales.shape == (room, 3) and in_groups.scales.stride() == (1, room)
    # A piece in the middle has the rest of the tokens behind it.
    piece = RoundedTokens(tokens.numbers[num_tokens // 2 :], tokens.scales[num_tokens // 2 :])
    assert len(piece.filled_up(8)) == -(-len(piece) // 8) * 8


def test_tokens_without_memory_behind_them_stay_as_they_are() -> None:
    tokens = round_tokens_reference(torch.randn(130, 48), PER_TOKEN)
    assert same(tokens.filled_up(128), tokens) and len(tokens.filled_up(65)) == 130


class Made:
    """One way to make tokens, rounded behind and by the kernel."""

    def __init__(self, device: str, dtype: torch.dtype, rows: int, size: int) -> None:
        numbers = Numbers(device, dtype, seed=rows * size)
        # Rows of very different sizes: another one's scale would show.
        sizes = torch.logspace(-2, 2, rows, device=device)[:, None].to(dtype)
        self.x, self.residual, self.weight = (
            numbers.randn(rows, size) * sizes,
            numbers.randn(rows, size),
            numbers.randn(size),
        )
        self.gate_up = numbers.randn(rows, 2 * size) * 4

    def norm(self, rounding: InputRounding) -> tuple[Callable[[], RoundedTokens], ...]:
        x, weight = self.x, self.weight
        return (
            lambda: rounded_rms_norm(x, weight, EPS, rounding),
            lambda: round_tokens(rms_norm(x, weight, EPS), rounding),
            lambda: rounded_rms_norm_reference(x, weight, EPS, rounding),
        )

    def add_norm(self, rounding: InputRounding) -> tuple[Callable[[], RoundedTokens], ...]:
        """Each leaves the residual stream in `streams`."""
        x, weight = self.x, self.weight
        self.streams = streams = [self.residual.clone() for _ in range(3)]
        return (
            lambda: rounded_add_rms_norm(x, streams[0], weight, EPS, rounding),
            lambda: round_tokens(add_rms_norm(x, streams[1], weight, EPS), rounding),
            lambda: rounded_add_rms_norm_reference(x, streams[2], weight, EPS, rounding),
        )

    def activation(self, rounding: InputRounding) -> tuple[Callable[[], RoundedTokens], ...]:
        gate_up = self.gate_up
        return (
            lambda: rounded_swiglu(gate_up, rounding),
            lambda: round_tokens(swiglu(gate_up), rounding),
            lambda: rounded_swiglu_reference(gate_up, rounding),
        )

    def other_activation(self, rounding: InputRounding) -> tuple[Callable[[], RoundedTokens], ...]:
        gate_up = self.gate_up
        return (
            lambda: rounded_swiglu(gate_up, rounding, "gelu_tanh"),
            lambda: round_tokens(swiglu(gate_up, "gelu_tanh"), rounding),
            lambda: rounded_swiglu_reference(gate_up, rounding, "gelu_tanh"),
        )


def check_same_bits(made: Made, rounding: InputRounding, device: str) -> None:
    for ways in (made.norm, made.add_norm, made.activation, made.other_activation):
        by_the_maker, behind, reference = ways(rounding)
        with kernels_on(device), poisoned_memory(device):
            found, expected = by_the_maker(), behind()
        assert found.is_rounded_by(rounding) and found.scales.dtype is torch.float32
        assert same(found, expected), (
            f"{ways.__name__}: {float((found.numbers.float() != expected.numbers.float()).float().mean()):.2%} differ"
        )
        # Not the same sums, so here and there one rounding of the model's type less, and the number
        # beside. More of that in the interpreter, whose cast to e4m3 halves what rounds up to a
        # power of two; and a single number is much of a small case.
        many = found.numbers.numel() > 1000 and (device == "cuda" or rounding.number is torch.int8)
        restored = [each.values() for each in (found, reference())]
        assert float((restored[0] - restored[1]).norm()) <= (0.03 if many else 0.15) * float(restored[1].norm())
    assert torch.equal(made.streams[0], made.streams[1])


SMALL_SIZES = ((1, 1), (3, 7), (9, 64), (17, 128), (9, 256), (2, 896), (2, 2100), (0, 8))


@devices
@pytest.mark.parametrize(("size", "dtype", "rounding"), any_two_meet(SMALL_SIZES, DTYPES, ROUNDINGS), ids=str)
def test_tokens_are_the_same_whoever_rounds_them(
    size: tuple[int, int], dtype: torch.dtype, rounding: InputRounding, device: str
) -> None:
    skip_unless_multiplied(rounding.number, device)
    check_same_bits(Made(device, dtype, *size), rounding, device)


@devices
@pytest.mark.parametrize("size", [2048, 4096, 5120, 12_288, 14_336])
def test_groups_of_models_are_the_same_whoever_rounds_them(size: int, device: str) -> None:
    skip_unless_multiplied(E4M3, device)
    check_same_bits(Made(device, torch.bfloat16, 2, size), IN_GROUPS, device)


@devices
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_group_that_is_not_finite_is_the_same_whoever_rounds_it(bad: float, device: str) -> None:
    skip_unless_multiplied(E4M3, device)
    made = Made(device, torch.bfloat16, 3, 384)
    # A gate, in the second of a token's groups.
    made.x[1, 200] = made.gate_up[1, 200] = bad
    for ways in (made.norm, made.add_norm, made.activation, made.other_activation):
        by_the_maker, behind, _ = ways(IN_GROUPS)
        with kernels_on(device), poisoned_memory(device):
            found, expected = by_the_maker(), behind()
        assert same(found, expected)
        # A norm's other groups are NaN or 0, as the token's mean square says.
        groups = [1] if ways in (made.norm, made.add_norm) else [0, 1, 2]
        is_finite = found.scales.isfinite()
        assert bool(is_finite[::2].all()) and is_finite[1, groups].tolist() == [group != 1 for group in groups]


@devices
@pytest.mark.parametrize("size", [(3, 7), (9, 64), (9, 256), (2, 2100)])
@roundings
def test_a_norm_that_is_kept_is_the_one_that_is_rounded(
    size: tuple[int, int], rounding: InputRounding, device: str
) -> None:
    skip_unless_multiplied(rounding.number, device)
    made = Made(device, torch.bfloat16, *size)
    x, weight, streams = made.x, made.weight, [made.residual.clone() for _ in range(2)]
    with kernels_on(device), poisoned_memory(device):
        for found, normed in (
            (rounded_rms_norm(x, weight, EPS, rounding, keeps=True), rms_norm(x, weight, EPS)),
            (
                rounded_add_rms_norm(x, streams[0], weight, EPS, rounding, keeps=True),
                add_rms_norm(x, streams[1], weight, EPS),
            ),
        ):
            assert torch.equal(unrounded(found), normed) and same(found, round_tokens(normed, rounding))
    assert torch.equal(*streams)


def test_a_product_takes_the_form_that_it_asks_for() -> None:
    plain = torch.ones(2, 8)
    for rounding in ROUNDINGS:
        both = dataclasses.replace(round_tokens_reference(plain, rounding), unrounded=plain)
        assert as_taken(both, rounding) is both
        # Neither in other numbers nor with scales of other groups, nor where none are taken.
        others = {*ROUNDINGS, dataclasses.replace(rounding, group_size=4), None} - {rounding}
        assert all(as_taken(both, other) is plain for other in others)
        assert as_taken(plain, rounding) is plain


@pytest.mark.gpu
@roundings
@pytest.mark.parametrize("hidden, inner", MODEL_SIZES)
def test_tokens_of_models_are_the_same_whoever_rounds_them(hidden: int, inner: int, rounding: InputRounding) -> None:
    skip_unless_multiplied(rounding.number, "cuda")
    for rows in MODEL_TOKENS:
        for size in (hidden, inner):
            check_same_bits(Made("cuda", torch.bfloat16, rows, size), rounding, "cuda")


@roundings
@devices
def test_rows_too_long_for_a_program_are_rounded_behind(rounding: InputRounding, device: str) -> None:
    skip_unless_multiplied(rounding.number, device)
    x, weight = Numbers(device, torch.float32).randn(2, 66_000), torch.ones(66_000, device=device)
    with kernels_on(device):
        for found, expected in (
            (rounded_rms_norm(x, weight, EPS, rounding), rounded_rms_norm_reference(x, weight, EPS, rounding)),
            (
                rounded_add_rms_norm(x, x.clone(), weight, EPS, rounding),
                rounded_add_rms_norm_reference(x, x.clone(), weight, EPS, rounding),
            ),
        ):
            assert same(found, expected)


@pytest.mark.gpu
@roundings
def test_no_number_of_tokens_compiles_anew(rounding: InputRounding) -> None:
    skip_unless_multiplied(rounding.number, "cuda")

    def run(rows: int) -> None:
        made = Made("cuda", torch.bfloat16, rows, 192)
        for ways in (made.norm, made.add_norm, made.activation):
            ways(rounding)[0]()
        round_tokens(made.x, rounding)

    with kernels_on("cuda"):
        run(7)
        compiled = compilation_count()
        for rows in (1, 8, 16, 65, 256, 1000):
            run(rows)
        assert compilation_count() == compiled
