"""A draft model beside the model: it drafts what it would write, and changes no answer.

On a CPU, and by the GPU's kernels in the interpreter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.support.kernel_case import DEVICES
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
from tests.worker.recorded_graphs import RecordedGraphs
from tests.worker.speculation.drafted_rows import Job, plain_answers, run
from tests.worker.speculation.test_cpu_verification import OPTIONS, assert_same, job
from tests.worker.speculation.test_cpu_verification import runner as plain_runner

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.draft_head import DraftHead
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.speculation.deferred_steps import DeferredSteps
from headrace_backend.worker.speculation.drafted_rows import DraftedRows
from headrace_backend.worker.speculation.drafter import ComputedTokens
from headrace_backend.worker.speculation.speculation import RowDrafts, Speculation
from headrace_backend.worker.step.buffers import DeviceRows, StepLimits
from headrace_backend.worker.step.cpu_draft_model import CpuDraftModel
from headrace_backend.worker.step.cpu_runner import CpuBatch, CpuRunner
from headrace_backend.worker.step.drafting_model import DraftingModel, SmallModel
from headrace_backend.worker.step.gpu_draft_model import GpuDraftModel
from headrace_backend.worker.step.gpu_runner import GpuRunner
from headrace_backend.worker.step.kv_caches import allocate_kv_caches, kv_type
from headrace_backend.worker.step.runner import Runner
from headrace_backend.worker.step.shape import AttentionSizes, captured_shapes
from headrace_kernels.attention.step import PagedAttentionStep
from headrace_kernels.triton_runtime import INTERPRETED, forced

NUM_DRAFTS = 4
CPU = torch.device("cpu")


def caches_of(model: CausalLM | DraftHead, num_layers: int, kv_dtype: str = "auto") -> list[torch.Tensor]:
    """Caches on the model's device."""
    shape = (NUM_BLOCKS, 2, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
    return allocate_kv_caches(num_layers, shape, kv_type(kv_dtype, torch.float32), next(model.parameters()).device)


def small_model(draft: CausalLM, kv_dtype: str) -> SmallModel:
    return SmallModel(draft, caches_of(draft, draft.num_layers, kv_dtype), draft.num_heads)


def cpu_runner(model: CausalLM, draft: CausalLM, kv_dtype: str = "auto") -> CpuRunner:
    return drafting_cpu_runner(model, small_model(draft, kv_dtype), kv_dtype)[0]


def drafting_cpu_runner(
    model: CausalLM, drafting: DraftingModel, kv_dtype: str, kind: type[CpuDraftModel] = CpuDraftModel
) -> tuple[CpuRunner, CpuDraftModel]:
    """A runner, and its drafter of some kind over a small model or a head."""
    sampler = Sampler(NUM_ROWS, model.vocab_size, CPU)
    batch = CpuBatch(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS)
    rows = RowDrafts(NUM_ROWS, 1 + NUM_DRAFTS, CPU)
    drafter = kind(drafting, sampler, rows, batch)
    speculation = Speculation(drafter, rows, model.vocab_size)
    return CpuRunner(model, batch, sampler, caches_of(model, model.num_layers, kv_dtype), speculation), drafter


def gpu_runner(
    model: CausalLM, draft: CausalLM, batch_sizes: tuple[int, ...], kv_dtype: str = "auto", window: int = MAX_MODEL_LEN
) -> GpuRunner:
    return drafting_gpu_runner(model, small_model(draft, kv_dtype), batch_sizes, kv_dtype, window=window)


def drafting_gpu_runner(
    model: CausalLM,
    drafting: DraftingModel,
    batch_sizes: tuple[int, ...],
    kv_dtype: str,
    kind: type[GpuDraftModel] = GpuDraftModel,
    window: int = MAX_MODEL_LEN,
) -> GpuRunner:
    """The GPU's runner on the model's device, which may be a CPU."""
    caches = caches_of(model, model.num_layers, kv_dtype)
    where = caches[0].device
    sampler = Sampler(NUM_ROWS, model.vocab_size, where)
    tables = DeviceRows(NUM_ROWS, MAX_MODEL_LEN // BLOCK_SIZE, NUM_BLOCKS, where)
    rows = RowDrafts(NUM_ROWS, 1 + NUM_DRAFTS, where)
    own = AttentionSizes.of(drafting.num_heads, drafting.kv_caches[0], torch.float32)
    followed_sizes = (8, 64) if batch_sizes and drafting.attends_in_follow else ()
    most = max(followed_sizes, default=128)
    deferred = DeferredSteps(NUM_ROWS, window, most) if drafting.attends_in_follow else None
    drafter = kind(drafting, sampler, rows, tables, own, batch_sizes, deferred=deferred, followed_sizes=followed_sizes)
    sizes = AttentionSizes.of(model.num_heads, caches[0], model.dtype, 1 + NUM_DRAFTS)
    limits = StepLimits(NUM_ROWS, 128, MAX_MODEL_LEN, tokens_per_row=1 + NUM_DRAFTS)
    shapes = captured_shapes(batch_sizes, (16, 64, 128) if batch_sizes else (), NUM_ROWS, sizes)
    speculation = Speculation(drafter, rows, model.vocab_size)
    made = GpuRunner(model, sampler, caches, limits, sizes, shapes, speculation=speculation, rows=tables)
    if where.type == "cpu":
        made._graphs, drafter._graphs = RecordedGraphs(), RecordedGraphs()  # type: ignore[assignment]
    made.capture(lambda *_: None)
    return made


def followed_from_graphs(runner: GpuRunner, name: str = "follow") -> int:
    """Steps that the drafter followed by replays, where those are noted.

    They are steps of decodes; "followed": passes that catch up, and steps with prompts.
    """
    drafter = runner.speculation._drafter if runner.speculation is not None else None
    assert isinstance(drafter, GpuDraftModel) and isinstance(drafter._graphs, RecordedGraphs)
    return drafter._graphs.replayed.count(name)


class Recording:
    """A runner that keeps how many tokens each row of its steps may settle."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.most: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, plan: StepPlan) -> torch.Tensor:
        self.most.append((plan.forward.counts - np.maximum(plan.forward.known_counts - 1, 0)).tolist())
        return self._runner.forward(plan)


def assert_all_is_settled(runner: Runner, jobs: list[Job], expected: list[Job]) -> None:
    """Computes jobs with drafts of several numbers, all of which are to be right."""
    recording, results, number = Recording(runner), list[StepResult](), iter(range(200))
    found = run(recording, jobs, lambda: (NUM_DRAFTS, 2, 0, 3)[next(number) % 4], on_result=results.append)
    assert_same(found, expected)
    counts = [result.counts.tolist() or [1] * len(most) for result, most in zip(results, recording.most, strict=True)]
    assert counts == recording.most
    assert {1, 3, 4, 5} <= {count for each in counts for count in each}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_a_draft_model_changes_no_answer(llama: CausalLM, shallow_llama: CausalLM, option: str) -> None:
    """Even one that is nearly always wrong."""
    jobs = [job(row, 20, **OPTIONS[option]) for row in (0, 3)]
    expected = plain_answers(lambda: plain_runner(llama), jobs)
    assert_same(run(cpu_runner(llama, shallow_llama), jobs, lambda: NUM_DRAFTS), expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("option", ["greedy", "temperature", "top_k", "top_p", "min_p", "top_n_sigma"])
def test_the_same_model_drafts_what_is_drawn(llama: CausalLM, option: str) -> None:
    """With the row's parameters and noise its draws are the very same, so that all are accepted.

    It needs keys and values of all tokens for that: of prompts, of tokens before and behind drafts.
    """
    jobs = [job(row, 31, **OPTIONS[option]) for row in (0, 3)]
    expected = plain_answers(lambda: plain_runner(llama), jobs)
    assert_all_is_settled(cpu_runner(llama, llama), jobs, expected)


def test_blocks_that_are_copied_have_the_draft_models_keys_too(llama: CausalLM) -> None:
    """A fork draws from its leader's prompt, whose last block is copied for it."""
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, 97, 20)]
    runner = cpu_runner(llama, llama)
    admitted = [admission(0, seed=3, temperature=0.9), admission(1, seed=3, temperature=0.9, output_index=1)]
    tables = {0: [0, 1, 2, 3], 1: [0, 9, 10, 11]}
    execute(runner, step([Entry(0, 0, prompt, (0, 1))], admitted, tables))
    entries = [Entry(row, 20, None, (row,), 1, num_drafts=NUM_DRAFTS) for row in (0, 1)]
    result = execute(runner, step(entries, copies=((1, 9),)))
    assert result.counts.tolist() == [1 + NUM_DRAFTS] * 2


