"""The Triton attention kernels against fp64.

They run in the interpreter on a CPU, and on the GPU where there is one.
"""

import dataclasses
import random

import pytest
import torch
from tests.support.attention_case import Case, Shape

from headrace_kernels.attention.paged import paged_attention
from headrace_kernels.attention.plan import query_part
from headrace_kernels.triton_runtime import INTERPRETED, compilation_count

DEVICE = "cpu" if INTERPRETED else "cuda"
# Inputs are the same rounded numbers for both sides. fp32: rounding of sums. 16 bits: probabilities
# (on a card) and outputs of order 1 are rounded to 8 or 11 bits.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
GATHER_BYTES = 1 << 20


@pytest.fixture
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that a kernel does not write are NaN."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        made: torch.Tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return made.fill_(float("nan"))

    monkeypatch.setattr("headrace_kernels.attention.paged.torch.empty", poisoned)


def check(case: Case) -> None:
    shape = case.shape
    found = paged_attention(case.query, case.kv_cache, case.step, shape.scale, shape.window, case.sinks)
    assert found.is_contiguous() and found.dtype == shape.dtype
    expected = case.oracle()
    # What is gathered of a quantized cache is rounded to the type once more.
    tolerance = TOLERANCE[shape.dtype] * (2 if shape.kv and case.step.prefill and case.step.prefill.gathered else 1)
    torch.testing.assert_close(found[: expected.shape[0]].double(), expected, atol=tolerance, rtol=0)
    # Padding belongs to nobody and nobody writes it.
    assert found[expected.shape[0] :].isnan().all()


