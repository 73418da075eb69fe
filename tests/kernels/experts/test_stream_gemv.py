"""One token's experts by programs that stream rows, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.experts.test_mixture import EPS, Case, close
from tests.support.kernel_case import kernels_on, poisoned_memory

from headrace_kernels import card
from headrace_kernels.experts import stream_gemv
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.gating import GELU, SILU, Gating
from headrace_kernels.experts.launch_rules import stream_rule
from headrace_kernels.experts.routing import Choice
from headrace_kernels.experts.stream_gemv import StreamTile, multiply_streams
from headrace_kernels.weight_formats.quantized_weight import Arrangement, QuantKind

CLAMPED = Gating(True, 1.702, 7.0)


@pytest.fixture(autouse=True)
def _launches_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_early_launch` says what is read before a wait; the interpreter has no waits."""
    for name in ("grid_before_is_done", "grid_behind_may_start"):
        monkeypatch.setattr(stream_gemv, name, lambda: None)


def streamed(case: Case, tile: StreamTile, normed: bool = False, start: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full_like(case.x, float("nan")) if start is None else start.clone()
    norm = (case.norm, EPS) if normed else None
    with kernels_on("cpu"), poisoned_memory("cpu"):
        operands = (case.gate_up, case.down, out, tile, norm, start is not None)
        multiply_streams(case.x, case.choice, *operands, case.gating)
    return out


# Tiles that no size divides: the last program of gate and up has nothing, rows end within a block.
@pytest.mark.parametrize(
    ("sizes", "tile", "gating", "has_biases"),
    [
        ((1, 5, 3, 96, 24), StreamTile(2, 5, 64, 7), SILU, False),
        ((1, 5, 3, 72, 40), StreamTile(4, 2, 128, 72), CLAMPED, True),
        ((1, 4, 4, 64, 16), StreamTile(1, 16, 512, 1), GELU, True),
    ],
)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.one_in(2)
def test_a_token_agrees_with_fp64(
    sizes: tuple[int, int, int, int, int], tile: StreamTile, gating: Gating, has_biases: bool, normed: bool
) -> None:
    case = Case(sizes, None, torch.float32, "cpu", gating=gating, has_biases=has_biases)
    close(streamed(case, tile, normed), case.expected(normed), torch.float32)


@pytest.mark.parametrize("kind", [QuantKind.FP8, QuantKind.INT8])
@pytest.mark.parametrize(("sizes", "tile"), [
    ((1, 5, 3, 96, 32), StreamTile(2, 5, 64, 7)),
    ((1, 4, 2, 72, 48), StreamTile(4, 2, 128, 72)),
])  # fmt: skip
# Each kind in one of the sizes; the others are slow.
@pytest.mark.one_in(3)
def test_a_token_of_8_bits_agrees_with_fp64(
    sizes: tuple[int, int, int, int, int], tile: StreamTile, kind: QuantKind
) -> None:
    case = Case(sizes, kind, torch.float32, "cpu", has_biases=True)
    close(streamed(case, tile, normed=True), case.expected(normed=True), torch.float32)


# Groups of an expert's inputs that end within a block, and outputs of several blocks.
@pytest.mark.parametrize(("scale_outputs", "has_biases"), [(32, True), (128, False)])
@pytest.mark.parametrize(("sizes", "tile"), [
    ((1, 3, 2, 384, 128), StreamTile(2, 5, 64, 7)),
    ((1, 3, 2, 256, 192), StreamTile(4, 9, 512, 100)),
])  # fmt: skip
@pytest.mark.one_in(3)
def test_a_token_of_fp8_in_blocks_agrees_with_fp64(
    sizes: tuple[int, int, int, int, int], tile: StreamTile, scale_outputs: int, has_biases: bool
) -> None:
    case = Case(sizes, QuantKind.FP8, torch.float32, "cpu", has_biases=has_biases)
    case.arrange(128, Arrangement(scale_outputs=scale_outputs))
    close(streamed(case, tile, normed=True), case.expected(normed=True), torch.float32)


def test_a_token_is_added_to_what_is_there() -> None:
    case = Case((1, 5, 3, 96, 24), None, torch.float32, "cpu")
    start = case.numbers.randn(1, 96)
    close(streamed(case, StreamTile(2, 2, 64, 4), start=start), case.expected() + start.double(), torch.float32)


def test_what_ranks_with_whole_experts_compute_adds_up() -> None:
    case = Case((1, 5, 3, 64, 16), None, torch.float32, "cpu", has_biases=True)
    tile, total, whole = StreamTile(2, 2, 64, 4), torch.zeros_like(case.x), (case.gate_up, case.down)
    expected = case.expected()
    for experts in (range(2), range(2, 5)):
        case.gate_up, case.down = whole
        case.keep(experts)
        total = streamed(case, tile, start=total)
    close(total, expected, torch.float32)


def test_one_token_of_plain_experts_streams_where_kernels_are_launched_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(num_tokens: int, per_token: int, hidden: int, inner: int) -> StreamTile | None:
        rows = [(2 * inner, hidden), (hidden, inner)]
        weights = [
            ExpertWeights(torch.empty(8 * size[0], size[1], dtype=torch.bfloat16, device="meta"), 8) for size in rows
        ]
        choice = Choice(*(torch.empty(num_tokens, per_token, device="meta") for _ in range(2)))
        return stream_rule(choice, *weights)

    qwen = (8, 2048, 768)
    assert rule(1, *qwen) is None
    monkeypatch.setattr(card, "launches_early", lambda device: True)
    monkeypatch.setattr(card, "multiprocessors", lambda device: 132)
    assert rule(1, *qwen) == StreamTile(block_n=2, gate_up_loops=6, block_k=2048, down_loops=4)
    assert rule(2, *qwen) is None
    # Two of Mixtral 8x7B's experts have more inner elements than registers hold.
    assert rule(1, 2, 4096, 14_336) is None and rule(1, 2, 4096, 7168) is not None
    assert rule(1, 2, 64, 20) is None


def test_which_experts_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "launches_early", lambda device: True)
    plain, bytes_, fp8, few = [
        Case((1, 5, 3, 128, 128), kind, torch.float32, "cpu")
        for kind in (None, QuantKind.INT8, QuantKind.FP8, QuantKind.INT4)
    ]
    assert all(stream_rule(case.choice, case.gate_up, case.down) is not None for case in (plain, bytes_, fp8))
    assert stream_rule(few.choice, few.gate_up, few.down) is None
    assert stream_rule(plain.choice, plain.gate_up, few.down) is None
    fp8.arrange(128, Arrangement(scale_outputs=128))
    assert stream_rule(fp8.choice, fp8.gate_up, fp8.down) is not None
    for has_zeros in (False, True):
        bytes_.arrange(32, Arrangement(has_zeros=has_zeros))
        assert stream_rule(bytes_.choice, bytes_.gate_up, bytes_.down) is None
    short = Case((1, 5, 3, 64, 128), QuantKind.FP8, torch.float32, "cpu")
    short.arrange(128, Arrangement(scale_outputs=64))
    assert stream_rule(short.choice, short.gate_up, short.down) is None
