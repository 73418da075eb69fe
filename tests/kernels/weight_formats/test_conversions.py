"""The assembly that dequantizes bytes, read one instruction after the other.

Every code there is, in every place of a register, becomes the number that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace_kernels.weight_formats.conversions import byte_assembly

DTYPES = (torch.bfloat16, torch.float16)


def _shown(word: int, dtype: torch.dtype) -> Tensor:
    """The two numbers of a register, in fp64."""
    return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16).view(dtype).double()


def _packed(numbers: Tensor, dtype: torch.dtype) -> int:
    low, high = (int(each) & 0xFFFF for each in numbers.to(dtype).view(torch.int16))
    return low | high << 16


def _permuted(first: int, second: int, selector: int) -> int:
    """Picks bytes of eight by four bits each; the uppermost bit asks for the byte's sign."""
    source = [each >> 8 * place & 255 for each in (first, second) for place in range(4)]
    found = 0
    for place in range(4):
        picked = selector >> 4 * place & 15
        byte = source[picked & 7]
        found |= (byte if picked < 8 else 255 * (byte >> 7)) << 8 * place
    return found


def _looked_up(a: int, b: int, c: int, table: int) -> int:
    """Each bit by a table of eight."""
    rows = ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1 for bit in range(32))
    return sum((table >> row & 1) << bit for bit, row in enumerate(rows))


def run(code: str, word: int, dtype: torch.dtype) -> Tensor:
    """The four numbers that a piece of `byte_assembly` makes of a register."""
    operations: dict[str, Callable[..., int]] = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
        "prmt.b32": _permuted,
        "lop3.b32": _looked_up,
        "fma.rn.bf16x2": lambda a, b, c: _packed(_shown(a, dtype) * _shown(b, dtype) + _shown(c, dtype), dtype),
        "mul.f16x2": lambda a, b: _packed(_shown(a, dtype) * _shown(b, dtype), dtype),
        "sub.f16x2": lambda a, b: _packed(_shown(a, dtype) - _shown(b, dtype), dtype),
    }
    registers = {"$2": word}
    for line in code.strip(" {}").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if operation in ("", ".reg"):
            continue
        target, *operands = (operand.strip() for operand in rest.split(","))
        values = [registers[each] if each in registers else int(each, 0) for each in operands]
        registers[target] = operations[operation](*values)
    return torch.cat([_shown(registers["$0"], dtype), _shown(registers["$1"], dtype)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "number"), [("fp8", torch.float8_e4m3fn), ("int8", torch.int8)])
def test_every_code_is_restored_in_every_place(kind: str, number: torch.dtype, dtype: torch.dtype) -> None:
    make = byte_assembly.fn if hasattr(byte_assembly, "fn") else byte_assembly
    code = make(kind, dtype == torch.bfloat16)
    for first in range(256):
        codes = torch.tensor([first, (first * 7 + 3) % 256, (first * 11 + 129) % 256, 255 - first], dtype=torch.uint8)
        if kind == "fp8":
            codes[codes & 0x7F == 0x7F] = 0x80  # NaN, which weights have none of: -0 instead
        word = sum(int(byte) << 8 * place for place, byte in enumerate(codes))
        assert torch.equal(run(code, word, dtype), codes.view(number).double())
