"""Products of 2 to 32 rows with plain weights by our kernel for sm_90.

It is emulated without a GPU, run on one, and asked which weights it is for.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.linear.test_dense_small_batch import EPS, Product, close
from tests.support.gluon_emulation import emulating, launch_control
from tests.support.kernel_case import ROUNDING, Numbers

from headrace_kernels import card
from headrace_kernels.hopper.launch import MOST_SLOT_BYTES
from headrace_kernels.linear import dense_small_batch
from headrace_kernels.linear import dense_small_batch_sm90 as streams
from headrace_kernels.linear.dense_small_batch_sm90 import (
    StreamTile,
    multiply_streams,
    stream_variants,
    takes_streams,
)

# Rows, outputs, inputs, tile: rows of both classes, outputs that fill no tile, each number of
# slices, few and many slots, more slots than steps.
CASES = (
    (9, 80, 512, StreamTile(1, 1, 3)),
    (16, 40, 768, StreamTile(2, 2, 2)),
    (3, 52, 1024, StreamTile(4, 1, 3)),
    (11, 24, 512, StreamTile(4, 2, 4)),
    (21, 40, 512, StreamTile(2, 1, 3)),
)


def fits(tile: StreamTile, rows: int, gated: bool, norm_itemsize: int = 0) -> bool:
    """Whether a card has room for a program's steps, beside which barriers take little."""
    return tile.shared_bytes(rows, gated, norm_itemsize) <= MOST_SLOT_BYTES


def run(product: Product, tile: StreamTile, bias: bool, add: bool, normed: bool = False) -> torch.Tensor:
    out = product.residual.clone() if add else torch.full_like(product.residual, float("nan"))
    norm = (product.norm_weight, EPS) if normed else None
    multiply_streams(product.x, product.weight, product.bias if bias else None, out, tile, norm, product.gated, add)
    return out


def emulated(
    product: Product,
    tile: StreamTile,
    bias: bool,
    add: bool,
    eager: bool = False,
    careless: str | None = None,
    normed: bool = False,
) -> torch.Tensor:
    with emulating(streams, "_stream_kernel", launch_control, eager, careless):
        return run(product, tile, bias, add, normed)


def check_normed(product: Product, found: torch.Tensor, bias: bool) -> None:
    """Products of x and the norm's weight are rounded on the way, once of the twice of `spread`."""
    close(found, product.expected(True, bias, False), 1.01 * ROUNDING[found.dtype], product.spread(bias))


def check(product: Product, found: torch.Tensor, bias: bool, add: bool) -> None:
    """Sums of fp32 are rounded once; SwiGLU's and the residual stream's as well."""
    expected = product.expected(False, bias, add)
    row_size = expected.square().mean(1, keepdim=True).sqrt()
    # Numbers without a leading 1 are as far apart as the smallest with one, however small they are.
    smallest = torch.finfo(found.dtype).smallest_normal
    allowed = 1.01 * ROUNDING[found.dtype] * (expected.abs() + row_size).clamp(min=smallest)
    error = (found.double() - expected).abs()
    assert bool((error <= allowed).all()), f"{float((error / allowed).nan_to_num(torch.inf).max())} times"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "tile"), CASES)
def test_what_the_kernel_says_agrees_with_fp64(
    rows: int, outputs: int, inputs: int, tile: StreamTile, eager: bool, gated: bool
) -> None:
    product = Product(rows, outputs, inputs, torch.float16, "cpu", gated)
    check(product, emulated(product, tile, True, False, eager), True, False)
    check(product, emulated(product, tile, False, True, eager), False, True)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "tile"), CASES)
def test_what_the_kernel_says_of_a_norm_agrees_with_fp64(
    rows: int, outputs: int, inputs: int, tile: StreamTile, eager: bool, gated: bool
) -> None:
    product = Product(rows, outputs, inputs, torch.bfloat16, "cpu", gated)
    check_normed(product, emulated(product, tile, True, False, eager, normed=True), True)
    product.norm_weight = product.norm_weight.float()
    check_normed(product, emulated(product, tile, False, False, eager, normed=True), False)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_product_agrees_with_fp64(data: st.DataObject) -> None:
    """Rows of every class, outputs that fill no tile, one step and many, all that is fused."""
    gated, normed, bias = (data.draw(st.booleans()) for _ in range(3))
    add = not gated and data.draw(st.booleans())
    tile = StreamTile(*(data.draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (1, 2, 4), (2, 3, 5))))
    inputs = tile.slices * tile.subs * 64 * data.draw(st.integers(1, 3))
    rows, outputs = data.draw(st.integers(1, 32)), data.draw(st.integers(1, 70))
    product = Product(rows, outputs, inputs, torch.bfloat16 if normed else torch.float16, "cpu", gated)
    found = emulated(product, tile, bias, add, data.draw(st.booleans()), normed=normed)
    if not normed:
        check(product, found, bias, add)
    elif not add:
        check_normed(product, found, bias)
    else:
        expected = product.expected(True, bias, True)
        close(found, expected, 1.01 * ROUNDING[found.dtype], product.spread(bias))


