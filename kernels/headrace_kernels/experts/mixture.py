"""A mixture of experts: each token through its experts' gated MLPs, and the weighted sum of those.

    y = sum over a token's experts e of weight_e down_e(gated(gate_e(x), up_e(x)))

Owns the operation and the rule of which kernels run (`mixture_kernels`, `vector_kernels` and those
of other weights). Where Triton does not run, each expert that a token chose multiplies its tokens
by itself.

Launch rules. One token's pairs each read their expert's weights for themselves, and so do those of
a few in MXFP4 (`_most_vectors`); more are sorted by expert, in tiles of about twice the pairs that
an expert has on average, from 8 or 16 to 128, so that most experts are one tile while a step is
bound by memory. Those of Hopper were chosen on an H200 (docs/experiments.md, "experts of few tokens
in tiles"), of other cards without one.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional

from headrace_kernels import card
from headrace_kernels.experts.block_kernels import multiply_blocks
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.gating import SILU, Gating, gated_reference
from headrace_kernels.experts.mixture_kernels import (
    PairTile,
    combine_pairs,
    multiply_pairs,
    multiply_tiles,
    round_rows,
    rounds_rows,
)
from headrace_kernels.experts.mxfp4_gemv import BLOCK_INNER, FewTile, multiply_few
from headrace_kernels.experts.mxfp4_kernels import ManyTile, multiply_many
from headrace_kernels.experts.routing import Choice, sort_pairs
from headrace_kernels.experts.stream_gemv import StreamTile, multiply_streams
from headrace_kernels.experts.vector_kernels import VectorTile, multiply_vectors
from headrace_kernels.rms_norm import rms_norm, rms_norm_reference
from headrace_kernels.rounded_tokens import MOST_FAST_INPUTS, Activations, RoundedTokens, round_tokens_reference
from headrace_kernels.triton_runtime import INTERPRETED, uses_triton
from headrace_kernels.weight_formats.block_weight import BlockWeight
from headrace_kernels.weight_formats.input_rounding import InputRounding
from headrace_kernels.weight_formats.mxfp4 import Mxfp4Weight
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight

# Tokens up to which each reads the weights of its experts for itself, in fp32. On a GPU that serves
# tests that want exact sums: tensor cores would cut it to tf32.
_MOST_WIDE_VECTORS = 4 if INTERPRETED else 1 << 30
_LEAST_TILE, _LARGEST_TILE = 16, 128
# Largest tiles without products from shared memory, where larger ones spill registers: of INT4, and
# of 8 bits in groups or blocks, which are summed up group by group.
_LARGEST_OLD_INT4_TILE, _LARGEST_OLD_GROUPED_TILE = 16, 32
# Programs of a multiprocessor that stream rows of one token's experts with plain weights; the
# longest token that they take, and the longest rows of a token's inner elements, which lie in
# registers; elements of a block of those.
_STREAMS = 4
_LONGEST_INPUT, _LONGEST_ROW = 8192, 24_576
_SHORTEST_BLOCK, _LONGEST_BLOCK = 512, 8192
# MXFP4's products of few tokens: gate and up by four warps, of which each asks for all that it
# multiplies of gpt-oss' 2,880 inputs at once, and down by one for each expert. A layer of
# gpt-oss-20b without attention takes 46.2 us for one token on an H200, with four warps for each
# expert 48.0 (docs/experiments.md, "kernels that begin before the one ahead has ended"). With its
# loads in order a program of one block of gates and ups takes 27.2 us of a layer's mixture, and
# 30.1 otherwise ("experts in MXFP4 as streams"). Down asks for half of an expert's steps before it
# computes; with loads in order three of its programs have registers on a multiprocessor, otherwise
# two. By programs of 8 outputs, whose steps are an output's two tiles, it takes one token 7.5 us in
# place of 9.3 by those of 16 (one H200, 2026-11-29, "steps of a mixture were padded").
FEW_GATE_UP, FEW_DOWN = FewTile(parts=4, ahead=3, in_order=True), FewTile(parts=1, ahead=6, in_order=True)
# Programs of a multiprocessor that stream gates and ups of one token in MXFP4: as many as registers
# allow.
_MXFP4_STREAMS = 3


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


def stream_rule(choice: Choice, gate_up: ExpertWeights, down: ExpertWeights) -> StreamTile | None:
    """The tile of products of one token, from sm_90 on; None: others multiply.

    Weights are plain, or of 8 bits with a scale for each output and no zero points.

    Four programs to a multiprocessor hold the rows that are multiplied and the next ones. A step of
    Qwen3-30B-A3B takes an H200 2,422 us so, 2,667 with programs of two rows each; with three
    quarters of the programs 2,441, with half of them 2,629 (docs/experiments.md, "rows of one
    token's experts as streams").
    """
    (num_tokens, per_token), device = choice.experts.shape, gate_up.storage.device
    are_taken = all(_streams(weights) for weights in (gate_up, down))
    inner, long_row = down.num_inputs, per_token * down.num_inputs
    fits = inner * down.storage.element_size() % 16 == 0 and long_row <= _LONGEST_ROW
    fits = fits and gate_up.num_inputs <= _LONGEST_INPUT
    if num_tokens != 1 or not are_taken or not fits or not card.launches_early(device):
        return None
    programs, block_n = _STREAMS * card.multiprocessors(device), 2
    return StreamTile(
        block_n=block_n,
        gate_up_loops=triton.cdiv(inner, block_n * max(1, programs // per_token)),
        block_k=min(_LONGEST_BLOCK, max(_SHORTEST_BLOCK, triton.next_power_of_2(triton.cdiv(long_row, 3)))),
        down_loops=triton.cdiv(down.num_outputs, programs),
    )


def _streams(weights: ExpertWeights) -> bool:
    """Whether programs that stay can stream such weights."""
    layout, (_, _, zeros) = weights.layout(), weights.bits()
    return layout.kind == "plain" or (layout.kind != "int4" and not layout.is_grouped and zeros is None)


def few_rule(choice: Choice, gate_up: ExpertWeights, down: ExpertWeights) -> tuple[FewTile, FewTile]:
    """The tiles of few tokens' products in MXFP4: of gate and up, and of down.

    From sm_90 on gates and ups stream, by programs that are all there at once if there is one
    token. A layer's mixture of gpt-oss-20b takes an H200 26.7 us so for one token, 27.7 by programs
    of a block each, and 81.0 and 84.7 for four; with 3 or 5 blocks a program instead of 4, of which
    the last multiprocessors have less to do, 29.2 (docs/experiments.md, "experts in MXFP4 as
    streams").
    """
    per_token, device = choice.experts.shape[1], gate_up.storage.device
    if not card.launches_early(device):
        return FEW_GATE_UP, FEW_DOWN
    programs = _MXFP4_STREAMS * card.multiprocessors(device)
    loops = triton.cdiv(per_token * triton.cdiv(down.num_inputs, BLOCK_INNER), programs)
    return FEW_GATE_UP._replace(loops=loops), FEW_DOWN


def vector_rule(weights: ExpertWeights) -> VectorTile:
    """The tile of a product of few tokens: some KB of weights are under way in a program.

    Two tokens of Qwen3-30B-A3B in FP8 take an H100 39.2 us in tiles of 8 outputs, and 49.5 in tiles
    of 4 whose rows are loaded whole (docs/experiments.md, "experts that multiply FP8 by FP8").
    """
    if weights.layout().kind == "plain":
        return VectorTile(block_n=2, block_words=2048, num_warps=4)
    return VectorTile(block_n=8, block_words=128, num_warps=8)


def tile_rule(num_pairs: int, weights: ExpertWeights, gated: bool) -> PairTile:
    """The tile of a product of many pairs.

    From sm_90 on those that took an H200 least for 2 to 8,192 tokens of Qwen3-30B-A3B, of 8 to 10
    of each size (docs/experiments.md, "experts of few tokens in tiles" and "tiles of many tokens of
    a mixture"); tiles of 64 and 128 pairs of 8 bits, and all of other cards, were guessed.
    """
    layout, average = weights.layout(), triton.cdiv(num_pairs, weights.total_experts)
    is_old, is_8_bit = not card.has_warpgroup_products(weights.storage.device), layout.kind in ("int8", "fp8")
    if layout.kind == "int4" and not is_old:
        return _int4_tile(average, gated)
    if is_8_bit and not is_old and average <= _LEAST_TILE // 4:
        return PairTile(64, _LEAST_TILE // 2, 128, num_warps=4, num_stages=3)
    largest = _LARGEST_TILE
    if layout.is_grouped and is_old:
        largest = _LARGEST_OLD_INT4_TILE if layout.kind == "int4" else _LARGEST_OLD_GROUPED_TILE
    block_m = min(max(triton.next_power_of_2(2 * average), _LEAST_TILE), largest)
    if is_8_bit and not is_old and block_m <= 2 * _LEAST_TILE:
        return PairTile(32, block_m, 128, num_warps=2, num_stages=4 if block_m == _LEAST_TILE else 3)
    if layout.kind == "plain" and not is_old and block_m == _LEAST_TILE:
        return PairTile(64, block_m, 128, 4, 4) if gated else PairTile(128, block_m, 64, num_warps=4, num_stages=6)
    if layout.kind == "plain" and not is_old and block_m == _LARGEST_TILE:
        return PairTile(128 if gated else 256, block_m, 64, num_warps=8, num_stages=4, outputs_first=True)
    num_warps, num_stages = (8, 3) if block_m == _LARGEST_TILE else (4, 4)
    return PairTile(64 if gated else 128, block_m, 128 if is_8_bit else 64, num_warps, num_stages)


def _int4_tile(average: int, gated: bool) -> PairTile:
    """INT4's tile where an expert has so many pairs on average, from sm_90 on."""
    if average <= _LEAST_TILE // 2:
        block_m = _LEAST_TILE if average > _LEAST_TILE // 4 else _LEAST_TILE // 2
        return PairTile(64, block_m, 64, num_warps=4, num_stages=3)
    if average >= _LARGEST_TILE:
        return PairTile(128, _LARGEST_TILE, 64, num_warps=8, num_stages=3)
    is_small = average <= _LEAST_TILE
    if gated is is_small:
        return PairTile(64, 32 if is_small else 64, 64, num_warps=4, num_stages=3)
    return PairTile(128, 32 if is_small else 64, 64, num_warps=8, num_stages=3)


def rounded_tile_rule(num_pairs: int, weights: ExpertWeights, gated: bool) -> PairTile:
    """The tile of a product of many pairs in which FP8 multiplies FP8.

    Those that took an H100 least for 64, 256, 1,024 and 8,192 tokens of Qwen3-30B-A3B, of 163
    (docs/experiments.md, "experts that multiply FP8 by FP8"). Sums in two halves, of tensor cores
    and of fp32, leave registers for no larger ones. Sums of tensor cores alone do: theirs of 128
    pairs took an H200 least, or 1% more, for 2,048 and 8,192 tokens, of 14 to 28 ("sums of FP8 by
    the tensor cores alone").
    """
    average = triton.cdiv(num_pairs, weights.total_experts)
    if average >= _LARGEST_TILE and not weights.layout().is_grouped and weights.num_inputs <= MOST_FAST_INPUTS:
        if gated:
            return PairTile(64, _LARGEST_TILE, 128, num_warps=4, num_stages=3)
        if average < 2 * _LARGEST_TILE:
            return PairTile(128, _LARGEST_TILE, 128, num_warps=4, num_stages=4)
        return PairTile(256, _LARGEST_TILE, 128, num_warps=8, num_stages=3, outputs_first=True)
    largest = _LARGEST_TILE if average >= 2 * _LARGEST_TILE else _LARGEST_TILE // 2
    block_m = min(max(triton.next_power_of_2(2 * average), _LEAST_TILE), largest)
    if block_m == _LEAST_TILE and gated and not weights.layout().is_grouped:
        return PairTile(64, block_m, 256, num_warps=4, num_stages=3)
    if block_m <= _LEAST_TILE * 2:
        return PairTile(64, block_m, 128, num_warps=4, num_stages=5)
    if block_m < _LARGEST_TILE:
        return PairTile(64 if gated else 128, block_m, 128, num_warps=4, num_stages=3)
    if gated:
        return PairTile(64, block_m, 128, num_warps=8, num_stages=4)
    return PairTile(64, block_m, 128, num_warps=4, num_stages=3, outputs_first=True)


def many_rule(num_pairs: int, weights: ExpertWeights, gated: bool) -> ManyTile:
    """The tile of a product of many pairs in MXFP4; its size follows the pairs as others' do.

    Those of 128 pairs were the fastest of gpt-oss-20b on an H200 from 512 tokens on, where an
    expert has 64 (docs/experiments.md, "experts of few tokens in tiles"). Before sm_90 those, and
    128 outputs, spill registers.
    """
    average, is_new = triton.cdiv(num_pairs, weights.total_experts), card.has_warpgroup_products(weights.storage.device)
    block_n = 128 if is_new and not gated else 64
    if 2 * average >= _LARGEST_TILE and is_new:
        return ManyTile(block_n, _LARGEST_TILE, num_warps=4, num_stages=3)
    block_m = min(max(triton.next_power_of_2(2 * average), _LEAST_TILE), _LARGEST_TILE // 2)
    return ManyTile(block_n, block_m, num_warps=4, num_stages=4)


def input_rounding(num_tokens: int, weights: ExpertWeights) -> InputRounding | None:
    """How a product of so many tokens rounds its inputs; None: it multiplies them as they are.

    One token is: its weights' way from memory is what takes time. Decided on the host, by sizes,
    kind and card alone.

    Args:
        num_tokens: Tokens of the step, padding included.
        weights: The weight of one of the two products.
    """
    is_taken = takes_kernels(weights) and weights.dtype.itemsize == 2
    if not is_taken or num_tokens <= 1 or not rounds_rows(weights):
        return None
    weight = weights.weight
    assert isinstance(weight, QuantizedWeight), "FP8"
    return InputRounding(torch.float8_e4m3fn, weight.group_size if weight.is_grouped else 0)


def rounds(num_tokens: int, gate_up: ExpertWeights, down: ExpertWeights) -> tuple[bool, bool]:
    """Whether tokens, and whether inner elements, are rounded, and FP8 multiplies FP8."""
    of_tokens, of_inner = (input_rounding(num_tokens, weights) is not None for weights in (gate_up, down))
    return of_tokens, of_inner


def rounds_to(num_tokens: int, gate_up: ExpertWeights, down: ExpertWeights) -> torch.dtype | None:
    """The 8-bit type in which `mixture` may be given so many tokens; None: the model's alone.

    What makes the tokens rounds each by a scale of its own, so groups of inputs that have one each
    are rounded by the mixture. Decided on the host, by sizes, kind and card alone.

    Args:
        num_tokens: Tokens of the step, padding included.
        gate_up: Gates and ups of all experts.
        down: Down projections of all experts.
    """
    rounding = None if isinstance(down.weight, BlockWeight) else input_rounding(num_tokens, gate_up)
    return rounding.number if rounding is not None and rounding.is_per_token else None


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
    assert isinstance(weights.weight, QuantizedWeight), "FP8"
    groups = round_tokens_reference(x.reshape(-1, weights.weight.group_size), torch.float8_e4m3fn)
    return (groups.numbers.float() * groups.scales).to(x.dtype).view(x.shape)


def mixture(
    x: Activations, choice: Choice, gate_up: ExpertWeights, down: ExpertWeights, gating: Gating = SILU
) -> Tensor:
    """Computes each token with its experts.

    Args:
        x: [num_tokens, hidden] in the model's type, or rounded if `rounds_to` says so.
        choice: Experts and weights of the tokens.
        gate_up: Gates and ups of all experts, `2 * inner` outputs each.
        down: Down projections of all experts, `inner` inputs each.
        gating: What is between gate-up and down.

    Returns:
        [num_tokens, hidden] in the model's type, without the experts that are not here. The sum
        over experts is rounded once, each expert's output before only where tokens are many.
        Whether inputs of products are rounded too, `rounds` says.
    """
    if isinstance(x, RoundedTokens):
        out = x.scales.new_empty(len(x), down.num_outputs, dtype=gate_up.dtype)
        _multiply_many(x, choice, gate_up, down, out, gating)
        return out
    if not takes_kernels(gate_up):
        return mixture_reference(x, choice, gate_up, down, gating)
    out = x.new_empty(len(x), down.num_outputs)
    if len(x) == 0:
        return out
    if any(isinstance(each.weight, BlockWeight) for each in (gate_up, down)):
        _multiply_blocks(x.contiguous(), choice, gate_up, down, out, gating)
        return out
    per_token = choice.experts.shape[1]
    if len(x) <= min(_most_vectors(gate_up, per_token), _most_vectors(down, per_token)):
        _multiply_few(x.contiguous(), choice, gate_up, down, out, None, False, gating)
        return out
    _multiply_many(x.contiguous(), choice, gate_up, down, out, gating)
    return out


def _multiply_many(
    x: Activations, choice: Choice, gate_up: ExpertWeights, down: ExpertWeights, out: Tensor, gating: Gating
) -> None:
    """Many tokens, whose pairs are sorted, by the kernels of their weights' kind."""
    num_pairs = choice.experts.numel()
    pairs = sort_pairs(choice.experts, gate_up.num_experts, gate_up.first_expert)
    if isinstance(gate_up.weight, Mxfp4Weight):
        assert isinstance(x, Tensor), "MXFP4 takes tokens in the model's type"
        rules = many_rule(num_pairs, gate_up, True), many_rule(num_pairs, down, False)
        multiply_many(x, choice, pairs, gate_up, down, out, rules, gating)
        return
    rounded = rounds(len(x), gate_up, down)
    of_tokens, of_inner = (rounded_tile_rule if each else tile_rule for each in rounded)
    tiles = of_tokens(num_pairs, gate_up, gated=True), of_inner(num_pairs, down, gated=False)
    rows = round_rows(x, gate_up) if rounded[0] and isinstance(x, Tensor) else x
    multiply_pairs(rows, choice, pairs, gate_up, down, out, tiles, gating, rounds_inner=rounded[1])


def _multiply_blocks(
    x: Tensor, choice: Choice, gate_up: ExpertWeights, down: ExpertWeights, out: Tensor, gating: Gating
) -> None:
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
    combine_pairs(outputs, choice, down, out)


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