class FailingModel:
    """A draft model that fails in its second pass on, as one without memory would."""

    def __init__(self, model: CausalLM) -> None:
        self._model, self._num_passes = model, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def __call__(self, *arguments: object) -> torch.Tensor:
        self._num_passes += 1
        if self._num_passes > 1:
            raise RuntimeError("no draft")
        hidden: torch.Tensor = self._model(*arguments)
        return hidden


def test_a_draft_model_that_fails_costs_its_drafts_alone(llama: CausalLM, capfd: pytest.CaptureFixture[str]) -> None:
    jobs = [job(row, 12) for row in (0, 3)]
    results: list[StepResult] = []
    failing: CausalLM = FailingModel(llama)  # type: ignore[assignment]  # as far as a runner uses it
    found = run(cpu_runner(llama, failing), jobs, lambda: NUM_DRAFTS, on_result=results.append)
    assert_same(found, plain_answers(lambda: plain_runner(llama), jobs))
    assert results[-1].lost_drafts > 0
    assert capfd.readouterr().err.count("RuntimeError: no draft") == 1


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def on_device(check: Callable[[], None], device: str) -> None:
    """In the interpreter on a CPU."""
    if device == "cpu" and not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    with forced() if device == "cpu" else contextlib.nullcontext():
        check()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