@pytest.mark.parametrize(
    ("num_rows", "dtype", "slices", "of_qkv", "of_gates"),
    [
        (2, torch.bfloat16, 2, True, True),
        (8, torch.bfloat16, 4, True, True),
        (9, torch.bfloat16, 1, True, True),
        (9, torch.bfloat16, 2, False, False),
        (17, torch.bfloat16, 1, True, False),
        (8, torch.float16, 1, False, False),
    ],
)
def test_the_kernel_norms_bf16_where_that_is_faster_than_a_kernel_before_it(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, dtype: torch.dtype, slices: int, of_qkv: bool, of_gates: bool
) -> None:
    norms: list[object] = []

    def norm_before(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        norms.append("before")
        return x

    monkeypatch.setattr(dense_small_batch, "uses_triton", lambda weight: True)
    monkeypatch.setattr(dense_small_batch, "stream_rule", lambda *product: StreamTile(slices, 1, 3))
    monkeypatch.setattr(dense_small_batch, "rms_norm", norm_before)
    monkeypatch.setattr(dense_small_batch, "multiply_streams", lambda *given: norms.append(given[5]))
    x, norm_weight, weight = (torch.zeros(*shape, dtype=dtype) for shape in ((num_rows, 512), (512,), (64, 512)))
    dense_small_batch.norm_linear(x, norm_weight, EPS, weight, None)
    dense_small_batch.norm_swiglu(x, norm_weight, EPS, weight, None)
    expected = [[(norm_weight, EPS)] if is_inside else ["before", None] for is_inside in (of_qkv, of_gates)]
    assert norms == expected[0] + expected[1]


def test_a_wait_that_is_missing_shows() -> None:
    """The check of the checks."""
    product = Product(9, 40, 1024, torch.float16, "cpu")
    with pytest.raises(AssertionError, match="times"):
        check(product, emulated(product, StreamTile(2, 1, 3), False, False, careless="copies"), False, False)


@pytest.mark.parametrize("normed", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(normed: bool) -> None:
    product = Product(12, 40, 512, torch.bfloat16 if normed else torch.float16, "cpu")
    together = emulated(product, StreamTile(2, 1, 3), False, False, normed=normed)
    product.x[:3], product.x[6:] = float("nan"), float("inf")
    apart = emulated(product, StreamTile(2, 1, 3), False, False, normed=normed)
    assert torch.equal(together[3:6], apart[3:6]) and not bool(apart[:3].isfinite().any())


def test_the_kernel_takes_16_bits_and_whole_steps_on_its_own_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.empty(24, 1024, dtype=torch.bfloat16)
    assert not takes_streams(weight)  # CPU
    monkeypatch.setattr(card, "has_warpgroup_instructions", lambda device: True)
    assert takes_streams(weight)
    assert not takes_streams(weight.float())
    assert not takes_streams(torch.empty(24, 1024 + 64, dtype=torch.bfloat16))
    assert not takes_streams(torch.empty(1024, 24, dtype=torch.bfloat16).t())
    assert not takes_streams(torch.empty(25 * 1024, dtype=torch.bfloat16)[1:].view(-1)[: 24 * 1024].view(24, 1024))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_rows", [8, 16, 32])
def test_variants_differ_and_fit_a_card(num_rows: int, gated: bool) -> None:
    tiles = stream_variants(num_rows, gated)
    assert len(set(tiles)) == len(tiles) > 2
    assert all(fits(tile, num_rows, gated, norm_itemsize=4) for tile in tiles)


@pytest.mark.parametrize("num_rows", [2, 8, 9, 16, 17, 32])
def test_the_tiles_of_the_rule_fit_a_card(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    monkeypatch.setattr(card, "has_warpgroup_instructions", lambda device: True)
    monkeypatch.setattr(card, "multiprocessors", lambda device: 132)
    for outputs, gated in ((28_672, True), (128_256, False), (6144, False), (4096, False)):
        # Nobody writes the weight, so it takes no memory.
        weight = torch.empty(outputs, 4096, dtype=torch.bfloat16)
        tile = dense_small_batch.stream_rule(num_rows, weight, gated)
        x = weight[:num_rows]
        assert tile is not None
        assert fits(tile, num_rows, gated, 4 if dense_small_batch._norms_inside(x, tile, gated) else 0)


def test_few_outputs_of_many_rows_are_left_to_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "has_warpgroup_instructions", lambda device: True)
    monkeypatch.setattr(card, "multiprocessors", lambda device: 132)
    router = torch.empty(128, 2048, dtype=torch.bfloat16)
    assert dense_small_batch.stream_rule(16, router) is not None
    assert dense_small_batch.stream_rule(17, router) is None


@pytest.mark.parametrize("is_parameter", [True, False])
def test_only_a_weight_that_no_kernel_writes_is_read_ahead(monkeypatch: pytest.MonkeyPatch, is_parameter: bool) -> None:
    launches: list[dict[str, object]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *values, **options: launches.append(options)

    monkeypatch.setattr(streams, "_stream_kernel", Recorder())
    monkeypatch.setattr(dense_small_batch, "stream_rule", lambda *product: StreamTile(2, 1, 3))
    x, weight = torch.zeros(9, 512, dtype=torch.bfloat16), torch.zeros(64, 512, dtype=torch.bfloat16)
    dense_small_batch.small_linear(x, weight, is_parameter=is_parameter)
    assert [launch["launch_pdl"] for launch in launches] == [is_parameter]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "dtype", "tile"),
    [
        (6144, 4096, False, torch.bfloat16, StreamTile(2, 2, 4)),
        (4096, 14_336, False, torch.bfloat16, StreamTile(4, 2, 3)),
        (14_336, 4096, True, torch.bfloat16, StreamTile(1, 1, 4)),
        (1010, 1536, False, torch.float16, StreamTile(2, 2, 3)),
    ],
)
def test_a_card_agrees_with_fp64(outputs: int, inputs: int, gated: bool, dtype: torch.dtype, tile: StreamTile) -> None:
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    for rows in (2, 8, 9, 16, 17, 32):
        if not fits(tile, rows, gated):
            continue
        product = Product(rows, outputs, inputs, dtype, "cuda", gated)
        found = run(product, tile, True, False)
        check(product, found, True, False)
        check(product, run(product, tile, False, True), False, True)
        assert torch.equal(found, run(product, tile, True, False))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "tile", "norm_dtype"),
    [
        (6144, 4096, False, StreamTile(1, 2, 10), torch.bfloat16),
        (6144, 4096, False, StreamTile(1, 4, 4), torch.float32),
        (6144, 4096, False, StreamTile(1, 4, 5), torch.bfloat16),
        (1010, 1536, False, StreamTile(2, 2, 8), torch.bfloat16),
        (1024, 2560, False, StreamTile(4, 2, 3), torch.float32),
        (14_336, 4096, True, StreamTile(2, 2, 3), torch.bfloat16),
        (14_336, 4096, True, StreamTile(1, 4, 3), torch.float32),
        (1000, 2560, True, StreamTile(2, 1, 5), torch.bfloat16),
    ],
)
def test_a_card_s_norm_agrees_with_fp64(
    outputs: int, inputs: int, gated: bool, tile: StreamTile, norm_dtype: torch.dtype
) -> None:
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    for rows in (2, 8, 9, 16, 17, 32):
        if not fits(tile, rows, gated, norm_dtype.itemsize):
            continue
        product = Product(rows, outputs, inputs, torch.bfloat16, "cuda", gated)
        product.norm_weight = product.norm_weight.to(norm_dtype)
        # Each class of rows is compiled once with a bias and, of the larger ones, once without.
        bias = rows % 2 == 0
        found = run(product, tile, bias, False, normed=True)
        check_normed(product, found, bias)
        assert torch.equal(found, run(product, tile, bias, False, normed=True))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 9, 32])