SHAPES = [
    Shape(8, 2, 16),
    Shape(7, 1, 8, 16),
    Shape(6, 2, 80, 32),
    Shape(2, 2, 64, 64, dtype=torch.float16),
    Shape(8, 2, 64, 16, dtype=torch.bfloat16),
    Shape(3, 1, 96, 16, dtype=torch.bfloat16),
    Shape(8, 2, 16, window=1),
    Shape(4, 2, 16, 32, window=40),
    Shape(8, 1, 64, 16, window=100, dtype=torch.bfloat16),
    Shape(8, 2, 16, kv="int8"),
    Shape(7, 1, 8, 16, kv="fp8"),
    Shape(6, 2, 80, 32, window=40, dtype=torch.float16, kv="fp8"),
    Shape(8, 2, 64, 16, dtype=torch.bfloat16, kv="int8"),
    Shape(2, 1, 80, 64, window=40, dtype=torch.float16, kv="int8"),
    Shape(4, 4, 64, 16, dtype=torch.float16, kv="fp8"),
    Shape(8, 2, 16, has_sinks=True),
    Shape(7, 1, 8, 16, kv="fp8", has_sinks=True),
    Shape(16, 2, 64, 16, window=40, dtype=torch.bfloat16, has_sinks=True),
]
_IDS = [
    f"{s.num_heads}-{s.num_kv_heads}-{s.head_dim}-{s.window}-{str(s.dtype)[6:]}{s.kv and '-' + s.kv}"
    + "-sinks" * s.has_sinks
    for s in SHAPES
]


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("shape", SHAPES, ids=_IDS)
def test_any_mixed_step_equals_fp64(shape: Shape) -> None:
    """Every second shape with padding."""
    seed = SHAPES.index(shape)
    chance = random.Random(seed)
    lengths = [(chance.choice([0, 3, 63, 64, 130]), chance.choice([1, 1, 2, 8, 9, 40])) for _ in range(4)]
    check(Case(shape, lengths, DEVICE, seed=seed, padding=seed % 2))


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("poisoned_outputs")
# Each number of drafts with and without a window, and in one of the caches.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("max_query_len", "window", "kv"),
    [
        (1, None, ""), (2, 70, ""), (4, None, ""), (8, 70, ""),
        (1, 70, "fp8"), (2, None, "int8"), (4, 70, "fp8"), (8, None, "int8"), (16, None, ""),
    ],
)  # fmt: skip
def test_rows_of_drafts_equal_fp64_when_their_context_is_split(max_query_len: int, window: int | None, kv: str) -> None:
    shape = Shape(6, 2, 16, window=window, kv=kv)
    rows = [(300 + 10 * count, count) for count in range(1, max_query_len + 1)] + [(0, 1), (0, max_query_len)]
    case = Case(shape, rows, DEVICE, max_query_len=max_query_len)
    assert case.step.decode is not None and (case.step.decode.splits[:, 3] >= 0).any()
    check(case)


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize(
    ("heads", "max_query_len", "window"), [((8, 2), 16, None), ((6, 2), 16, 70), ((8, 1), 8, None), ((10, 1), 16, None)]
)
def test_query_tokens_that_several_programs_share_equal_fp64(
    heads: tuple[int, int], max_query_len: int, window: int | None
) -> None:
    """A row's last program has one token, none, or all that it takes; some rows have one split."""
    group = heads[0] // heads[1]
    shape = Shape(*heads, 16, window=window)
    rows = [(300, max_query_len // 2 + 1), (650, 1), (20, 4), (0, 2), (430, max_query_len)]
    case = Case(shape, rows, DEVICE, max_query_len=max_query_len, plan_window=10_000)
    assert query_part(max_query_len, group, case.query.shape[0], False) < max_query_len
    assert case.step.decode is not None and (case.step.decode.splits[:, 3] >= 0).any()
    # Counters are left as they were found.
    for _ in range(2):
        check(case)
    assert not case.step.decode.scratch.done.any()


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize(("max_query_len", "window", "kv"), [(2, None, "fp8"), (4, 70, "int8"), (2, 1, "fp8")])
def test_rows_of_drafts_that_are_columns_equal_fp64(max_query_len: int, window: int | None, kv: str) -> None:
    shape = Shape(4, 2, 32, 16, window, torch.float16, kv)
    rows = [(300 + 10 * count, count) for count in range(1, max_query_len + 1)] + [(0, 1), (0, max_query_len)]
    check(Case(shape, rows, DEVICE, max_query_len=max_query_len))


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize(("window", "kv"), [(None, ""), (70, "fp8"), (1, "")])
def test_rows_of_drafts_with_sinks_equal_fp64_when_their_context_is_split(window: int | None, kv: str) -> None:
    shape = Shape(6, 2, 16, window=window, kv=kv, has_sinks=True)
    rows = [(64 * 10, 1), (310, 3), (0, 1), (0, 4)]
    check(Case(shape, rows, DEVICE, max_query_len=4, plan_window=10_000))


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("window", [None, 50])
def test_gathered_contexts_with_sinks_equal_fp64(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_kernels.attention.plan._MIN_GATHER_ROWS", 1)
    monkeypatch.setattr("headrace_kernels.attention.plan._MIN_GATHER_KEYS", 1)
    shape = Shape(4, 2, 64, 16, window, torch.bfloat16, has_sinks=True)
    check(Case(shape, [(70, 129), (0, 20), (3, 1)], DEVICE, gather_bytes=GATHER_BYTES))


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("rows", [[(63, 1)], [(64, 1)], [(65, 1)], [(0, 1)], [(1500, 1), (2, 1)]])
def test_decodes_at_the_edges_of_splits_equal_fp64(rows: list[tuple[int, int]]) -> None:
    check(Case(Shape(4, 1, 16), rows, DEVICE))


def test_more_splits_than_one_pass_of_merging_takes() -> None:
    case = Case(Shape(2, 1, 16), [(64 * 330, 1)], DEVICE)
    assert case.step.decode is not None and int(case.step.decode.splits[0, 2]) > 64
    check(case)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize(
    ("rows", "window", "kv"),
    [
        ([(0, 130), (100, 140), (7, 1)], None, ""),
        ([(70, 129), (3, 1)], 50, ""),
        ([(300, 140)], 200, ""),
        ([(250, 3), (0, 128)], 1, ""),
        ([(0, 130), (100, 140), (7, 1)], None, "int8"),
        ([(70, 129), (3, 1)], 50, "fp8"),
    ],
)
def test_gathered_contexts_equal_fp64(
    rows: list[tuple[int, int]], window: int | None, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_kernels.attention.plan._MIN_GATHER_ROWS", 1)
    monkeypatch.setattr("headrace_kernels.attention.plan._MIN_GATHER_KEYS", 1)
    case = Case(Shape(4, 2, 64, 16, window, torch.bfloat16, kv), rows, DEVICE, gather_bytes=GATHER_BYTES)
    assert case.step.prefill is not None
    if DEVICE == "cpu" or torch.cuda.get_device_capability() >= (9, 0):
        assert case.step.prefill.gathered is not None
    check(case)


@pytest.mark.usefixtures("poisoned_outputs")
def test_gathered_heads_of_256_equal_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_kernels.attention.plan._MIN_GATHER_ROWS", 1)
    monkeypatch.setattr("headrace_kernels.attention.plan._MIN_GATHER_KEYS", 1)
    check(Case(Shape(3, 1, 256, 16, 60, torch.bfloat16), [(70, 30)], DEVICE, gather_bytes=GATHER_BYTES))


@pytest.mark.parametrize("plan_window", [10_000, 300])
def test_a_layer_with_a_narrower_window_than_the_plans_equals_fp64(
    plan_window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_kernels.attention.plan._MIN_GATHER_ROWS", 1)
    monkeypatch.setattr("headrace_kernels.attention.plan._MIN_GATHER_KEYS", 1)
    shape = Shape(4, 2, 64, 16, 70, torch.bfloat16)
    rows = [(900, 1), (400, 8), (300, 140)]
    check(Case(shape, rows, DEVICE, plan_window=plan_window, gather_bytes=GATHER_BYTES))


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize(
    ("shape", "rows", "plan_window"),
    [
        (Shape(4, 2, 16), [(2500, 20), (10, 30)], None),
        (Shape(7, 1, 8, 16, has_sinks=True), [(2300, 9), (1200, 40)], None),
        (Shape(4, 2, 16, 32, window=600, has_sinks=True), [(2500, 33)], 10_000),
        # The window leaves most shares nothing, and rows of a share see nothing of it.
        (Shape(2, 1, 16, window=40), [(2500, 100)], 10_000),
        (Shape(6, 2, 80, 32, dtype=torch.float16, kv="fp8"), [(1900, 21)], None),
        (Shape(4, 2, 64, dtype=torch.bfloat16), [(3000, 70)], None),
    ],
    ids=str,
)
def test_programs_that_share_a_tiles_keys_equal_fp64(
    shape: Shape, rows: list[tuple[int, int]], plan_window: int | None
) -> None:
    case = Case(shape, rows, DEVICE, padding=60, plan_window=plan_window, shares=True)
    assert case.step.prefill is not None and case.step.prefill.shares is not None
    assert int(case.step.prefill.shares[:, 1].max()) > 2
    check(case)
    # Counters are 0 again: the next layer finds what the first one found.
    check(case)


def test_a_bad_row_spoils_no_other() -> None:
    case = Case(Shape(4, 2, 16), [(200, 1), (200, 1), (30, 20), (30, 20)], DEVICE)
    case.query[0] = float("nan")
    case.query[2:22] = float("inf")
    found = paged_attention(case.query, case.kv_cache, case.step, case.shape.scale)
    assert not found[0].isfinite().any() and not found[2:22].isfinite().any()
    finite = [1, *range(22, 42)]
    torch.testing.assert_close(found[finite].double(), case.oracle()[finite], atol=2e-5, rtol=0)


def test_a_cache_of_more_than_2_to_the_31_values_is_addressed() -> None:
    # Only the last blocks are touched; the rest is address space.
    shape = Shape(2, 2, 64, 16, None, torch.bfloat16)
    spare = 2**31 // (2 * 2 * 16 * 64) + 10
    case = Case(shape, [(40, 1), (20, 30)], DEVICE, spare_blocks=spare)
    assert case.kv_cache.numel() > 2**31
    check(case)


def test_what_the_kernels_cannot_read_is_refused() -> None:
    case = Case(Shape(2, 2, 16), [(4, 1)], DEVICE)
    with pytest.raises(ValueError, match="kv_cache must have its tiles at equal distances"):
        paged_attention(case.query, case.kv_cache.transpose(2, 3), case.step, 1.0)


LARGE = [
    Shape(32, 8, 128, 32, None, torch.bfloat16),
    Shape(32, 8, 128, 32, 1000, torch.bfloat16),
    Shape(28, 4, 128, 16, None, torch.float16),
    Shape(16, 2, 64, 16, None, torch.bfloat16),
    Shape(8, 2, 80, 16, None, torch.bfloat16),
    Shape(8, 8, 96, 16, None, torch.float16),
    Shape(8, 4, 256, 16, None, torch.bfloat16),
    Shape(32, 8, 128, 16, None, torch.bfloat16, "int8"),
    Shape(32, 8, 128, 32, None, torch.bfloat16, "fp8"),
    Shape(28, 4, 128, 16, 1000, torch.float16, "int8"),
    Shape(8, 2, 80, 16, None, torch.bfloat16, "fp8"),
    Shape(8, 4, 256, 16, None, torch.bfloat16, "int8"),
    Shape(16, 2, 64, 16, None, torch.float32, "fp8"),
    # gpt-oss' two kinds of layers.
    Shape(64, 8, 64, 16, None, torch.bfloat16, has_sinks=True),
    Shape(64, 8, 64, 16, 128, torch.bfloat16, has_sinks=True),
    Shape(64, 8, 64, 16, 128, torch.bfloat16, "fp8", has_sinks=True),
]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_real_sizes_equal_fp64(shape: Shape) -> None:
    chance = random.Random(1)
    decodes = [(chance.randrange(5000), 1) for _ in range(40)]
    check(Case(shape, decodes, DEVICE, padding=3))
    check(Case(shape, [(20_000, 1)], DEVICE))
    check(Case(shape, [(2000, 700), (0, 900), (5, 300), *decodes[:5]], DEVICE, gather_bytes=1 << 28))
    check(Case(shape, [(2000, 100), (0, 900), (5, 300), *decodes[:5]], DEVICE, padding=5))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("shape", [shape for shape in LARGE if shape.head_dim in (64, 128, 256)], ids=str)
def test_gathered_contexts_of_real_sizes_equal_fp64(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    if shape.dtype is torch.float32:
        pytest.skip("not gathered")
    monkeypatch.setattr("headrace_kernels.attention.plan._MIN_GATHER_ROWS", 1)
    monkeypatch.setattr("headrace_kernels.attention.plan._MIN_GATHER_KEYS", 1)
    for rows in ([(2000, 700), (0, 900), (5, 300), (900, 1)], [(0, 4099)], [(3000, 513), (127, 700), (128, 640)]):
        case = Case(shape, rows, DEVICE, max_query_len=1, padding=3, gather_bytes=1 << 28)
        assert case.step.prefill is not None and case.step.prefill.gathered is not None
        check(case)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_programs_that_share_keys_of_real_sizes_equal_fp64(shape: Shape) -> None:
    for rows in ([(20_000, 100)], [(9000, 64), (300, 50)], [(3000, 250), (100, 1)]):
        case = Case(shape, rows, DEVICE, padding=200, max_query_len=1, plan_window=100_000, shares=True)
        for _ in range(3):
            check(case)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
@pytest.mark.parametrize("max_query_len", [2, 4, 8, 16])
@pytest.mark.parametrize("kv", ["", "int8", "fp8"])
def test_drafts_of_real_sizes_equal_fp64(max_query_len: int, kv: str) -> None:
    rows = [(3000 + 111 * i, 1 + i % max_query_len) for i in range(9)]
    check(Case(dataclasses.replace(LARGE[0], kv=kv), rows, DEVICE, max_query_len=max_query_len))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
@pytest.mark.parametrize("kv", ["", "int8", "fp8"])
def test_nothing_is_compiled_for_other_lengths_batches_and_addresses(kv: str) -> None:
    shape = dataclasses.replace(LARGE[0], kv=kv)

    def run(rows: list[tuple[int, int]], gather_bytes: int, column_offset: int = 0) -> None:
        case = Case(shape, rows, DEVICE, max_query_len=1, gather_bytes=gather_bytes, column_offset=column_offset)
        paged_attention(case.query, case.kv_cache, case.step, shape.scale)

    run([(1000, 1), (100, 50)], 0)
    run([(0, 600)], 1 << 26)
    before = compilation_count()
    for rows in ([(0, 1)], [(15, 1)] * 16, [(16, 17), (1, 1)], [(5000, 300), (4095, 1), (0, 9)]):
        run(rows, 0, column_offset=1)
    for rows in ([(1, 700)], [(128, 1024), (3, 600)]):
        run(rows, 1 << 27, column_offset=2)
    assert compilation_count() == before


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
def test_a_captured_step_computes_whatever_its_columns_say() -> None:
    shape = LARGE[0]
    wide = Case(shape, [(100, 1), (900, 1), (20, 50), (0, 200)], DEVICE, max_query_len=1, padding=4)
    paged_attention(wide.query, wide.kv_cache, wide.step, shape.scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = paged_attention(wide.query, wide.kv_cache, wide.step, shape.scale)
    found.fill_(float("nan"))
    graph.replay()
    expected = wide.oracle()
    torch.testing.assert_close(found[: expected.shape[0]].double(), expected, atol=2e-2, rtol=0)
    # The last entries leave: their splits and tiles become padding.
    assert wide.step.decode is not None and wide.step.prefill is not None
    wide.step.decode.splits[wide.step.decode.splits[:, 0] >= 1] = -1
    wide.step.prefill.tiles.fill_(-1)
    found.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(found[:1].double(), expected[:1], atol=2e-2, rtol=0)
    assert found[1:].isnan().all()