# Steps padded to captured sizes are those of a server.
@pytest.mark.parametrize(
    ("batch_sizes", "kv_dtype"),
    [pytest.param((), "int8", marks=pytest.mark.slow), ((1, 2, 4, 8), "auto")],
    ids=["exact", "padded"],
)
def test_a_gpus_passes_draft_what_a_cpus_draft(
    shallow_llama: CausalLM,
    device: str,
    batch_sizes: tuple[int, ...],
    kv_dtype: str,
    request: pytest.FixtureRequest,
) -> None:
    """A model that is its own draft, in rows that draw in three ways: all is settled."""
    model: CausalLM = shallow_llama if device == "cpu" else request.getfixturevalue("llama_on_gpu")
    twin: CausalLM = shallow_llama if device == "cpu" else request.getfixturevalue("llama")
    jobs = [job(0, 13), job(1, 13, **OPTIONS["temperature"]), job(2, 9, **OPTIONS["top_k"])]
    expected = plain_answers(lambda: plain_runner(twin, None, kv_dtype), jobs)

    def check() -> None:
        runner = gpu_runner(model, model, batch_sizes, kv_dtype)
        assert_all_is_settled(runner, jobs, expected)
        if device == "cpu":
            assert bool(followed_from_graphs(runner)) == bool(batch_sizes)
            assert bool(followed_from_graphs(runner, "followed")) == bool(batch_sizes)

    on_device(check, device)


class SeesPadding(GpuDraftModel):
    """Notes the columns of each step that it is shown while graphs are captured."""

    seen: ClassVar[list[tuple[int, list[int], list[int]]]] = []

    def _follow_captured(self, computed: ComputedTokens) -> None:
        step = computed.metadata
        assert isinstance(step, PagedAttentionStep)
        columns = (step.rows.tolist(), step.query_start_loc.tolist())
        self.seen.append((len(computed.token_ids), *columns))

    def _run_followed(self, size: int) -> None:
        token_ids, _, step = self._followed.inputs(size)
        assert (step.slot_mapping == -1).all() and step.prefill is not None and (step.prefill.tiles == -1).all()
        self.seen.append((len(token_ids), step.rows.tolist(), step.query_start_loc.tolist()))


