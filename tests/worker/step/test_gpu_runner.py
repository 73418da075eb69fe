"""The GPU's way through a step.

The same tokens as the CPU's, exact or padded, in the interpreter here and captured on a card.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.models.checkpoints import write_checkpoint
from tests.support.model_builds import load_model
from tests.support.staged_runners import stage_models, staged
from tests.worker.driver import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    NUM_ROWS,
    Entry,
    admission,
    execute,
    id_bytes,
    make_runner,
    step,
)

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.parallel import row_dealer
from headrace_backend.parallel.collectives import Collectives, PendingAllReduce, PieceRule
from headrace_backend.parallel.row_dealer import RowDealer
from headrace_backend.step.plan import StepPlan
from headrace_backend.weights.placement import Shard
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.step.buffers import StepLimits
from headrace_backend.worker.step.cpu_runner import CpuRunner
from headrace_backend.worker.step.gpu_runner import GpuRunner
from headrace_backend.worker.step.kv_caches import allocate_kv_caches, kv_type
from headrace_backend.worker.step.shape import AttentionSizes, StepShape, captured_shapes
from headrace_kernels.triton_runtime import INTERPRETED, forced
from headrace_model_folder import ModelFolder

PROMPTS = [[int(x) for x in np.random.default_rng(row).integers(3, 97, 5 + 7 * row)] for row in range(5)]
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")),
    pytest.param(
        "cuda:0",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
    ),
]
NUM_TOKENS = 128


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """On a CPU the kernels run in the interpreter."""
    with forced() if request.param == "cpu" else contextlib.nullcontext():
        yield request.param


@pytest.fixture
def model(device: str, request: pytest.FixtureRequest) -> CausalLM:
    model: CausalLM = request.getfixturevalue("llama" if device == "cpu" else "llama_on_gpu")
    return model


def gpu_runner(
    model: CausalLM,
    device: str,
    batch_sizes: tuple[int, ...],
    kv_dtype: str = "auto",
    full_sizes: tuple[int, ...] = (),
) -> GpuRunner:
    shape = (NUM_BLOCKS, 2, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
    where = torch.device(device)
    caches = allocate_kv_caches(model.num_layers, shape, kv_type(kv_dtype, torch.float32), where)
    sizes = AttentionSizes.of(model.num_heads, caches[0], model.dtype)
    mixed = (16, 32, 64, 96, 128) if batch_sizes else ()
    first_piece = functools.partial(model.first_piece, is_captured=True)
    runner = GpuRunner(
        model,
        Sampler(NUM_ROWS, model.vocab_size, where),
        caches,
        StepLimits(NUM_ROWS, NUM_TOKENS, MAX_MODEL_LEN),
        sizes,
        captured_shapes(batch_sizes, mixed, NUM_ROWS, sizes, first_piece, full_sizes),
    )
    runner.capture(lambda *_: None)
    return runner


def cpu_runner(model: CausalLM) -> CpuRunner:
    return make_runner(model, model.num_layers, model.num_kv_heads, model.head_dim)


def mixed_plans() -> list[StepPlan]:
    """Five prompts, the longest in two chunks, a fork with a copied block, a release.

    Tokens the plan does not know.
    """
    tables = {row: [row * 8 + i for i in range(8)] for row in range(5)}
    start = [Entry(row, 0, PROMPTS[row], (row,)) for row in range(4)] + [Entry(4, 0, PROMPTS[4][:20])]
    plans = [step(start, [admission(row) for row in range(5)], tables, step_id=1)]
    decode = [Entry(row, len(PROMPTS[row]), None, (row,), 1) for row in range(4)]
    plans.append(step([*decode, Entry(4, 20, PROMPTS[4][20:], (4, 5))], [admission(5)], {5: [32, 33, 50]}, step_id=2))
    decode = [Entry(row, len(PROMPTS[row]) + 1, None, (row,), 2) for row in (1, 2, 3)]
    ends = [Entry(row, len(PROMPTS[4]), None, (row,), 1) for row in (4, 5)]
    plans.append(step([*decode, *ends], released=(0,), copies=((34, 50),), step_id=3))
    for number in range(4, 6):
        entries = [Entry(row, len(PROMPTS[row]) + number - 2, None, (row,), number - 1) for row in (1, 2, 3)]
        plans.append(step(entries, released=(4, 5) if number == 4 else (), step_id=number))
    return plans


@pytest.fixture(scope="module")
def expected(llama: CausalLM) -> list[list[int]]:
    """What the CPU's path draws."""
    runner = cpu_runner(llama)
    return [execute(runner, plan).tokens.tolist() for plan in mixed_plans()]


