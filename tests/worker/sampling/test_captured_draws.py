"""Captured steps: what is replayed, what is launched between, and that no draw waits for a rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.checkpoints import ignore_progress, write_checkpoint
from tests.support.model_builds import load_model
from tests.support.rank_threads import ThreadCollectives, ThreadGroup, on_ranks
from tests.worker.driver import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    NUM_ROWS,
    Entry,
    admission,
    execute,
    id_bytes,
    step,
)
from tests.worker.recorded_graphs import RecordedGraphs
from tests.worker.step.test_gpu_runner import PROMPTS, cpu_runner, plans_with_options
from torch.utils._python_dispatch import TorchDispatchMode

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.step.buffers import StepLimits
from headrace_backend.worker.step.gpu_runner import GpuRunner
from headrace_backend.worker.step.kv_caches import allocate_kv_caches
from headrace_backend.worker.step.shape import AttentionSizes, captured_shapes
from headrace_kernels.triton_runtime import INTERPRETED, forced
from headrace_model_folder import ModelFolder

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
CPU = torch.device("cpu")


def captured_runner(
    model: CausalLM, graphs: RecordedGraphs, sizes: tuple[int, int] = (8, 128), window: int | None = None
) -> GpuRunner:
    """`sizes`: of the captured decode steps and of the mixed ones."""
    caches = allocate_kv_caches(
        model.num_layers, (NUM_BLOCKS, 2, model.num_kv_heads, BLOCK_SIZE, model.head_dim), torch.float32, CPU
    )
    attention = AttentionSizes.of(model.num_heads, caches[0])
    shapes = captured_shapes(sizes[:1], sizes[1:], NUM_ROWS, attention)
    limits = StepLimits(NUM_ROWS, 128, MAX_MODEL_LEN, window)
    runner = GpuRunner(model, Sampler(NUM_ROWS, model.vocab_size, CPU), caches, limits, attention, shapes)
    runner._graphs = graphs  # type: ignore[assignment]
    runner.capture(ignore_progress)
    return runner


@pytest.fixture
def on_kernels() -> Iterator[None]:
    with forced():
        yield


def drawn(results: list[StepResult]) -> list[tuple[list[int], list[int]]]:
    return [(result.tokens.tolist(), result.logprob_ranks.tolist()) for result in results]


def test_rows_with_options_leave_every_step_on_its_graphs(shallow_llama: CausalLM, on_kernels: None) -> None:
    graphs = RecordedGraphs()
    runner, twin = captured_runner(shallow_llama, graphs), cpu_runner(shallow_llama)
    for plan in plans_with_options():
        graphs.replayed.clear()
        result = execute(runner, plan)
        assert graphs.replayed == ["FORWARD", "DRAW"]
        assert drawn([result]) == drawn([execute(twin, plan)])


class Operations(TorchDispatchMode):
    """Notes what is launched outside of graphs."""

    def __init__(self, graphs: RecordedGraphs) -> None:
        super().__init__()
        self._graphs = graphs
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and not self._graphs.is_replaying:
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_steps_without_options_launch_nothing_beside_their_graphs(shallow_llama: CausalLM, on_kernels: None) -> None:
    graphs = RecordedGraphs()
    runner = captured_runner(shallow_llama, graphs)
    rows = [admission(row, temperature=0.5 * row) for row in range(3)]
    tables = {row: [row * 8 + i for i in range(8)] for row in range(3)}
    execute(runner, step([Entry(row, 0, PROMPTS[row], (row,)) for row in range(3)], rows, tables))
    plan = step([Entry(row, len(PROMPTS[row]), None, (row,), 1) for row in range(3)], step_id=2)
    hidden = runner.forward(plan)
    with torch.inference_mode(), Operations(graphs) as operations:
        runner.sample(plan, hidden)
    assert operations.names == []
    assert graphs.replayed[-2:] == ["FORWARD", "DRAW"]


def test_more_hidden_states_than_rows_are_checked_where_windows_are_short(
    shallow_llama: CausalLM, on_kernels: None
) -> None:
    """One hidden state in four is checked.

    What the model's layers see does not matter to the runner.
    """
    graphs = RecordedGraphs()
    runner = captured_runner(shallow_llama, graphs, window=4)
    plan = step([Entry(0, 0, [5] * 60)], [admission(0)], {0: list(range(8))})
    plan.forward.checked_indices = plan.forward.checked_indices[0] - 4 * torch.arange(15).int().numpy()
    assert plan.forward.checked_indices.size > NUM_ROWS
    assert execute(runner, plan).checked_ok.tolist() == [1] * 15
    # It fits no captured shape, whose samples are one for each row.
    assert graphs.replayed == []


class TakingTurns(ThreadCollectives):
    """A rank that computes only while no other one does: the interpreter bears no two at once."""

    def __init__(self, group: ThreadGroup, rank: int, turn: threading.Lock) -> None:
        super().__init__(group, rank)
        self._turn = turn

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        self._turn.release()
        try:
            return super().all_gather(part)
        finally:
            self._turn.acquire()


# Ranks put logits together and deal rows out in tests/parallel, draws are captured in the other
# tests here.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_logprobs", "shape", "pieces", "calls_a_step"),
    [
        (2, (4, 16), ["FORWARD", "DRAW"], 1),
        # Logits and tokens; the share of a padded step, and of one that fits no shape.
        (-1, (4, 16), ["FORWARD", "SHARE_DRAW"], 2),
        (-1, (1, 2), [], 2),
    ],
)
def test_ranks_meet_for_a_draw_outside_of_graphs(
    tmp_path: Any,
    on_kernels: None,
    num_logprobs: int,
    shape: tuple[int, int],
    pieces: list[str],
    calls_a_step: int,
) -> None:
    """A group's captured draws send nothing, and every rank draws what one alone does."""
    write_checkpoint(tmp_path, "llama-mha")
    folder = ModelFolder.open(tmp_path)
    turn = threading.Lock()

    def load(shard: Shard) -> CausalLM:
        return load_model(folder, folder.config, torch.float32, CPU, "folder", 0, ignore_progress, shard=shard)

    def plans() -> list[StepPlan]:
        """Three short prompts, one of which wants its logits changed, and a token of each."""
        bias = {"logit_bias_ids": id_bytes(4), "logit_bias_values": np.float32(6).tobytes()}
        history = {"prompt_ids": id_bytes(5, 6, 7), "output_ids": id_bytes()}
        changed = admission(1, repetition_penalty=1.3, num_logprobs=num_logprobs, **bias, **history)
        rows = [admission(0, temperature=0.8), changed, admission(2)]
        first = [Entry(0, 0, [3, 4], (0,)), Entry(1, 0, [5, 6, 7], (1,)), Entry(2, 0, [8], (2,))]
        second = [Entry(row, length, None, (row,), 1) for row, length in enumerate((2, 3, 1))]
        return [step(first, rows, {0: [0], 1: [1], 2: [2]}), step(second, step_id=2)]

    def body(shard: Shard) -> tuple[list[StepResult], RecordedGraphs, int]:
        assert isinstance(shard.collectives, ThreadCollectives)
        together = TakingTurns(shard.collectives._group, shard.rank, turn)
        with turn:
            model = load(Shard(shard.rank, shard.world_size, together))
            graphs = RecordedGraphs(lambda: together.num_calls)
            runner = captured_runner(model, graphs, shape)
            before = together.num_calls - graphs.calls["FORWARD"]
            results = [execute(runner, plan) for plan in plans()]
            num_calls = together.num_calls - graphs.calls["FORWARD"] - before
        return results, graphs, num_calls

    alone = cpu_runner(load(ALONE))
    expected = drawn([execute(alone, plan) for plan in plans()])
    for results, graphs, num_calls in on_ranks(2, body):
        assert drawn(results) == expected
        assert graphs.calls["FORWARD"] > 0 and graphs.calls["DRAW"] == graphs.calls["SHARE_DRAW"] == 0
        assert graphs.replayed == pieces * 2
        if pieces:
            # Beside what forward passes add up.
            assert num_calls == 2 * calls_a_step
