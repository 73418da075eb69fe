"""A mixture of experts: each token through its experts' gated MLPs, and the weighted sum of those.

    y = sum over a token's experts e of weight_e down_e(gated(gate_e(x), up_e(x)))

Owns the operation and the rule of which kernels run (`mixture_kernels`, `vector_kernels` and those
of other weights); their tiles are `launch_rules`'. One token's pairs each read their expert's
weights for themselves, and so do those of a few in MXFP4 (`_most_vectors`); more are sorted by
expert. Where Triton does not run, each expert that a token chose multiplies its tokens by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from headrace_kernels.experts.block_kernels import multiply_blocks
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.gating import SILU, Gating, gated_reference
from headrace_kernels.experts.launch_rules import (
    few_rule,
    many_rule,
    pair_rule,
    stream_rule,
    tile_rule,
    vector_rule,
)
from headrace_kernels.experts.mixture_kernels import (
    combine_pairs,
    multiply_pairs,
    multiply_tiles,
    round_rows,
)
from headrace_kernels.experts.mxfp4_gemv import multiply_few
from headrace_kernels.experts.mxfp4_kernels import multiply_many
from headrace_kernels.experts.routing import Choice, sort_pairs
from headrace_kernels.experts.stream_gemv import multiply_streams
from headrace_kernels.experts.vector_kernels import multiply_vectors
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rms_norm import rms_norm, rms_norm_reference
from headrace_kernels.rounded_tokens import Activations, RoundedTokens, round_tokens_reference
from headrace_kernels.triton_runtime import INTERPRETED, uses_triton
from headrace_kernels.weight_formats.block_weight import BlockWeight
from headrace_kernels.weight_formats.mxfp4 import Mxfp4Weight

# Tokens up to which each reads the weights of its experts for itself, in fp32. On a GPU that serves
# tests that want exact sums: tensor cores would cut it to tf32.
_MOST_WIDE_VECTORS = 4 if INTERPRETED else 1 << 30


def fuses(num_tokens: int, per_token: int, weights: ExpertWeights) -> bool:
    """Whether norm and addition ride along in the products of so many tokens.

    Decided on the host, by sizes alone.

    Args:
        num_tokens: Tokens of the step, padding included.
        per_token: Experts of a token.
        weights: The weight of one of the two products.
    """
    is_taken = takes_kernels(weights) and not isinstance(weights.weight, BlockWeight)
    return is_taken and 1 <= num_tokens <= _most_vectors(weights, per_token)


def _most_vectors(weights: ExpertWeights, per_token: int) -> int:
    """Tokens up to which each reads the weights of its experts for itself.

    Tiles take less for two tokens already: a step of Qwen3-30B-A3B in bf16 takes an H200 3.68 ms
    so, and 4.42 by themselves. MXFP4's take half as long again for an expert as a pair does by
    itself, so pairs win until they meet the same experts: gpt-oss-20b's 32 experts take 6 tokens
    102 us a layer for 126 in tiles, 12 tokens 192 for 171; the 120b's 128 experts take 24 tokens
    380 for 405 (random choices).
    """
    if weights.dtype.itemsize == 4:
        return _MOST_WIDE_VECTORS
    if isinstance(weights.weight, Mxfp4Weight):
        return max(1, 3 * weights.total_experts // (4 * per_token))
    return 1


def takes_kernels(weights: ExpertWeights) -> bool:
    """Whether kernels multiply; MXFP4's take activations in 16 bits, but for the interpreter's.

    Otherwise PyTorch multiplies, which waits to see where tokens go, and so can't be captured.
    """
    is_taken = not isinstance(weights.weight, Mxfp4Weight) or weights.dtype.itemsize == 2 or INTERPRETED
    return uses_triton(weights.storage) and is_taken


def input_rounding(num_tokens: int, weights: ExpertWeights) -> InputRounding | None:
    """How a product of so many tokens rounds its inputs; None: it multiplies them as they are.

    One token is: its weights' way from memory is what takes time. Decided on the host, by sizes,
    kind and card alone.

    Args:
        num_tokens: Tokens of the step, padding included.
        weights: The weight of one of the two products.
    """
    is_taken = takes_kernels(weights) and weights.dtype.itemsize == 2
    return weights.row_rounding if is_taken and num_tokens > 1 and weights.takes_rounded_rows else None


def rounds(num_tokens: int, gate_up: ExpertWeights, down: ExpertWeights) -> tuple[bool, bool]:
    """Whether tokens, and whether inner elements, are rounded, and FP8 multiplies FP8."""
    of_tokens, of_inner = (input_rounding(num_tokens, weights) is not None for weights in (gate_up, down))
    return of_tokens, of_inner


def rounds_to(num_tokens: int, gate_up: ExpertWeights, down: ExpertWeights) -> InputRounding | None:
    """How what makes so many tokens may round them for `mixture`; None: not at all.

    Decided on the host, by sizes, kind and card alone.

    Args:
        num_tokens: Tokens of the step, padding included.
        gate_up: Gates and ups of all experts.
        down: Down projections of all experts.
    """
    return None if isinstance(down.weight, BlockWeight) else input_rounding(num_tokens, gate_up)


def mixture_reference(
    x: Tensor,
    choice: Choice,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    gating: Gating = SILU,
    rounded: tuple[bool, bool] = (False, False),
) -> Tensor:
    """Specification of `mixture`, in plain PyTorch; rounded: what it `rounds`."""
    x = _rounded(x, gate_up) if rounded[0] else x
    total = torch.zeros(len(x), down.num_outputs, dtype=torch.float32, device=x.device)
    numbers = choice.experts - (gate_up.first_expert or 0)
    for expert in torch.unique(numbers[(numbers >= 0) & (numbers < gate_up.num_experts)]).tolist():
        tokens, slots = (numbers == expert).nonzero(as_tuple=True)
        gates_and_ups = functional.linear(x[tokens], gate_up.expert(expert), gate_up.expert_bias(expert))
        inner = gated_reference(gates_and_ups, gating)
        inner = _rounded(inner, down) if rounded[1] else inner
        outputs = functional.linear(inner, down.expert(expert), down.expert_bias(expert)).float()
        total.index_add_(0, tokens, outputs.mul_(choice.weights[tokens, slots, None]))
    return total.to(x.dtype)


def _rounded(x: Tensor, weights: ExpertWeights) -> Tensor:
    """Rows rounded as `round_rows` does, and back in their type."""
    return round_tokens_reference(x, weights.row_rounding).values().to(x.dtype)


def mixture(
    x: Activations, choice: Choice, gate_up: ExpertWeights, down: ExpertWeights, gating: Gating = SILU
) -> Tensor:
    """Computes each token with its experts.

    Args:
        x: [num_tokens, hidden] in the model's type, or rounded as `rounds_to` says.
        choice: Experts and weights of the tokens.
        gate_up: Gates and ups of all experts, `2 * inner` outputs each.
        down: Down projections of all experts, `inner` inputs each.
        gating: What is between gate-up and down.

    Returns:
        [num_tokens, hidden] in the model's type, without the experts that are not here. The sum
        over experts is rounded once, each expert's output before only where tokens are many.
        Whether inputs of products are rounded too, `rounds` says.
    """
    if isinstance(x, Tensor) and not takes_kernels(gate_up):
        return mixture_reference(x, choice, gate_up, down, gating)
    out = choice.weights.new_empty(len(x), down.num_outputs, dtype=gate_up.dtype)
    if len(x) == 0:
        return out
    if isinstance(x, Tensor) and not _sorts(len(x), choice, gate_up, down):
        _multiply_few(x.contiguous(), choice, gate_up, down, out, None, False, gating)
    else:
        combine_pairs(_multiply_sorted(x, choice, gate_up, down, gating), choice, down, out)
    return out


def mixture_in_parts(
    x: Activations, choice: Choice, gate_up: ExpertWeights, down: ExpertWeights, gating: Gating = SILU
) -> Tensor:
    """Computes `mixture`, or what it is the sum of where that is made first.

    All experts are here. The arguments are those of `mixture`.

    Returns:
        [num_tokens, hidden], or [num_tokens, per_token, hidden], which is left to be added up in
        order: the norm behind does so in the launch that it has anyhow.
    """
    assert gate_up.first_expert is None, "outputs of experts that are elsewhere are not written"
    is_made = isinstance(x, RoundedTokens) or takes_kernels(gate_up) and _sorts(len(x), choice, gate_up, down)
    if not is_made or len(x) == 0:
        return mixture(x, choice, gate_up, down, gating)
    return _multiply_sorted(x, choice, gate_up, down, gating).view(*choice.experts.shape, down.num_outputs)


def _sorts(num_tokens: int, choice: Choice, gate_up: ExpertWeights, down: ExpertWeights) -> bool:
    """Whether kernels sort the pairs of so many tokens; those of few are computed one by one."""
    if any(isinstance(each.weight, BlockWeight) for each in (gate_up, down)):
        return True
    per_token = choice.experts.shape[1]
    return num_tokens > min(_most_vectors(gate_up, per_token), _most_vectors(down, per_token))


def _multiply_sorted(
    x: Activations, choice: Choice, gate_up: ExpertWeights, down: ExpertWeights, gating: Gating
) -> Tensor:
    """What each pair adds to its token's output, [num_pairs, hidden], by the weights' kernels."""
    if isinstance(x, RoundedTokens):
        assert x.is_rounded_by(gate_up.row_rounding), "tokens in other numbers or groups"
        return _multiply_many(x, choice, gate_up, down, gating)
    in_blocks = any(isinstance(each.weight, BlockWeight) for each in (gate_up, down))
    return (_multiply_blocks if in_blocks else _multiply_many)(x.contiguous(), choice, gate_up, down, gating)


def _multiply_many(
    x: Activations, choice: Choice, gate_up: ExpertWeights, down: ExpertWeights, gating: Gating
) -> Tensor:
    """Many tokens, whose pairs are sorted, by the kernels of their weights' kind."""
    num_pairs = choice.experts.numel()
    pairs = sort_pairs(choice.experts, gate_up.num_experts, gate_up.first_expert)
    if isinstance(gate_up.weight, Mxfp4Weight):
        assert isinstance(x, Tensor), "MXFP4 takes tokens in the model's type"
        rules = many_rule(num_pairs, gate_up, True), many_rule(num_pairs, down, False)
        return multiply_many(x, choice, pairs, gate_up, down, rules, gating)
    rounded = rounds(len(x), gate_up, down)
    of_inner = down.row_rounding if rounded[1] else None
    tiles = pair_rule(num_pairs, gate_up, True, rounded[0], of_inner), pair_rule(num_pairs, down, False, rounded[1])
    rows = round_rows(x, gate_up) if rounded[0] and isinstance(x, Tensor) else x
    return multiply_pairs(rows, choice, pairs, gate_up, down, tiles, gating, rounds_inner=rounded[1])