# Steps of whatever sizes, and padded to captured ones; of the second kind tests have all.
SIZES = pytest.mark.parametrize(
    "batch_sizes", [pytest.param((), marks=pytest.mark.slow), (1, 2, 4, 8)], ids=["exact", "padded"]
)


@SIZES
def test_tokens_are_those_of_the_cpu(
    model: CausalLM, device: str, batch_sizes: tuple[int, ...], expected: list[list[int]]
) -> None:
    runner = gpu_runner(model, device, batch_sizes)
    assert [execute(runner, plan).tokens.tolist() for plan in mixed_plans()] == expected
    assert (runner.num_captured > 0) == bool(batch_sizes and device != "cpu")


def test_full_steps_alone_are_padded_to_their_shape_and_draw_the_same(
    model: CausalLM, device: str, expected: list[list[int]]
) -> None:
    first, *others = mixed_plans()
    size = first.num_tokens + 2
    runner = gpu_runner(model, device, (), full_sizes=(size,))
    assert execute(runner, first).tokens.tolist() == expected[0]
    assert runner.launched.num_tokens == size and runner.launched.captured == (device != "cpu")
    for plan, tokens in zip(others, expected[1:], strict=True):
        assert execute(runner, plan).tokens.tolist() == tokens
        assert runner.launched.num_tokens == plan.num_tokens and not runner.launched.captured
    assert runner.captured_mixed_sizes == ()


@SIZES
def test_pipeline_stages_draw_the_tokens_of_the_cpu(
    llama_path: pathlib.Path, device: str, batch_sizes: tuple[int, ...], expected: list[list[int]]
) -> None:
    """Each stage pads, captures and replays by itself; streams have the step's own tokens."""
    models = stage_models(ModelFolder.open(llama_path), 2, device=device)
    stages = staged(models, functools.partial(gpu_runner, device=device, batch_sizes=batch_sizes))
    assert [execute(stages, plan).tokens.tolist() for plan in mixed_plans()] == expected


class LoneRank(Collectives):
    """Collectives of a rank that has no peers, and cuts its steps all the same."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def __init__(self, rule: PieceRule) -> None:
        self.piece_rule = rule
        # Of all sums that were begun.
        self.begun_rows: list[int] = []

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def begin_all_reduce(self, partial: torch.Tensor) -> PendingAllReduce:
        self.begun_rows.append(len(partial))
        return super().begin_all_reduce(partial)

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return part[None]


@SIZES
@pytest.mark.parametrize("multiple", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_steps_in_two_pieces_draw_the_same(
    model: CausalLM,
    device: str,
    batch_sizes: tuple[int, ...],
    multiple: int,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces of decodes alone, of prompts, and of both.

    Rows that are cut in the middle of a prompt and before its last token; padding that is all there
    is of a second piece.
    """
    together = LoneRank(PieceRule(1, 1, multiple))
    monkeypatch.setattr(model, "shard", Shard(collectives=together))
    monkeypatch.setattr(model.model, "_together", together)
    runner = gpu_runner(model, device, batch_sizes)
    together.begun_rows.clear()
    assert [execute(runner, plan).tokens.tolist() for plan in mixed_plans()] == expected
    sizes = [plan.num_tokens for plan in mixed_plans()]
    cut = [size for size in sizes if together.piece_rule.first_piece(size, 1)]
    if not batch_sizes:
        # Two sums of each piece in all layers but the last, which has none of them.
        num_sums = 2 * (model.num_layers - 1)
        assert sum(together.begun_rows) == num_sums * sum(cut)
    elif device == "cpu":
        assert sum(together.begun_rows) > 0, "no captured shape is in pieces"


