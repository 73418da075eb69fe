"""Kernels that begin before the one ahead has ended find what it stores.

Only a card has launches that overlap. In the interpreter, what an earlier kernel would write is
poison until the first program of a kernel waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from tests.support.gguf_numbers import quantize
from tests.support.kernel_case import Numbers, kernels_on, poisoned_memory
from tests.support.kernels_ahead import KernelsAhead

from headrace_kernels import card, rounded_tokens
from headrace_kernels import rms_norm as rms_norm_room
from headrace_kernels.experts import (
    block_kernels,
    chunked_sort,
    mixture_kernels,
    mxfp4_gemv,
    router,
    routing,
    scored_routing,
    stream_gemv,
)
from headrace_kernels.experts import mixture as mixture_room
from headrace_kernels.experts.expert_weights import ExpertPart, ExpertWeights
from headrace_kernels.experts.gating import SILU, Gating
from headrace_kernels.experts.mixture import (
    add_mixture,
    add_mixture_reference,
    mixture,
    mixture_reference,
    rounds_to,
)
from headrace_kernels.experts.router import choose_after_norm, choose_after_norm_reference
from headrace_kernels.experts.routing import (
    Choice,
    choose_experts,
    choose_experts_reference,
    sort_pairs,
    sort_pairs_reference,
)
from headrace_kernels.experts.scored_routing import Scoring, choose_scored_experts, choose_scored_experts_reference
from headrace_kernels.experts.tile_table import most_tiles
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.linear import dense_small_batch, dense_small_batch_kernels, gemv_8bit, gemv_int4, quantized
from headrace_kernels.linear.dense_small_batch import (
    launch_rule,
    launches_early,
    linear_add,
    norm_linear,
    norm_linear_reference,
    norm_swiglu,
    norm_swiglu_reference,
    small_linear,
)
from headrace_kernels.linear.dense_small_batch_kernels import AHEAD_REGISTERS, loads_ahead
from headrace_kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
    rounded_add_rms_norm,
)
from headrace_kernels.rounded_tokens import Activations, round_tokens, round_tokens_reference, unrounded
from headrace_kernels.weight_formats import block_weight
from headrace_kernels.weight_formats.gguf_blocks import store_file_rows
from headrace_kernels.weight_formats.mxfp4 import allocate_mxfp4, quantize_mxfp4_rows
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind, allocate, quantize_rows

EPS = 1e-5
SIZE, COUNT = 2048, 60


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("inputs", [64, 1100, 5000])
def test_a_product_reads_only_its_weight_before_it_waits(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers("cpu", torch.float32, inputs)
    x, norm, start = numbers.randn(1, inputs), numbers.randn(inputs) + 3, numbers.randn(1, 6)
    weight, gates_and_ups = numbers.randn(6, inputs), numbers.randn(6, inputs)
    expected = [
        norm_linear_reference(x, norm, EPS, weight, None),
        norm_swiglu_reference(x, norm, EPS, gates_and_ups, None),
        start + x @ weight.t(),
    ]
    normed, swiglu, add = (
        lambda: norm_linear(x, norm, EPS, weight, None),
        lambda: norm_swiglu(x, norm, EPS, gates_and_ups, None),
        lambda: linear_add(x, weight, None, start),
    )
    for product, result in zip((normed, swiglu, add), expected, strict=True):
        with monkeypatch.context() as patch, kernels_on("cpu"), poisoned_memory("cpu"):
            ahead = KernelsAhead(patch, dense_small_batch_kernels, (x, start))
            found = product()
        close(start if found is None else found, result)
        # Programs of four outputs, or of two; of 5,000 inputs they wait before they ask for the
        # last ones.
        assert ahead.waits == ahead.released == (3 if inputs == 5000 and product is not swiglu else 2)


@pytest.mark.parametrize("kind", list(QuantKind))
def test_a_product_of_few_bits_reads_only_its_weight_before_it_waits(
    kind: QuantKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Numbers("cpu", torch.float32, 9)
    # Of 8 bits more than is asked for before the wait.
    inputs, outputs = (352, 34) if kind is QuantKind.INT4 else (4624, 18)
    x, norm, start = numbers.randn(1, inputs), numbers.randn(inputs) + 3, numbers.randn(1, outputs)
    weight, gates_and_ups = (few_bits(numbers, kind, each, inputs) for each in (outputs, 2 * outputs))
    added = start.clone()
    quantized.linear_add_reference(x, weight, None, added)
    expected = [
        quantized.norm_linear_reference(x, norm, EPS, weight, None),
        quantized.norm_swiglu_reference(x, norm, EPS, gates_and_ups, None),
        added,
    ]
    normed, swiglu, add = (
        lambda: quantized.norm_linear(x, norm, EPS, weight, None),
        lambda: quantized.norm_swiglu(x, norm, EPS, gates_and_ups, None),
        lambda: quantized.linear_add(x, weight, None, start),
    )
    module = gemv_int4 if kind is QuantKind.INT4 else gemv_8bit
    for product, result in zip((normed, swiglu, add), expected, strict=True):
        with monkeypatch.context() as patch, kernels_on("cpu"), poisoned_memory("cpu"):
            ahead = KernelsAhead(patch, module, (x, start))
            found = product()
        close(start if found is None else found, result)
        assert ahead.waits == ahead.released > 2


def few_bits(numbers: Numbers, kind: QuantKind, outputs: int, inputs: int) -> QuantizedWeight:
    """A random weight of so many outputs and inputs, of INT4 with groups of 32."""
    plain = numbers.randn(outputs, inputs) * inputs**-0.5
    group = 32 if kind is QuantKind.INT4 else inputs
    weight = allocate(kind, outputs, inputs, group, plain.dtype, plain.device)
    quantize_rows(plain, weight, 0)
    return weight


def test_a_weight_that_a_kernel_wrote_is_not_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers("cpu", torch.float32, 8)
    x, weight = numbers.randn(1, 64), numbers.randn(6, 64)
    with kernels_on("cpu"):
        ahead = KernelsAhead(monkeypatch, dense_small_batch_kernels)
        close(small_linear(x, weight, is_parameter=False), x @ weight.t())
    assert ahead.waits == ahead.released == 0


def test_all_parameters_of_one_row_but_heads_are_launched_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_early(num_rows: int, outputs: int, inputs: int, is_parameter: bool = True) -> bool:
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
        return launches_early(num_rows, weight, is_parameter)

    assert not is_early(1, 5120, 2880)
    monkeypatch.setattr(card, "launches_early", lambda device: True)
    # gpt-oss-20b's QKV; of an 8B Llama gate and up, and down.
    assert all(is_early(1, *size) for size in ((5120, 2880), (28_672, 4096), (4096, 14_336)))
    assert not is_early(1, 128_256, 4096)
    assert not is_early(2, 5120, 2880)
    assert not is_early(1, 5120, 2880, is_parameter=False)
    assert [launch_rule(1, 2880, inputs, early=True).block_n for inputs in (2048, 2880, 4096)] == [4, 4, 2]
    assert launch_rule(1, 2880, 2048, gated=True, early=True).block_n == 2


@pytest.mark.parametrize(
    ("inputs", "gated"), [(2048, False), (4096, False), (4096, True), (8192, True), (14_336, False), (28_672, False)]
)
def test_what_is_asked_for_ahead_fits_registers(inputs: int, gated: bool) -> None:
    tile = launch_rule(1, 4096, inputs, gated, early=True)
    block_bytes = tile.block_n * (2 if gated else 1) * tile.block_k * 2
    blocks = -(-inputs // tile.block_k)
    ahead = loads_ahead(block_bytes, tile.num_warps, blocks)
    assert ahead * block_bytes // (4 * 32 * tile.num_warps) <= AHEAD_REGISTERS
    # Down projections are too long to be asked for whole.
    assert ahead == (blocks if inputs <= 8192 else 8)


def test_the_choice_reads_only_parameters_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers("cpu", torch.float32, 11)
    x, norm, weight = numbers.randn(2, 40), numbers.randn(40) + 3, numbers.randn(5, 40)
    expected = choose_after_norm_reference(x, norm, EPS, weight, None, 3, True)
    with kernels_on("cpu"), poisoned_memory("cpu"):
        ahead = KernelsAhead(monkeypatch, router, (x,))
        found = choose_after_norm(x, (norm, EPS), weight, None, 3, True, torch.zeros(1, dtype=torch.int32))
    assert torch.equal(found.experts, expected.experts)
    close(found.weights, expected.weights)
    assert ahead.waits == ahead.released == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_choice_by_itself_reads_nothing_before_it_waits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = Numbers("cpu", dtype, 11).randn(3, 21)
    expected = choose_experts_reference(logits, 4, True)
    with kernels_on("cpu"), poisoned_memory("cpu"):
        ahead = KernelsAhead(monkeypatch, routing, (logits,))
        found = choose_experts(logits, 4, True)
    assert torch.equal(found.experts, expected.experts)
    close(found.weights, expected.weights)
    assert ahead.waits == ahead.released == 3


def test_the_choice_by_scores_reads_nothing_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers("cpu", torch.float32, 11)
    logits, correction, scoring = numbers.randn(3, 12), numbers.randn(12), Scoring(3, 2, True, 2.5)
    expected = choose_scored_experts_reference(logits, correction, 4, scoring)
    with kernels_on("cpu"), poisoned_memory("cpu"):
        ahead = KernelsAhead(monkeypatch, scored_routing, (logits,))
        found = choose_scored_experts(logits, correction, 4, scoring)
    assert torch.equal(found.experts, expected.experts)
    close(found.weights, expected.weights)
    assert ahead.waits == ahead.released == 3


@pytest.mark.parametrize(
    ("room", "num_tokens", "programs"),
    [
        # A program for each expert, and one for what is behind the last.
        (routing, 9, 6),
        # Nine chunks, which are counted, and then sorted.
        (chunked_sort, 4200, 18),
    ],
)
def test_the_sort_reads_nothing_before_it_waits(
    room: ModuleType, num_tokens: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = Numbers("cpu", torch.float32, 11).integers(0, 5, num_tokens, 2, dtype=torch.int32)
    expected = sort_pairs_reference(experts, 5)
    with kernels_on("cpu"), poisoned_memory("cpu"):
        ahead = KernelsAhead(monkeypatch, room, (experts,))
        found = sort_pairs(experts, 5)
    assert torch.equal(found.order, expected.order) and torch.equal(found.starts, expected.starts)
    assert ahead.waits == ahead.released == programs


def test_norms_read_only_their_weight_before_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers("cpu", torch.float32, 11)
    x, start, weight = numbers.randn(3, 2100), numbers.randn(3, 2100), numbers.randn(2100)
    for norm, reference in ((rms_norm, rms_norm_reference), (add_rms_norm, add_rms_norm_reference)):
        stream = start.clone()
        about = (weight, EPS) if norm is rms_norm else (stream, weight, EPS)
        expected = reference(x, *(each.clone() if each is stream else each for each in about))
        with monkeypatch.context() as patch, kernels_on("cpu"), poisoned_memory("cpu"):
            ahead = KernelsAhead(patch, rms_norm_room, (x, stream))
            found = norm(x, *about)
        close(found, expected)
        assert ahead.waits == ahead.released == 3


def test_tokens_are_rounded_behind_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Numbers("cpu", torch.float32, 11).randn(3, 2100)
    rounding = InputRounding(torch.int8)
    expected = round_tokens_reference(x, rounding)
    with kernels_on("cpu"), poisoned_memory("cpu"):
        ahead = KernelsAhead(monkeypatch, rounded_tokens, (x,))
        found = round_tokens(x, rounding)
    assert torch.equal(found.numbers, expected.numbers) and torch.equal(found.scales, expected.scales)
    assert ahead.waits == ahead.released == 3


@pytest.mark.parametrize("experts_here", [range(0, 5), range(2, 4)])
def test_tiles_find_the_sort_behind_the_first_wait_and_all_else_behind_their_own(
    experts_here: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, count = Numbers("cpu", torch.float32, 13), len(experts_here)
    x, logits = numbers.randn(6, 48), numbers.randn(6, 5)
    choice = choose_experts_reference(logits, 2, True)
    part = None if count == 5 else ExpertPart(experts_here.start, 5)
    gate_up, down = (
        ExpertWeights(numbers.randn(count * outputs, inputs) * inputs**-0.5, count, part=part)
        for outputs, inputs in ((64, 48), (48, 32))
    )
    pairs = sort_pairs_reference(choice.experts, count, gate_up.first_expert)
    expected = mixture_reference(x, choice, gate_up, down)
    out, tile = torch.empty_like(x), mixture_kernels.PairTile(16, 16, 32, 2, 2)
    # Tiles that there may be, most of which there are not, by blocks of 32 inner elements or 48
    # outputs; a program of the sum for each token.
    tiles = most_tiles(12, count, 16)
    with kernels_on("cpu"), poisoned_memory("cpu"):
        ahead = KernelsAhead(monkeypatch, mixture_kernels, (x, *pairs), (choice.weights,))
        ahead.first_programs = 2 * tiles
        outputs = mixture_kernels.multiply_pairs(x, choice, pairs, gate_up, down, (tile, tile))
        mixture_kernels.combine_pairs(outputs, choice, down, out)
    close(out, expected)
    assert ahead.waits == ahead.released == (2 + 3) * tiles + 6


def tiled_weights(kind: str, numbers: Numbers, outputs: int, inputs: int) -> ExpertWeights:
    """Four experts in MXFP4 or in a file's blocks."""
    plain = numbers.randn(4 * outputs, inputs) * inputs**-0.5
    if kind == "mxfp4":
        stored = allocate_mxfp4(len(plain), inputs, plain.dtype, plain.device)
        quantize_mxfp4_rows(plain, stored, 0)
        return ExpertWeights(stored, 4)
    blocks = block_weight.allocate(block_weight.BlockKind(kind), *plain.shape, plain.dtype, plain.device)
    store_file_rows(torch.from_numpy(quantize(kind, plain.numpy())), blocks, 0)
    return ExpertWeights(blocks, 4)


