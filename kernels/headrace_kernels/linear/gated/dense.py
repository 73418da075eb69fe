"""Products of a gate and up projection with the activation in them, for steps of some tens of rows.

Owns the rule of when our kernel (`dense_sm90`) multiplies, and by which tile. It is as fast
as the weight comes from memory, starts before the kernel ahead has ended, and saves the
activation's launch. Where it does not multiply, `dense.linear` and `swiglu` follow each other: with
fewer rows where layers do not fuse (`dense_small_batch`), with more because cuBLAS, whose programs
share what they read, is ahead by more than the activation takes.
"""

from __future__ import annotations

import functools

from torch import Tensor

from headrace_kernels import card
from headrace_kernels.hopper.launch import MOST_SLOT_BYTES
from headrace_kernels.linear.dense import linear, linear_reference
from headrace_kernels.linear.gated.dense_sm90 import GatedTile, multiply_gated, takes_gated
from headrace_kernels.swiglu import Activation, swiglu, swiglu_reference

# Fewest rows: fewer are `dense_small_batch`'s, which has the activation inside where layers fuse.
# With 9 rows that takes an H200 56.0 us for 8B's gate and up, and this kernel 57.5.
_LEAST_ROWS = 17
# Most rows, which are a program's. A step of an 8B Llama takes an H200 6,152 us at 64 rows, with
# cuBLAS and SwiGLU 6,280; with programs of 128 rows 8,228 and 8,116 at 128 (docs/experiments.md,
# "Launch rules of products").
_MOST_ROWS, _NUM_WARPS = 64, 4
# Outputs of a program, in pieces, and inputs from which it has enough steps.
_WIDTHS = ((64, 32, 16), (64, 32, 0), (64, 16, 0), (64, 0, 0))
_LEAST_INPUTS = 2048
# The part of a wave's outputs that there must be. Not measured: 8B has 0.97.
_LEAST_SHARE = 0.9
# Steps in shared memory that are enough to hide the way from memory. Not swept.
_MOST_SLOTS = 8


def gated_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation = "silu") -> Tensor:
    """Specification of `gated_linear`, in plain PyTorch."""
    return swiglu_reference(linear_reference(x, weight, bias), activation)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation = "silu") -> Tensor:
    """SwiGLU, or GeGLU, of the two projections in a weight.

    Args:
        x: [num_tokens, in].
        weight: [2 * size, in] in the type of x, the gate in the first half. No kernel writes it.
        bias: [2 * size].
        activation: What the gate passes through.

    Returns:
        [num_tokens, size] in the type of x, rounded once where our kernel multiplies, otherwise as
        product and activation do one after the other.
    """
    tile = gated_rule(x.shape[0], weight)
    if tile is None:
        return swiglu(linear(x, weight, bias), activation)
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    multiply_gated(x, weight, bias, out, tile, activation)
    return out


@functools.cache
def gated_tile(num_outputs: int, multiprocessors: int) -> GatedTile | None:
    """The tile whose waves of programs have room for the fewest outputs.

    None: whatever the tile, too many multiprocessors have nothing to do.

    Args:
        num_outputs: Columns of the result.
        multiprocessors: How many the card has.
    """

    def room(widths: tuple[int, int, int]) -> int:
        """Outputs of whole waves."""
        wave = sum(widths) * multiprocessors
        return -(-num_outputs // wave) * wave

    widths = min(_WIDTHS, key=room)
    if num_outputs < _LEAST_SHARE * room(widths):
        return None
    tile = GatedTile(_MOST_ROWS, widths, _NUM_WARPS, slots=2)
    return tile._replace(slots=min(_MOST_SLOTS, MOST_SLOT_BYTES // tile.step_bytes))


def gated_rule(num_rows: int, weight: Tensor) -> GatedTile | None:
    """The tile of a product by our kernel; None: product and activation follow each other.

    Args:
        num_rows: Rows of the step, padding included.
        weight: [2 * size, in].
    """
    if not _LEAST_ROWS <= num_rows <= _MOST_ROWS or weight.shape[1] < _LEAST_INPUTS or not takes_gated(weight):
        return None
    return gated_tile(weight.shape[0] // 2, card.multiprocessors(weight.device))