def test_a_last_layer_of_sampled_tokens_alone_draws_the_same(
    model: CausalLM, device: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_backend.worker.step.gpu_runner._LAST_ROWS", 2)
    asked: list[torch.Tensor | None] = []
    wanted = GpuRunner._wanted

    def noted(runner: GpuRunner, shape: StepShape) -> torch.Tensor | None:
        asked.append(wanted(runner, shape))
        return asked[-1]

    monkeypatch.setattr(GpuRunner, "_wanted", noted)
    runner = gpu_runner(model, device, ())
    assert [execute(runner, plan).tokens.tolist() for plan in mixed_plans()] == expected
    # Two steps with prompts, in whole pairs of rows, one that is only checked among them; in steps
    # of decodes every token is sampled.
    assert [None if rows is None else len(rows) for rows in asked] == [6, 6, *[None] * (len(expected) - 2)]


# Such caches have kernels in tests/kernels/attention, a CPU's runner in test_cpu_verification.
@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_tokens_over_a_quantized_cache_are_those_of_the_cpu(
    model: CausalLM, device: str, kv_dtype: str, llama: CausalLM
) -> None:
    """Chunks, a fork whose block is copied with its scales, a row given back."""
    twin = make_runner(llama, llama.num_layers, llama.num_kv_heads, llama.head_dim, kv_dtype)
    expected = [execute(twin, plan).tokens.tolist() for plan in mixed_plans()]
    runner = gpu_runner(model, device, (1, 2, 4, 8), kv_dtype)
    assert [execute(runner, plan).tokens.tolist() for plan in mixed_plans()] == expected


class AlikeRank(Collectives):
    """One of two ranks whose fellow has the very same numbers, and draws the very same tokens."""

    world_size = 2

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack((part, part))


# Real ranks meet in tests/parallel/test_dealt_rows; this needs one card to have a share captured.
@pytest.mark.slow
@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4, 8)], ids=["exact", "padded"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_draws_its_share_as_it_draws_all_rows(
    device: str, batch_sizes: tuple[int, ...], rank: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, "llama-mha")
    folder, where = ModelFolder.open(tmp_path), torch.device(device)
    monkeypatch.setattr(row_dealer, "_LEAST_SAVED_BYTES", 1)
    shard = Shard(rank, 2, AlikeRank(rank, where))
    model = load_model(folder, folder.config, torch.float32, where, "folder", 0, lambda *_: None, shard=shard)
    bias = {"logit_bias_ids": id_bytes(4), "logit_bias_values": np.float32(6).tobytes()}
    options = ({}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.8}, {"temperature": 0.7, **bias}, {})
    rows = [admission(row, **wanted) for row, wanted in enumerate(options)]
    tables = {row: [row * 8 + i for i in range(8)] for row in range(5)}
    plans = [step([Entry(row, 0, PROMPTS[row], (row,)) for row in range(5)], rows, tables, step_id=1)]
    # Every token is known, whatever was drawn: a fellow's tokens are not the other rows'.
    plans += [step([Entry(row, len(PROMPTS[row]), [7 + row], (row,), 1) for row in range(5)], step_id=2)]
    shared = gpu_runner(model, device, batch_sizes)
    found = [execute(shared, plan).tokens.tolist() for plan in plans]
    monkeypatch.setattr(RowDealer, "pays", lambda dealer, num_rows: False)
    whole = gpu_runner(model, device, batch_sizes)
    expected = [execute(whole, plan).tokens.tolist() for plan in plans]
    own = slice(0, 3) if rank == 0 else slice(3, 5)
    assert [tokens[own] for tokens in found] == [tokens[own] for tokens in expected]
    if device != "cpu" and batch_sizes:
        # A graph more for each shape of two rows and more.
        assert shared.num_captured > whole.num_captured