@pytest.mark.parametrize("kind", ["mxfp4", "Q4_0"])
def test_tiles_of_mxfp4_and_of_a_file_s_blocks_find_what_they_need_behind_their_waits(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Numbers("cpu", torch.float32, 13)
    x, choice = numbers.randn(6, 64), choose_experts_reference(numbers.randn(6, 4), 2, True)
    weights = [tiled_weights(kind, numbers, *sizes) for sizes in ((64, 64), (64, 32))]
    pairs = sort_pairs_reference(choice.experts, 4)
    expected = mixture_reference(x, choice, *weights)
    monkeypatch.setattr(mixture_room, "sort_pairs", lambda *sizes: pairs)
    # As few pairs as there are take a tile of 16 each, of all inner elements and of all outputs.
    tiles = most_tiles(12, 4, 16)
    with kernels_on("cpu"), poisoned_memory("cpu"):
        monkeypatch.setattr(mixture_room, "_most_vectors", lambda *sizes: 1)
        ahead = KernelsAhead(monkeypatch, mixture_kernels, (x, *pairs), (choice.weights,))
        monkeypatch.setattr(card, "has_warpgroup_products", lambda device: True)
        monkeypatch.setattr(block_kernels, "block_rule", lambda *sizes: block_kernels.BlockTile(64, 16, 4, 3))
        ahead.first_programs = tiles
        found = mixture(x, choice, *weights)
    close(found, expected)
    assert ahead.waits == ahead.released == 2 * tiles + 6


class Mixture:
    """One token and its experts, on a CPU."""

    def __init__(self, is_mxfp4: bool) -> None:
        numbers = Numbers("cpu", torch.float32, 12)
        self.residual, self.norm = numbers.randn(1, 96), numbers.randn(96) + 3
        self.choice = Choice(torch.tensor([[3, 0]], dtype=torch.int32), torch.tensor([[0.7, 0.3]]))
        self.weights = [self._weights(numbers, is_mxfp4, 64, 96), self._weights(numbers, is_mxfp4, 96, 32)]

    @staticmethod
    def _weights(numbers: Numbers, is_mxfp4: bool, outputs: int, inputs: int) -> ExpertWeights:
        plain = numbers.randn(5 * outputs, inputs) * inputs**-0.5
        if not is_mxfp4:
            return ExpertWeights(plain, 5)
        stored = allocate_mxfp4(len(plain), inputs, plain.dtype, plain.device)
        quantize_mxfp4_rows(plain, stored, 0)
        return ExpertWeights(stored, 5)


@pytest.mark.parametrize("is_mxfp4", [False, True])
def test_a_mixture_finds_the_choice_behind_its_first_wait_and_all_else_behind_its_second(
    is_mxfp4: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Mixture(is_mxfp4)
    expected = case.residual.clone()
    add_mixture_reference(expected, case.norm, EPS, case.choice, *case.weights, SILU)
    module = mxfp4_gemv if is_mxfp4 else stream_gemv
    with kernels_on("cpu"), poisoned_memory("cpu"):
        # Down may read no weight of the choice before it waits: gate and up may not have ended.
        ahead = KernelsAhead(monkeypatch, module, (case.residual, case.choice.experts), (case.choice.weights,))
        # Two pairs by 32 inner elements, of which a program has eight in each of two loops in
        # MXFP4, and otherwise two in each of four.
        ahead.first_programs = first = 2 * 32 // (16 if is_mxfp4 else 8)
        add_mixture(case.residual, case.norm, EPS, case.choice, *case.weights, SILU)
    close(case.residual, expected)
    # On two multiprocessors: 8 outputs a program, or 12.
    assert ahead.waits == ahead.released == first + 96 // (8 if is_mxfp4 else 12)


def replayed(launches: Callable[[], None]) -> None:
    """Runs the launches from a graph."""
    launches()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    graph.replay()


def check_that_bits_are_those_of_launches_one_by_one(
    launches: Callable[[], None], result: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for early in (True, False):
        if not early:
            monkeypatch.setattr(card, "launches_early", lambda device: False)
        for _ in range(5):
            replayed(launches)
            found.append(result.clone())
    assert found[0].isfinite().all()
    early_ones, late_ones = found[:5], found[5:]
    assert all(torch.equal(each, early_ones[0]) for each in early_ones)
    assert all(torch.equal(each, late_ones[0]) for each in late_ones)
    # Tiles differ, and so the order of sums.
    error = (early_ones[0].double() - late_ones[0].double()).norm() / late_ones[0].double().norm()
    assert float(error) < 0.02, float(error)


@pytest.mark.gpu
def test_a_chain_of_products_computes_what_launches_one_by_one_do(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers("cuda", torch.bfloat16, 3)
    norm, start = (numbers.randn(SIZE) * 0.3 + 1).contiguous(), numbers.randn(1, SIZE)
    weights = [numbers.randn(SIZE, SIZE) * SIZE**-0.5 for _ in range(COUNT)]
    residual = torch.empty_like(start)
    assert launches_early(1, weights[0]) is card.launches_early(start.device)

    def launches() -> None:
        residual.copy_(start)
        for weight in weights:
            linear_add(norm_linear(residual, norm, EPS, weight, None), weight, None, residual)

    check_that_bits_are_those_of_launches_one_by_one(launches, residual, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, *QuantKind])
def test_a_chain_of_layers_computes_what_launches_one_by_one_do(
    kind: QuantKind | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, inner = Numbers("cuda", torch.bfloat16, 6), 9216
    norm, start = (numbers.randn(SIZE) * 0.3 + 1).contiguous(), numbers.randn(1, SIZE)
    room: ModuleType = dense_small_batch if kind is None else quantized
    layers = []
    for _ in range(12):
        sizes = ((SIZE, SIZE), (SIZE, SIZE), (2 * inner, SIZE), (SIZE, inner))
        layers.append(
            [
                numbers.randn(*size) * size[1] ** -0.5 if kind is None else few_bits(numbers, kind, *size)
                for size in sizes
            ]
        )
    residual = torch.empty_like(start)

    def launches() -> None:
        residual.copy_(start)
        for heads, output, gate_up, down in layers:
            room.linear_add(room.norm_linear(residual, norm, EPS, heads, None), output, None, residual)
            room.linear_add(room.norm_swiglu(residual, norm, EPS, gate_up, None), down, None, residual)

    check_that_bits_are_those_of_launches_one_by_one(launches, residual, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("is_mxfp4", [False, True])
def test_a_chain_of_mixtures_computes_what_launches_one_by_one_do(
    is_mxfp4: bool, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Numbers("cuda", torch.bfloat16, 5)
    num_experts, per_token, inner = 32, 4, 768
    norm, start = (numbers.randn(SIZE) * 0.3 + 1).contiguous(), numbers.randn(num_tokens, SIZE)
    gating = Gating(True, 1.702, 7.0)
    layers = []
    for _ in range(6):
        weights = []
        for outputs, inputs in ((2 * inner, SIZE), (SIZE, inner)):
            plain = numbers.randn(num_experts * outputs, inputs) * inputs**-0.5
            if is_mxfp4:
                stored = allocate_mxfp4(len(plain), inputs, plain.dtype, plain.device)
                quantize_mxfp4_rows(plain, stored, 0)
            weights.append(ExpertWeights(stored if is_mxfp4 else plain, num_experts))
        router = numbers.randn(num_experts, SIZE) * SIZE**-0.5
        layers.append((router, torch.zeros(1, dtype=torch.int32, device="cuda"), *weights))
    residual = torch.empty_like(start)

    def launches() -> None:
        residual.copy_(start)
        for router, done, gate_up, down in layers:
            choice = choose_after_norm(residual, (norm, EPS), router, None, per_token, True, done)
            add_mixture(residual, norm, EPS, choice, gate_up, down, gating)

    check_that_bits_are_those_of_launches_one_by_one(launches, residual, monkeypatch)
    assert all(int(done) == 0 for _, done, _, _ in layers)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [16, 256])
@pytest.mark.parametrize("kind", [None, QuantKind.FP8])
def test_a_chain_of_mixtures_of_many_tokens_computes_what_launches_one_by_one_do(
    kind: QuantKind | None, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, num_experts, per_token, inner = Numbers("cuda", torch.bfloat16, 5), 64, 8, 768
    norm, start = (numbers.randn(SIZE) * 0.3 + 1).contiguous(), numbers.randn(num_tokens, SIZE)
    layers = []
    for _ in range(6):
        weights = []
        for outputs, inputs in ((2 * inner, SIZE), (SIZE, inner)):
            plain = numbers.randn(num_experts * outputs, inputs) * inputs**-0.5
            if kind is None:
                weights.append(ExpertWeights(plain, num_experts))
                continue
            stored = allocate(kind, len(plain), inputs, inputs, plain.dtype, plain.device)
            quantize_rows(plain, stored, 0)
            weights.append(ExpertWeights(stored, num_experts))
        layers.append((numbers.randn(num_experts, SIZE) * SIZE**-0.5, *weights))
    residual = torch.empty_like(start)

    def launches() -> None:
        residual.copy_(start)
        pending = torch.zeros_like(residual)
        for weight, gate_up, down in layers:
            rounding = rounds_to(num_tokens, gate_up, down)
            if rounding is None:
                normed: Activations = add_rms_norm(pending, residual, norm, EPS)
            else:
                normed = rounded_add_rms_norm(pending, residual, norm, EPS, rounding, keeps=True)
            choice = choose_experts(unrounded(normed) @ weight.t(), per_token, True)
            pending = mixture(normed, choice, gate_up, down)
        residual.add_(pending)

    check_that_bits_are_those_of_launches_one_by_one(launches, residual, monkeypatch)


@pytest.mark.gpu
def test_a_weight_that_the_launch_ahead_wrote_is_read_whole() -> None:
    numbers = Numbers("cuda", torch.bfloat16, 4)
    x, source = numbers.randn(1, SIZE), numbers.randn(SIZE * 8, SIZE) * SIZE**-0.5
    written, found = torch.empty(1, SIZE * 8, dtype=x.dtype, device=x.device), list[torch.Tensor]()

    def launches() -> None:
        found.clear()
        for number in range(COUNT):
            small_linear(x * (number + 1), source, out=written)
            found.append(small_linear(x, written.view(8, SIZE), is_parameter=False))

    replayed(launches)
    once = x.double() @ (x.double() @ source.double().t()).view(8, SIZE).t()
    for number, each in enumerate(found, 1):
        # Rounded three times; one that read another product's weight is off by a whole one.
        torch.testing.assert_close(each.double(), number * once, rtol=0.05, atol=0.05 * float(once.abs().max()))
