"""An engine whose plans a worker's own runner computes, in one process and without a clock.

Between release and next use a block's contents must not matter to anybody, nor may a row's states
or those of a checkpoint. So before a step is computed, blocks that nobody held when it was planned
are filled with NaN, and so are states of rows that nobody had or that somebody takes, and of
checkpoints that nobody may find, which shows in every token that reads them.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from tests.engine.fake_worker import FakeWorker
from tests.engine.harness import Harness, Reader, config, request

from headrace_backend.cache_groups import CacheLayout, cache_layout
from headrace_backend.config import EngineConfig
from headrace_backend.engine.cache.block_pool import BlockPool
from headrace_backend.engine.request import EngineRequest, ModelLimits
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_backend.worker.start_up.fitted_runner import LoadedModel, make_runner
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.step.drafting_model import DraftingModel
from headrace_backend.worker.step.row_states import block_caches, holds_states
from headrace_backend.worker.step.runner import CapturesGraphs, Runner
from headrace_kernels.attention.quantized_kv import is_quantized, tiles_of
from headrace_model_folder import ModelConfig


def layout_of(model: ModelConfig, max_model_len: int = 0) -> CacheLayout:
    """The cache groups that a model has by itself."""
    return cache_layout(EngineConfig(model=pathlib.Path("model"), max_model_len=max_model_len), model)


def worker_runner(model: CausalLM, layout: CacheLayout, num_blocks: int, **settings: Any) -> Runner:
    """The runner that start-up makes over a cache of so many blocks; a rank's or a stage's too."""
    sizes = WorkerSizes.of(config(**settings), 256, cache=layout)
    device = next(model.parameters()).device
    return make_runner(model, sizes, LoadedModel(model, sizes, torch.float32, device).kv_caches(num_blocks))


def greedy(prompt: list[int], max_tokens: int, **changes: Any) -> EngineRequest:
    """A request for the most likely tokens."""
    return request(prompt, max_tokens, **{"temperature": 0.0} | changes)


class RunnerWorker(FakeWorker):
    """Computes plans with a runner, in the order in which they are pushed."""

    def __init__(self, runner: Runner, caches: list[torch.Tensor]) -> None:
        self.runner = runner
        # Whose free blocks are filled with NaN; None: nobody's.
        self.pool: BlockPool | None = None
        # Returns the lines of states that nobody has now: of rows, and of checkpoints.
        self.lines: Callable[[], list[int]] = list
        self.caches = block_caches(caches)
        self.states = list(filter(holds_states, caches))
        self.plans: collections.deque[bytes] = collections.deque()
        # All plans so far.
        self.computed: list[bytes] = []
        # With each plan the blocks and the lines that were free when it was made.
        self.free: collections.deque[list[int]] = collections.deque()
        self.free_lines: collections.deque[list[int]] = collections.deque()

    def push(self, plan: StepPlan) -> None:
        self.plans.append(plan.encode())
        self.free.append(list(self.pool._free) if self.pool is not None else [])
        self.free_lines.append(self.lines() if self.pool is not None else [])

    def run(self) -> StepResult:
        free = self.free.popleft()
        for cache in self.caches if free else ():
            # Of a quantized cache the scales too.
            whole = tiles_of(cache) if is_quantized(cache) else cache
            whole[free] = -1 if is_quantized(cache) else torch.nan
        self.computed.append(self.plans.popleft())
        plan = StepPlan.decode(self.computed[-1])
        # A row that was given back may still be copied, by the step behind the one that shared it,
        # and so may a checkpoint that was given up when the step was planned.
        lines = sorted({*self.free_lines.popleft(), *(row.row for row in plan.admissions)})
        lines = [line for line in lines if line not in plan.forward.state_sources]
        for states in self.states if lines else ():
            states[lines] = torch.nan
        result = StepResult(plan.step_id, 0, 1000, np.empty(0, np.int32), np.empty(0, np.uint8))
        sampled = self.runner.sample(plan, self.runner.forward(plan))
        if sampled is not None:
            sampled.fill(result)
        assert result.ok.all() and result.checked_ok.all(), "a block is read that holds nothing"
        return StepResult.decode(result.encode())


class MakeRunner(Protocol):
    """Makes a runner over caches, and over what drafts if anything does."""

    def __call__(
        self, model: CausalLM, sizes: WorkerSizes, kv_caches: list[torch.Tensor], *, draft: DraftingModel | None
    ) -> Runner: ...


class EngineOnRunner(Harness):
    """Everything in one place; `step` is one turn of the server's loop."""

    token_bytes = None

    def __init__(
        self,
        model: CausalLM,
        layout: CacheLayout,
        num_blocks: int,
        model_len: int = 256,
        poison: bool = True,
        make: MakeRunner = make_runner,
        draft: CausalLM | None = None,
        **changes: Any,
    ) -> None:
        """Engine and runner of a model with these cache groups; other arguments are settings."""
        self.draft = draft
        self.model, self.layout, self.poison, self.model_len, self.make = model, layout, poison, model_len, make
        window = model.attention_window
        super().__init__(num_blocks, model_len, attention_window=window, groups=layout.groups, **changes)

    def model_limits(self, model_len: int, attention_window: int | None) -> ModelLimits:
        return ModelLimits(
            self.model.vocab_size,
            model_len,
            attention_window=attention_window,
            cache_groups=self.groups,
            keeps_states=any(self.model.state_elements()),
        )

    def new_worker(self) -> RunnerWorker:
        sizes = WorkerSizes.of(self.config, self.model_len, cache=self.layout)
        device = next(self.model.parameters()).device
        loaded = LoadedModel(self.model, sizes, self.model.dtype, device, draft=self.draft)
        caches = loaded.kv_caches(self.num_blocks, self.num_checkpoints)
        drafting = loaded.drafting_model(self.num_blocks)
        runner = self.make(self.model, sizes, caches, draft=drafting)
        if drafting is not None:
            caches = caches + drafting.kv_caches
        if isinstance(runner, CapturesGraphs):
            runner.capture(lambda *_: None)
        return RunnerWorker(runner, caches)

    def plan(self) -> bool:
        kv = self.engine._scheduler.kv
        assert kv is not None and isinstance(self.worker, RunnerWorker)
        self.worker.pool = kv.pool if self.poison else None
        self.worker.lines = self.free_lines
        return super().plan()

    def free_lines(self) -> list[int]:
        """Lines of rows that nobody has, and of checkpoints that nobody may find."""
        scheduler = self.engine._scheduler
        assert scheduler.kv is not None
        checkpoints, first = scheduler.kv._checkpoints, self.config.max_num_seqs + 1
        slots = [] if checkpoints is None else checkpoints.free_slots
        return [*scheduler.batch._free_rows, *(first + slot for slot in slots)]

    def outputs(self, requests: list[EngineRequest]) -> list[list[list[int]]]:
        """Tokens of each output of each of these requests, which arrive together."""
        return [[reader.tokens[index] for index in sorted(reader.tokens)] for reader in self.readers_of(requests)]

    def readers_of(self, requests: list[EngineRequest]) -> list[Reader]:
        """What readers of requests that arrive together have received at their ends."""
        readers = [self.add(asked) for asked in requests]
        while self.engine.has_work:
            self.checked_step()
        while self.worker.plans:
            self.settle()
        return readers