def plans_with_options() -> list[StepPlan]:
    """Rows that draw in every way the sampler knows, together and then plain ones alone."""
    history = {"prompt_ids": id_bytes(*PROMPTS[3]), "output_ids": id_bytes()}
    # The most likely token by its bias may not come twice in a row.
    bias = {"logit_bias_ids": id_bytes(4), "logit_bias_values": np.float32(30).tobytes()}
    banned = {"bad_words": (id_bytes(4, 4),), "prompt_ids": id_bytes(*PROMPTS[4])}
    rows = [
        admission(0, temperature=0.8),
        admission(1, temperature=0.7, top_k=20, top_p=0.9, num_logprobs=3),
        admission(2, temperature=1.5, min_p=0.05, top_n_sigma=1.5),
        admission(3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.1, **history),
        admission(4, **bias, **banned, min_tokens=2, stop_token_ids=id_bytes(9), num_logprobs=0),
    ]
    tables = {row: [row * 8 + i for i in range(8)] for row in range(5)}
    plans = [step([Entry(row, 0, PROMPTS[row], (row,)) for row in range(5)], rows, tables, step_id=1)]
    for number in range(2, 4):
        decode = [Entry(row, len(PROMPTS[row]) + number - 2, None, (row,), number - 1) for row in range(5)]
        plans.append(step(decode, step_id=number))
    plain = [Entry(row, len(PROMPTS[row]) + 2, None, (row,), 3) for row in (0, 2)]
    plans.append(step(plain, released=(1, 3, 4), step_id=4))
    return plans


@SIZES
def test_rows_with_options_draw_as_on_the_cpu(
    device: str, batch_sizes: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    names = ("shallow_llama",) * 2 if device == "cpu" else ("llama_on_gpu", "llama")
    model, twin = map(request.getfixturevalue, names)
    on_gpu, on_cpu = gpu_runner(model, device, batch_sizes), cpu_runner(twin)
    for plan in plans_with_options():
        drawn, wanted = execute(on_gpu, plan), execute(on_cpu, plan)
        assert drawn.tokens.tolist() == wanted.tokens.tolist()
        assert drawn.ok.all()
        assert drawn.top_token_ids.tolist() == wanted.top_token_ids.tolist()
        assert drawn.logprob_ranks.tolist() == wanted.logprob_ranks.tolist()
        np.testing.assert_allclose(drawn.top_logprobs, wanted.top_logprobs, atol=1e-4)


def test_bad_numbers_end_their_own_row_only(model: CausalLM, device: str) -> None:
    """A cache block of NaN, as a broken copy would leave it.

    The row that reads it is not finite, the others are.
    """
    runner = gpu_runner(model, device, (1, 2, 4, 8))
    tables = {row: [row * 8 + i for i in range(8)] for row in range(3)}
    execute(
        runner,
        step([Entry(row, 0, PROMPTS[row], (row,)) for row in range(3)], [admission(r) for r in range(3)], tables),
    )
    runner.kv_caches[0][8].fill_(torch.nan)
    result = execute(runner, step([Entry(row, len(PROMPTS[row]), None, (row,), 1) for row in range(3)]))
    assert result.ok.tolist() == [1, 0, 1]
    assert result.tokens[1] == 0


@SIZES
def test_chunks_report_whether_what_they_saw_is_finite(
    model: CausalLM, device: str, batch_sizes: tuple[int, ...]
) -> None:
    """Two chunks in the middle of their prompts, alone and beside a row that draws.

    The second sees a broken block.
    """
    runner = gpu_runner(model, device, batch_sizes)
    tables = {row: [row * 8 + i for i in range(8)] for row in range(3)}
    prompts = [Entry(row, 0, PROMPTS[row][:5]) for row in range(2)]
    first = execute(runner, step(prompts, [admission(row) for row in range(3)], tables))
    assert (first.tokens.size, first.checked_ok.tolist()) == (0, [1, 1])
    runner.kv_caches[-1][8].fill_(torch.nan)
    beside = Entry(2, 0, PROMPTS[2], (2,))
    second = execute(runner, step([Entry(row, 5, [7, 8, 9]) for row in range(2)] + [beside], step_id=2))
    assert (second.ok.tolist(), second.checked_ok.tolist()) == ([1], [1, 0])
    third = execute(runner, step([Entry(1, 8, [7]), Entry(2, len(PROMPTS[2]), None, (2,), 1)], step_id=3))
    assert (third.ok.tolist(), third.checked_ok.tolist()) == ([1], [0])
