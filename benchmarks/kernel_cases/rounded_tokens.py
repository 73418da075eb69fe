"""Cases of tokens rounded to 8 bits, at the sizes of an 8B Llama.

They are rounded by the norms and the SwiGLU that make them, and by the kernel of its own that
stands behind attention.

Owns the data and the count of bytes; warps of a row are tried against each other. e4m3 and int8
differ in one conversion, so the former stands for both but once. It is rounded by a scale for each
token and in groups of 128 inputs, whose more scales are left out of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
import triton

from benchmarks.kernel_cases.elementwise import EPS, FFN, HIDDEN, Case, Cases, launch_case, randn
from headrace_kernels import rounded_tokens, swiglu
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rms_norm import rounded_add_rms_norm
from headrace_kernels.rounded_tokens import round_tokens
from headrace_kernels.swiglu import rounded_swiglu

# Products of fewer tokens take them as they are.
TOKENS = (65, 256, 2048, 8192)
WARPS = (4, 8, 16, 32)
E4M3 = InputRounding(torch.float8_e4m3fn)
IN_GROUPS = InputRounding(torch.float8_e4m3fn, 128)
INT8 = InputRounding(torch.int8)


def add_rms_norm_case(num_tokens: int, rounding: InputRounding = E4M3) -> Case:
    """Reads rows and residual stream, writes the stream, the norm in bytes and a scale."""
    x, residual, weight = randn(num_tokens, HIDDEN), randn(num_tokens, HIDDEN), randn(HIDDEN)
    num_bytes = (3 * 2 + 1) * x.numel() + 2 * HIDDEN + 4 * num_tokens
    return launch_case(lambda: rounded_add_rms_norm(x, residual, weight, EPS, rounding), num_bytes)


def swiglu_case(num_tokens: int, rounding: InputRounding = E4M3) -> Case:
    """Reads two halves, writes one in bytes and a scale."""
    gate_up = randn(num_tokens, 2 * FFN)
    return launch_case(lambda: rounded_swiglu(gate_up, rounding), 5 * num_tokens * FFN + 4 * num_tokens)


def round_case(num_tokens: int, size: int = HIDDEN, rounding: InputRounding = E4M3) -> Case:
    """Reads rows, writes them in bytes and a scale."""
    x = randn(num_tokens, size)
    return launch_case(lambda: round_tokens(x, rounding), 3 * x.numel() + 4 * num_tokens)


def tokens() -> Cases:
    """The operations of a layer, over the number of tokens."""
    for num_tokens in TOKENS:
        for name, make in (("add_rms_norm", add_rms_norm_case), ("swiglu", swiglu_case), ("round", round_case)):
            yield f"{name} {num_tokens}", lambda make=make, num_tokens=num_tokens: make(num_tokens)
            yield (
                f"{name} {num_tokens} in groups",
                lambda make=make, num_tokens=num_tokens: make(num_tokens, rounding=IN_GROUPS),
            )
    yield "swiglu int8 8192", lambda: swiglu_case(8192, INT8)
    yield "round 14336 8192", lambda: round_case(8192, FFN)


def _forced(make: Callable[[], Case], name: str, launch: tuple[int, ...]) -> Case:
    run, num_bytes, flops = make()
    module = swiglu if name == "rounded_launch_rule" else rounded_tokens

    def forced() -> object:
        with mock.patch.object(module, name, lambda _: launch):
            return run()

    return forced, num_bytes, flops


def launches() -> Cases:
    """SwiGLU and the kernel of its own, by the warps of a row."""
    block = triton.next_power_of_2(FFN)
    for num_tokens in (256, 8192):
        for warps in WARPS:
            yield (
                f"swiglu {num_tokens} {warps} warps",
                lambda num_tokens=num_tokens, warps=warps: _forced(
                    lambda: swiglu_case(num_tokens), "rounded_launch_rule", (block, warps)
                ),
            )
            yield (
                f"round {num_tokens} {warps} warps",
                lambda num_tokens=num_tokens, warps=warps: _forced(
                    lambda: round_case(num_tokens), "launch_rule", (1, HIDDEN, warps)
                ),
            )