def test_graphs_behind_steps_are_captured_with_columns_of_padding(shallow_llama: CausalLM) -> None:
    """All shapes share their columns: those of another one would name rows that there are not."""
    SeesPadding.seen.clear()
    on_device(
        lambda: drafting_gpu_runner(shallow_llama, small_model(shallow_llama, "auto"), (1, 2, 4), "auto", SeesPadding),
        "cpu",
    )
    # Both what follows decodes and what catches up.
    assert {4, 8, 64} < {num_tokens for num_tokens, *_ in SeesPadding.seen}
    for num_tokens, rows, starts in SeesPadding.seen:
        assert set(rows) == {NUM_ROWS} and starts == sorted(starts) and starts[-1] <= num_tokens


# `test_deferred_steps` covers most of it without kernels.
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_a_gpus_rows_catch_up_with_steps_that_had_no_drafts(
    shallow_llama: CausalLM, device: str, request: pytest.FixtureRequest
) -> None:
    """All is settled behind steps that were not followed, by few tokens of a row and by many."""
    model: CausalLM = shallow_llama if device == "cpu" else request.getfixturevalue("llama_on_gpu")
    twin: CausalLM = shallow_llama if device == "cpu" else request.getfixturevalue("llama")
    jobs = [job(0, 21), job(1, 21, **OPTIONS["temperature"])]
    expected = plain_answers(lambda: plain_runner(twin), jobs)
    # Of both rows: steps that are deferred behind the prompts, drafts, one that must be followed.
    numbers = iter([0] * 2 * 9 + [2, 0, 2, 1] + [0] * 2 * 2 + [3] * 100)

    def check() -> None:
        runner = gpu_runner(model, model, (1, 2), window=16)
        recording, results = Recording(runner), list[StepResult]()
        found = run(recording, jobs, lambda: next(numbers), on_result=results.append)
        assert_same(found, expected)
        pairs = zip(results, recording.most, strict=True)
        assert [result.counts.tolist() or [1] * len(most) for result, most in pairs] == recording.most
        if device == "cpu":
            # Steps that were drafted for and the one behind drafts, not the nine and the one.
            followed = [2 * [1] != most for most in recording.most[1:]]
            assert followed_from_graphs(runner) <= sum(followed) + 1
            # The step with the prompts, and each time rows caught up.
            assert followed_from_graphs(runner, "followed") >= 3

    on_device(check, device)


def test_drafted_rows_are_those_with_more_than_their_last_token() -> None:
    entries = [
        Entry(2, 7, None, (2,), 3, num_drafts=2),
        Entry(0, 5, None, (0,), 4),
        Entry(1, 9, None, (1,), 6, num_drafts=4),
        Entry(3, 0, [4, 5, 6], (3,)),
    ]
    drafted = DraftedRows.of(step(entries, [admission(3, prompt_ids=id_bytes(4, 5, 6))]))
    assert drafted is not None
    assert [column.tolist() for column in drafted] == [[2, 1], [2, 4], [7, 9], [3, 6]]
    assert DraftedRows.of(step(entries[1:2])) is None


def test_a_runner_without_drafts_makes_none(llama: CausalLM) -> None:
    """A worker without a drafter has no rows' drafts at all."""
    assert make_runner(llama, llama.num_layers, llama.num_kv_heads, llama.head_dim).speculation is None


def test_jobs_of_one_row_are_drafted_for_alone(llama: CausalLM) -> None:
    only = [Job(0, [5, 6, 7], 17, {"seed": 1})]
    assert_same(
        run(cpu_runner(llama, llama), only, lambda: NUM_DRAFTS), plain_answers(lambda: plain_runner(llama), only)
    )