def test_a_chain_of_early_launches_gives_the_bits_of_late_ones(rows: int) -> None:
    """The residual stream is read by a norm in each other product, and written by those between."""
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    # 20 layers: from 2,048 to 4,096 with a norm, and back to the residual stream.
    numbers = Numbers("cuda", torch.bfloat16, rows)
    up = [numbers.randn(4096, 2048) * 2048**-0.5 for _ in range(20)]
    down = [numbers.randn(2048, 4096) * 4096**-0.5 for _ in range(20)]
    start, norm = numbers.randn(rows, 2048), (numbers.randn(2048) * 0.3 + 1, EPS)
    residual = torch.empty_like(start)

    def launches(is_parameter: bool) -> None:
        residual.copy_(start)
        for first, second in zip(up, down, strict=True):
            wide = start.new_empty(rows, 4096)
            multiply_streams(residual, first, None, wide, StreamTile(1, 2, 8), norm, is_parameter=is_parameter)
            multiply_streams(wide, second, None, residual, StreamTile(2, 2, 6), add=True, is_parameter=is_parameter)

    found = []
    for is_parameter in (False, True):
        launches(is_parameter)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launches(is_parameter)
        for _ in range(5):
            graph.replay()
            found.append(residual.clone())
    assert found[0].isfinite().all()
    assert all(torch.equal(each, found[0]) for each in found)