def _multiply_blocks(x: Tensor, choice: Choice, gate_up: ExpertWeights, down: ExpertWeights, gating: Gating) -> Tensor:
    """Products of which one at least is in a file's blocks: pairs are sorted for any tokens."""
    pairs = sort_pairs(choice.experts, gate_up.num_experts, gate_up.first_expert)
    inner = x.new_empty(choice.experts.numel(), down.num_inputs)
    outputs = x.new_empty(choice.experts.numel(), down.num_outputs)
    for rows, weights, results, own in ((x, gate_up, inner, gating), (inner, down, outputs, None)):
        if isinstance(weights.weight, BlockWeight):
            multiply_blocks(rows, choice, pairs, weights, results, own)
        else:
            tile = tile_rule(len(pairs.order), weights, gated=own is not None)
            multiply_tiles(rows, choice, pairs, weights, results, tile, own)
    return outputs


def _multiply_few(
    x: Tensor,
    choice: Choice,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    out: Tensor,
    norm: tuple[Tensor, float] | None,
    add: bool,
    gating: Gating,
) -> None:
    """Few tokens by the kernels of their weights' kind: see `vector_kernels.multiply_vectors`."""
    if isinstance(gate_up.weight, Mxfp4Weight):
        multiply_few(x, choice, gate_up, down, out, few_rule(choice, gate_up, down), norm, add, gating)
        return
    streams = stream_rule(choice, gate_up, down)
    if streams is not None:
        multiply_streams(x, choice, gate_up, down, out, streams, norm, add, gating)
    else:
        tiles = vector_rule(gate_up), vector_rule(down)
        multiply_vectors(x, choice, gate_up, down, out, tiles, norm, add, gating)


def add_mixture_reference(
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    choice: Choice,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    gating: Gating = SILU,
) -> None:
    """Specification of `add_mixture`, in plain PyTorch."""
    residual.add_(mixture_reference(rms_norm_reference(residual, norm_weight, eps), choice, gate_up, down, gating))


def add_mixture(
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    choice: Choice,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    gating: Gating = SILU,
) -> None:
    """Adds a mixture of the residual stream's norm to the residual stream.

    Args:
        residual: [num_tokens, hidden], contiguous, changed in place.
        norm_weight: [hidden].
        eps: Added to the mean square.
        choice: Experts and weights of the tokens.
        gate_up: Gates and ups of all experts, `2 * inner` outputs each.
        down: Down projections of all experts, `inner` inputs each.
        gating: What is between gate-up and down.
    """
    num_tokens, per_token = choice.experts.shape
    if not all(fuses(num_tokens, per_token, weights) for weights in (gate_up, down)):
        residual.add_(mixture(rms_norm(residual, norm_weight, eps), choice, gate_up, down, gating))
        return
    _multiply_few(residual, choice, gate_up, down, residual, (norm_weight, eps), True, gating)
