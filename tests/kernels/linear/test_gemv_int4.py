"""One row times INT4 on the tensor cores.

What the assembly does with the registers of a warp is emulated, the whole kernel runs in the
interpreter, and a GPU's threads hold what the assembly expects of them.
"""

from __future__ import annotations

import re
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.kernels.linear.test_quantized_linear import DTYPES, Product, all_codes, assert_close, check_gated, check_row
from tests.support.compiling import compiled
from tests.support.kernel_case import DEVICES, kernels_on

from headrace_kernels.linear.gemv_int4 import Int4GemvTile, multiply_gemv_int4, takes_gemv_int4
from headrace_kernels.weight_formats import conversions as low_bit_numbers
from headrace_kernels.weight_formats.quantized_weight import QuantKind, allocate, dequantize

# Registers of a warp's threads: 32 integers of 32 bits, or 32 sums in fp64.
Registers = dict[str, torch.Tensor]
LANES = torch.arange(32)


def halves_of(register: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[32, 2] numbers of 16 bits as fp64."""
    both = torch.stack((register & 0xFFFF, register >> 16), 1)
    return torch.where(both >= 1 << 15, both - (1 << 16), both).to(torch.int16).view(dtype).double()


def tensor_product(
    left: list[torch.Tensor], right: list[torch.Tensor], sums: list[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    """`mma.m16n8k16` of four, two and four registers, as PTX lays them out."""
    g, t = LANES // 4, LANES % 4
    a, b, c = (torch.zeros(size, dtype=torch.float64) for size in ((16, 16), (16, 8), (16, 8)))
    for place, register in enumerate(left):
        for half in (0, 1):
            a[g + 8 * (place % 2), 2 * t + half + 8 * (place // 2)] = halves_of(register, dtype)[:, half]
    for place, register in enumerate(right):
        for half in (0, 1):
            b[2 * t + half + 8 * place, g] = halves_of(register, dtype)[:, half]
    for place, register in enumerate(sums):
        c[g + 8 * (place // 2), 2 * t + place % 2] = register
    c += a @ b
    return [c[g + 8 * (place // 2), 2 * t + place % 2] for place in range(4)]


def emulate(code: str, registers: Registers, dtype: torch.dtype) -> Registers:
    """What a piece of assembly leaves in the registers."""
    registers = dict(registers)

    def value(name: str) -> torch.Tensor:
        return registers[name] if name in registers else torch.full((32,), int(name, 0))

    for statement in re.findall(r"\s*([^;]+);", code.strip()[1:-1]):
        name, operands = statement.split(" ", 1)
        if name.startswith("mma"):
            assert name.endswith("f32.bf16.bf16.f32" if dtype == torch.bfloat16 else "f32.f16.f16.f32")
            found, left, right, sums = (each.split(", ") for each in re.findall(r"{([^}]*)}", operands))
            results = tensor_product(
                [value(r) for r in left], [value(r) for r in right], [value(r) for r in sums], dtype
            )
            registers |= dict(zip(found, results, strict=True))
            continue
        target, *sources = operands.split(", ")
        if name == "shr.b32":
            registers[target] = value(sources[0]) >> int(sources[1])
        elif name == "and.b32":
            registers[target] = value(sources[0]) & value(sources[1])
        elif name == "lop3.b32":
            assert sources[3] == "0xEA"
            registers[target] = (value(sources[0]) & value(sources[1])) | value(sources[2])
        elif name == "mov.b32":
            registers[target] = value(sources[0])
        else:
            assert name == ".reg"
    return registers


def held(numbers: torch.Tensor, first: int) -> Registers:
    """Four registers of [t, g, 8] of 16 bits, from $first on."""
    bits = numbers.view(torch.int16).int() & 0xFFFF
    mine = bits[LANES % 4, LANES // 4].long()
    return {f"${first + place}": mine[:, 2 * place] | mine[:, 2 * place + 1] << 16 for place in range(4)}


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("part", [0, 2])
def test_assembly_multiplies_what_threads_hold(part: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(part)
    words = torch.randint(-(1 << 15), 1 << 15, (2, 4, 8, 8), generator=generator).to(torch.int16)
    x = torch.randn(4, 8, 8, generator=generator).to(dtype)
    before = torch.randn(8, 32, generator=generator).double()
    registers = held(words[0], 8) | held(words[1], 12) | held(x, 16) | {f"${20 + i}": before[i] for i in range(8)}
    code = low_bit_numbers._column_product_assembly.fn(part, dtype == torch.bfloat16)
    found = emulate(code, registers, dtype)
    for place, (shown, output) in enumerate([(shown, output) for shown in (0, 1) for output in (0, 1)]):
        numbers = ((words[output] >> 4 * (part + shown)) & 15).double()
        numbers = numbers + 128 if dtype == torch.bfloat16 else numbers * (2.0**-20 if shown else 2.0**-24)
        products = torch.einsum("tgj,tcj->gc", numbers, x.double())
        for column in (0, 1):
            register = 4 * shown + 2 * column + output
            expected = products[LANES // 4, 2 * (LANES % 4) + column] + before[register]
            # fp64 alone; of fp16's numbers the smallest are 2^-24.
            assert float((found[f"${register}"] - expected).abs().max()) < 1e-11, place


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("squares", [False, True])
def test_assembly_sums_columns(squares: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    raw, x = (torch.randn(4, 8, 8, generator=generator).to(dtype) for _ in range(2))
    before = torch.randn(8, 32, generator=generator).double()
    registers = held(raw, 8) | held(x, 12) | {f"${16 + i}": before[i] for i in range(8)}
    found = emulate(low_bit_numbers._column_sum_assembly.fn(squares, dtype == torch.bfloat16), registers, dtype)
    products = torch.einsum("tgj,tcj->gc", raw.double(), raw.double()) if squares else torch.zeros(8, 8).double()
    sums = x.double().sum((0, 2))
    for column in (0, 1):
        own = 2 * (LANES % 4) + column
        assert float((found[f"${column}"] - products[LANES // 4, own] - before[column]).abs().max()) < 1e-11
        for copy in (0, 1):
            register = 4 + 2 * copy + column
            assert float((found[f"${register}"] - sums[own] - before[register]).abs().max()) < 1e-11


# Outputs, inputs, group. Tiles of 512, 256 and 128 inputs, last ones that are cut, more warps than
# tiles; outputs that fill no program.
SIZES = ((17, 1536, 128), (6, 768, 64), (32, 352, 32), (3, 1056, 1056), (1, 8, 8))


# One row's product by every tile is in test_quantized_linear.
@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(SIZES), st.sampled_from(DTYPES), st.sampled_from((16, 32)), st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 4))
)  # fmt: skip
def test_every_cut_agrees_with_fp64(
    sizes: tuple[int, int, int], dtype: torch.dtype, block_n: int, warps: int, run: int
) -> None:
    outputs, inputs, group = sizes
    with kernels_on("cpu"):
        product = Product(QuantKind.INT4, 1, 2 * outputs, inputs, group, dtype, "cpu")
        check_row(product, Int4GemvTile(block_n, warps, run))
        check_gated(product, Int4GemvTile(16, warps, run))


@pytest.mark.parametrize("device", DEVICES)
def test_every_number_is_multiplied_as_it_is(device: str) -> None:
    """All codes, with every zero point, times 1: what is taken off again leaves nothing."""
    with kernels_on(device):
        for dtype in DTYPES[:2]:
            codes = all_codes(QuantKind.INT4, dtype, device)
            expected = dequantize(codes, torch.empty(codes.num_outputs, codes.num_inputs, device=device))
            # One input of every part and thread at least.
            for k in range(0, codes.num_inputs, 7 if device == "cpu" else 1):
                x = torch.zeros(1, codes.num_inputs, dtype=dtype, device=device)
                x[0, k] = 1
                out = torch.full((1, codes.num_outputs), float("nan"), device=device)
                multiply_gemv_int4(x, codes, None, out, Int4GemvTile(16, 4, 1))
                assert torch.equal(out[0], expected[:, k])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_no_number_reaches_every_output(poison: float, device: str) -> None:
    with kernels_on(device):
        product = Product(QuantKind.INT4, 1, 20, 512, 128, torch.bfloat16, device)
        for k in (0, 200, 511):
            for norm in (None, (product.norm_weight, 1e-5)):
                x, out = product.x.clone(), torch.zeros(1, 20, dtype=torch.bfloat16, device=device)
                x[0, k] = poison
                multiply_gemv_int4(x, product.weight, None, out, Int4GemvTile(16, 2, 2), norm)
                assert not bool(out.isfinite().any())


def test_x_may_begin_anywhere() -> None:
    with kernels_on("cpu"):
        product = Product(QuantKind.INT4, 1, 20, 512, 128, torch.bfloat16, "cpu")
        memory = torch.zeros(513, dtype=torch.bfloat16)
        memory[1:] = product.x[0]
        out = product.poison()
        multiply_gemv_int4(memory[1:][None], product.weight, product.bias, out, Int4GemvTile(16, 2, 4))
        assert_close(out, product.expected(product.x.double()), product.spread(product.x.double()))


def test_inputs_that_threads_cannot_load_together_are_not_taken() -> None:
    taken = {
        inputs: takes_gemv_int4(allocate(QuantKind.INT4, 2, inputs, inputs, torch.bfloat16, torch.device("cpu")))
        for inputs in (96, 101, 104)
    }
    assert taken == {96: True, 101: False, 104: True}


def operands_that_lie_elsewhere(kernel: dict[str, Any]) -> list[str]:
    """Layouts of the tensors of a warp's products, but for the one that they must have."""
    warps = kernel["num_warps"]
    expected = "sizePerThread = [1, 1, 1, 8], threadsPerWarp = [4, 8, 1, 1], "
    expected += f"warpsPerCTA = [1, 1, {warps}, 1], order = [3, 0, 1, 2]"
    return [layout for layout in kernel["warp_product_layouts"] if layout != expected]


# It changes with the compiler alone, whose version is locked. What the products are is computed in
# the interpreter above.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "arch", "count"),
    [
        # Whichever two of card, sizes and tile meet.
        *(("nibble_rows", arch, 6) for arch in (80, 90)),
        *(("nibble_rows_all", arch, 12) for arch in (80, 89, 90)),
    ],
)
def test_threads_of_a_card_hold_what_the_assembly_expects(room: str, arch: int, count: int) -> None:
    """The compiler chooses which thread holds what, and the assembly works across threads.

    If it chose another layout, results would be wrong.
    """
    kernels = compiled("compiled_kernels", room, arch)
    assert len(kernels) == count
    for kernel in kernels:
        assert kernel["warp_product_layouts"] and not operands_that_lie_elsewhere(kernel), kernel
