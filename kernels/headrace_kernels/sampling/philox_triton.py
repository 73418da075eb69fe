"""The noise of `philox`, inside Triton kernels.

Owns device functions, no launch. The integer part has the bits of `philox_4x32_reference`; the
logarithms differ from torch's in the last places, by a millionth or two. Exact ones would be half
of what the noise costs, and a draw over a vocabulary costs little else.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from headrace_kernels.triton_runtime import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def philox_4x32(c0, c1, c2, c3, key_0, key_1):
    """Ten rounds. Counters and keys are uint32; four random words per counter."""
    for _ in tl.static_range(10):
        # The halves of the two 64-bit products. All of it wraps, and is meant to.
        high_0, low_0 = tl.umulhi(c0, 0xD2511F53), tl.mul(c0, 0xD2511F53, sanitize_overflow=False)
        high_1, low_1 = tl.umulhi(c2, 0xCD9E8D57), tl.mul(c2, 0xCD9E8D57, sanitize_overflow=False)
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0 = tl.add(key_0, 0x9E3779B9, sanitize_overflow=False)
        key_1 = tl.add(key_1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _log(x):
    """By the hardware's logarithm: absolute error 2e-7 between 0.5 and 2, relative elsewhere."""
    if _INTERPRETED:
        return tl.log(x)
    return libdevice.fast_logf(x)


@triton.jit
def _divide(x, y):
    if _INTERPRETED:
        return x / y
    return libdevice.fast_dividef(x, y)


@triton.jit
def _exponential(uniform):
    """-log(1 - u) for u in (0, 1).

    Small ones decide the draw, so they are a series, 2 atanh(u / (2 - u)), and exact to the last
    places.
    """
    ratio = _divide(uniform, 2.0 - uniform)
    square = ratio * ratio
    small = 2 * ratio * (1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7))))
    return tl.where(uniform < 0.25, small, -_log(1.0 - uniform))


@triton.jit
def gumbel_noise(first_token, seed_low, seed_high, output_index, position, BLOCK: tl.constexpr):
    """Noise of BLOCK tokens from `first_token` on, a multiple of 4: float32 [BLOCK].

    The key's parts are int32 scalars, see `philox.NoiseKeys`.
    """
    groups = ((first_token >> 2) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zeros = tl.zeros((BLOCK // 4,), tl.uint32)
    w0, w1, w2, w3 = philox_4x32(
        groups,
        zeros + position.to(tl.uint32, bitcast=True),
        zeros + output_index.to(tl.uint32, bitcast=True),
        zeros,
        zeros + seed_low.to(tl.uint32, bitcast=True),
        zeros + seed_high.to(tl.uint32, bitcast=True),
    )
    # Token t takes word t % 4 of counter t // 4.
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    # As `philox._gumbel` does it: uniform below 1, exponential, its negative logarithm.
    uniform = tl.minimum(words.to(tl.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)
    return -_log(_exponential(uniform))
