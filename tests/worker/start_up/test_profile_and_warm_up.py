"""The steps that start-up makes up.

Within every limit, runnable by any runner, gone without a trace; and what is concluded from the
memory they take.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_backend import device_defaults
from headrace_backend.config import EngineConfig
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.parallel.collectives import Collectives
from headrace_backend.step.masks import StepMasks
from headrace_backend.step.messages import LoadProgress, MemoryPlan
from headrace_backend.step.plan import MAX_PROMPT_LOGPROBS, StepPlan
from headrace_backend.weights.placement import Shard
from headrace_backend.worker.errors import DoesNotFit, StartRefused
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.start_up import fitted_runner
from headrace_backend.worker.start_up.drafters import gpu_speculation
from headrace_backend.worker.start_up.fitted_runner import Phases, make_runner
from headrace_backend.worker.start_up.memory_plan import ModelMemory, Room
from headrace_backend.worker.start_up.profile_step import deepest_steps, largest_steps, measure_steps
from headrace_backend.worker.start_up.ranks import RankPlace
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.start_up.synthetic_steps import BlockPool, Chunk, SamplingKind, make_step, next_step
from headrace_backend.worker.start_up.warm_up import gpu_steps, short_steps, warm_up
from headrace_backend.worker.step.buffers import DeviceRows, StepLimits
from headrace_backend.worker.step.gpu_runner import GpuRunner
from headrace_backend.worker.step.kv_caches import allocate_kv_caches, cache_bytes, kv_type
from headrace_backend.worker.step.runner import Runner, run_steps
from headrace_backend.worker.step.shape import AttentionSizes, captured_shapes
from headrace_kernels import triton_runtime
from headrace_kernels.attention.quantized_kv import dequantized_blocks, scales_of, tiles_of
from headrace_kernels.linear.quantized import WARM_ROWS

GIB = 1 << 30
# Of a captured step's activations, for each token of the fake model.
GRAPH_TOKEN = 4 << 20


def config_of(**values: object) -> EngineConfig:
    return EngineConfig.model_validate({"model": "model", "device": "cpu", **values})


def check_limits(plans: list[StepPlan], config: EngineConfig, max_model_len: int, pool: BlockPool) -> None:
    """What a runner may take for granted, over the whole sequence of plans."""
    taken: set[int] = set()
    tables = np.zeros((config.max_num_seqs, -(-max_model_len // config.block_size)), np.int32)
    for plan in plans:
        taken -= set(plan.released_rows.tolist())
        admitted = [admission.row for admission in plan.admissions]
        assert not taken & set(admitted)
        taken |= set(admitted)
        forward = plan.forward
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert set(forward.rows.tolist()) <= taken <= set(range(config.max_num_seqs))
        offset = 0
        for row, start, count in zip(forward.table_rows, forward.table_starts, forward.table_counts, strict=True):
            tables[row, start : start + count] = forward.table_blocks[offset : offset + count]
            offset += count
        assert offset == forward.table_blocks.size
        ends = forward.starts + forward.counts
        assert (forward.counts > 0).all() and (forward.starts >= 0).all() and (ends <= max_model_len).all()
        assert (tables >= 0).all() and (tables < pool.num_blocks).all()
        assert forward.token_ids.size == forward.known_counts.sum()
        assert (plan.sample.token_indices < plan.num_tokens).all()
        assert set(plan.sample.rows.tolist()) <= taken
        reported = plan.prompt_logprobs
        assert (reported.first_indices + reported.counts <= plan.num_tokens).all() and (reported.counts > 0).all()
        assert reported.token_ids.size == reported.counts.sum() <= MAX_PROMPT_LOGPROBS
        assert StepPlan.decode(plan.encode()).encode() == plan.encode()
    assert not taken, "rows are still taken"


@given(
    rows=st.integers(1, 70),
    tokens=st.integers(16, 300),
    length=st.integers(1, 700),
    num_blocks=st.integers(1, 64),
    block_size=st.sampled_from([16, 32]),
)
def test_synthetic_steps_stay_within_all_limits(
    rows: int, tokens: int, length: int, num_blocks: int, block_size: int
) -> None:
    config = config_of(max_num_seqs=rows, max_num_batched_tokens=tokens, block_size=block_size)
    pool = BlockPool(num_blocks, block_size)
    largest, for_gpu = (
        [*largest_steps(WorkerSizes.of(config, length), pool), *deepest_steps(WorkerSizes.of(config, length), pool)],
        list(gpu_steps(WorkerSizes.of(config, length), pool)),
    )
    for plans in (largest, for_gpu, list(short_steps(WorkerSizes.of(config, length), pool))):
        check_limits(plans, config, length, pool)
    # No step there can be is larger.
    assert max(plan.prompt_logprobs.token_ids.size for plan in largest) == min(
        largest[0].num_tokens, MAX_PROMPT_LOGPROBS
    )
    assert max(plan.num_tokens for plan in largest) == min(tokens, min(rows, tokens) * length)
    assert max(plan.sample.rows.size for plan in largest) == min(rows, tokens)
    assert max(int((plan.forward.starts + plan.forward.counts).max(initial=0)) for plan in largest) == length
    assert {plan.sample.rows.size for plan in for_gpu} >= {1, min(rows, tokens)}
    # Every way of multiplying by few bits that some step may take.
    most = min(tokens, min(rows, tokens) * length, max(WARM_ROWS))
    assert {plan.num_tokens for plan in for_gpu} >= {most, *(count for count in WARM_ROWS if count <= most)}
    # Of an output layer of few bits: rows that draw, or report a prompt.
    heads = {plan.sample.rows.size for plan in for_gpu} | {plan.prompt_logprobs.token_ids.size for plan in for_gpu}
    assert heads >= {count for count in WARM_ROWS if count <= most}


def test_a_second_token_needs_room_in_the_block() -> None:
    pool = BlockPool(4, 16)
    assert next_step(make_step([Chunk(0, 15)], pool, SamplingKind.GREEDY), pool).forward.starts.tolist() == [15]
    with pytest.raises(AssertionError, match="begins a block"):
        next_step(make_step([Chunk(0, 16)], pool, SamplingKind.GREEDY), pool)


def runner_of(llama: CausalLM, config: EngineConfig, num_blocks: int) -> tuple[Runner, list[torch.Tensor]]:
    shape = (num_blocks, 2, llama.num_kv_heads, config.block_size, llama.head_dim)
    dtype = kv_type(config.kv_dtype, torch.float32)
    kv_caches = allocate_kv_caches(llama.num_layers, shape, dtype, torch.device("cpu"))
    return make_runner(llama, WorkerSizes.of(config, 256), kv_caches), kv_caches


def test_a_runner_takes_them_all_and_is_as_new_afterwards(llama: CausalLM) -> None:
    config = config_of(max_num_seqs=6, max_num_batched_tokens=80)
    runner, kv_caches = runner_of(llama, config, 12)
    pool = BlockPool(12, config.block_size)
    seen: list[int] = []
    sizes = WorkerSizes.of(config, 256)
    plans = [*gpu_steps(sizes, pool), *largest_steps(sizes, pool), *deepest_steps(sizes, pool)]
    run_steps(runner, plans, seen.append)
    assert seen == list(range(len(plans) + 1))
    assert all(cache.isfinite().all() for cache in kv_caches) and any(cache.any() for cache in kv_caches)
    progress: list[tuple[object, ...]] = []
    warm_up(runner, llama, kv_caches, WorkerSizes.of(config, 256), lambda *report: progress.append(report))
    assert not any(cache.any() for cache in kv_caches)
    assert progress[0][:2] == ("warm_up", 0) and progress[-1][1] == progress[-1][2]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_what_warm_up_wrote_to_a_quantized_cache_is_gone_scales_included(llama: CausalLM, kv_dtype: str) -> None:
    config = config_of(max_num_seqs=6, max_num_batched_tokens=80, kv_dtype=kv_dtype)
    runner, kv_caches = runner_of(llama, config, 12)
    run_steps(runner, list(gpu_steps(WorkerSizes.of(config, 256), BlockPool(12, config.block_size))), lambda done: None)
    assert all(tiles_of(cache).any() and scales_of(cache).isfinite().all() for cache in kv_caches)
    warm_up(runner, llama, kv_caches, WorkerSizes.of(config, 256), lambda *report: None)
    assert not any(tiles_of(cache).any() for cache in kv_caches)
    # What a profile counts as the cache, and a plan plans.
    block = 2 * llama.num_kv_heads * config.block_size * (llama.head_dim + 4)
    assert cache_bytes(kv_caches) == llama.num_layers * 12 * block


class FakeMemory:
    """A card whose allocator keeps what it took until `release`. Sizes only."""

    def __init__(self, total: int, weights: int, other: int) -> None:
        self._total, self.held, self.other, self._kept, self._peak = total, weights, other, 0, 0

    def take(self, num_bytes: int) -> None:
        """Tensors that are there to stay."""
        self.held += num_bytes
        self._peak = max(self._peak, self.reserved())

    def use(self, num_bytes: int) -> None:
        """Tensors that come and go."""
        self._kept = max(self._kept, num_bytes)
        self._peak = max(self._peak, self.reserved())

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._total - self.reserved() - self.other

    def allocated(self) -> int:
        return self.held

    def reserved(self) -> int:
        return self.held + self._kept

    def peak_reserved(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self.reserved()

    def release(self) -> None:
        self._kept = 0


class SizedRunner:
    """Takes memory as a runner would, and computes nothing."""

    def __init__(self, memory: FakeMemory, own: int, step: int, graphs: int = 0) -> None:
        self._memory, self._own, self._step, self._graphs = memory, own, step, graphs
        self.num_captured = 0
        self.captured_mixed_sizes = (16, 32)
        self.drafted_graphs: tuple[tuple[int, float], ...] = ()
        memory.take(own)

    def forward(self, plan: StepPlan) -> torch.Tensor:
        self._memory.use(self._step)
        return torch.empty(0)

    def sample(self, plan: StepPlan, hidden: torch.Tensor, masks: StepMasks | None = None) -> None:
        return None

    def capture(self, progress: object) -> None:
        self._memory.other += self._graphs
        self.num_captured = 3

    def close(self) -> None:
        self._memory.held -= self._own
        self._memory.other -= self._graphs if self.num_captured else 0

    def __del__(self) -> None:
        self.close()


def test_a_profile_counts_all_but_weights_and_cache() -> None:
    memory = FakeMemory(100 * GIB, weights=15 * GIB, other=GIB)
    memory.use(3 * GIB)  # left over from loading

    def make() -> tuple[SizedRunner, int]:
        memory.take(2 * GIB)
        return SizedRunner(memory, GIB, step=4 * GIB), 2 * GIB

    config = config_of(max_num_seqs=2, max_num_batched_tokens=16)
    plans = list(largest_steps(WorkerSizes.of(config, 64), BlockPool(4, 16)))
    profile = measure_steps(memory, make, plans, lambda done: None)
    memory.held -= 2 * GIB  # the cache
    assert profile.weights == 15 * GIB
    assert profile.activations == GIB + 4 * GIB
    assert memory.held == 15 * GIB, "the runner was not dropped"


class Fellow(Collectives):
    """One of two ranks, whose peer answers alike but for the first question (the reserve)."""

    rank, world_size, device = 0, 2, torch.device("cpu")

    def __init__(self, reserve_bytes: int) -> None:
        self._answers = iter([reserve_bytes])

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack([part, torch.full_like(part, next(self._answers, int(part[0])))])


def start(
    monkeypatch: pytest.MonkeyPatch,
    llama: CausalLM,
    graphs: list[int],
    place: RankPlace = RankPlace(),  # noqa: B008  # immutable
    long_sizes: list[tuple[int, ...]] | None = None,
    **values: object,
) -> tuple[Runner, MemoryPlan, FakeMemory, dict[str, float], list[LoadProgress]]:
    """Fits a cache beside the fake card's tenants.

    `graphs`: what the captures of each runner in turn take; of the profile's, nothing.
    `long_sizes`: gets the long steps that each is to capture.
    """
    memory = FakeMemory(80 * GIB, weights=15 * GIB, other=GIB)
    taken = iter([0, *graphs])

    def sized_runner(
        model: object, sizes: WorkerSizes, kv_caches: object, long: tuple[int, ...] = (), draft: object = None
    ) -> SizedRunner:
        if long_sizes is not None:
            long_sizes.append(long)
        return SizedRunner(memory, GIB, step=4 * GIB, graphs=next(taken))

    monkeypatch.setattr(fitted_runner, "make_runner", sized_runner)
    config = config_of(**{"max_num_seqs": 4, "max_num_batched_tokens": 32, **values})
    model = fitted_runner.LoadedModel(llama, WorkerSizes.of(config, 64), torch.float32, torch.device("cpu"), place)
    # Caches are not taken from the fake card: their blocks are as large as the arithmetic below
    # wants them.
    monkeypatch.setattr(fitted_runner.LoadedModel, "kv_caches", lambda *sizes: [torch.zeros(1, 2, 1, 0, 1)])
    sizes = {"activations": 9 * GIB, "kv_block": GIB // 4, "graphs": GIB, "graph_token": GRAPH_TOKEN}
    estimate = ModelMemory(weights=14 * GIB, **sizes)
    room = Room(torch.device("cuda", 0), 79 * GIB, 80 * GIB)
    channel, timer = FakeChannel(), Phases({})
    runner, plan = fitted_runner.fitted_runner(model, estimate, room, memory, channel, timer)  # type: ignore[arg-type]
    return runner, plan, memory, timer.seconds, channel.progress


class FakeChannel:
    def __init__(self) -> None:
        self.progress: list[LoadProgress] = []

    def send_progress(self, phase: str, done: int, total: int, unit: str, detail: str = "") -> None:
        self.progress.append(LoadProgress(phase, done, total, unit, detail))


def test_the_cache_gets_what_was_measured_to_be_left(monkeypatch: pytest.MonkeyPatch, llama: CausalLM) -> None:
    runner, plan, memory, phases, progress = start(monkeypatch, llama, [GIB // 2])
    assert isinstance(runner, SizedRunner) and runner.num_captured == 3
    assert plan.is_measured and plan.graph_bytes == GIB // 2
    # Free from the start: 79 GiB, less weights, runner and step, estimated graphs and the reserve.
    # Of the rest, whole blocks of a quarter GiB.
    reserve = int(0.0075 * 80 * GIB)
    assert plan.reserve_bytes == reserve
    assert plan.kv_cache_bytes == (79 - 15 - 5 - 1) * GIB - GIB // 4 * -(-reserve // (GIB // 4))
    assert (plan.weight_bytes, plan.activation_bytes, plan.other_bytes) == (15 * GIB, 5 * GIB, 0)
    assert plan.num_blocks * plan.kv_block_bytes == plan.kv_cache_bytes
    assert list(phases) == ["profile", "cache", "warm_up", "graphs"]
    assert [step.phase for step in progress if step.done == step.total] == ["profile", "cache", "warm_up"]
    measured = plan.device_bytes - plan.weight_bytes - plan.graph_bytes - plan.activation_bytes
    # A quarter GiB is a coarse block: a real model's has 2 MiB.
    assert plan.kv_cache_bytes / measured > 0.95


def test_graphs_larger_than_estimated_are_captured_again_beside_a_smaller_cache(
    monkeypatch: pytest.MonkeyPatch, llama: CausalLM
) -> None:
    first = start(monkeypatch, llama, [GIB // 2])[1]
    runner, plan, memory, phases, _ = start(monkeypatch, llama, [3 * GIB, 3 * GIB])
    assert plan.graph_bytes == 3 * GIB and plan.kv_cache_bytes == first.kv_cache_bytes - 2 * GIB
    assert memory.held == 15 * GIB + GIB and memory.other == GIB + 3 * GIB, "the first runner was not dropped"
    assert isinstance(runner, SizedRunner)


def test_long_steps_that_are_worth_a_graph_are_in_the_plan_and_captured(
    monkeypatch: pytest.MonkeyPatch, llama: CausalLM
) -> None:
    long_sizes: list[tuple[int, ...]] = []

    def shares(longest: int) -> MemoryPlan:
        monkeypatch.setattr(fitted_runner, "host_share", lambda runner, size, *_: 0.9 if size <= longest else 0.1)
        about = (monkeypatch, llama, [0], RankPlace(), long_sizes)
        return start(*about, max_num_seqs=16, max_num_batched_tokens=1024)[1]

    none, some = shares(0), shares(896)
    # The profile's runner captures nothing, the other what was found.
    assert long_sizes == [(), (), (), (896,)]
    # As the fake estimate has it, for each token beyond the largest that is always captured, and
    # the driver's own.
    more = (896 - 768) * GRAPH_TOKEN + (10 << 20)
    assert 0 < more - GIB // 4 < none.kv_cache_bytes - some.kv_cache_bytes < more + GIB // 4


def test_long_steps_are_not_captured_where_that_would_refuse_the_start(
    monkeypatch: pytest.MonkeyPatch, llama: CausalLM
) -> None:
    long_sizes: list[tuple[int, ...]] = []
    monkeypatch.setattr(fitted_runner, "host_share", lambda *_: 0.9)

    def plan(kv_memory: str) -> MemoryPlan:
        about = (monkeypatch, llama, [0], RankPlace(), long_sizes)
        return start(*about, max_num_seqs=16, max_num_batched_tokens=1024, kv_memory=kv_memory)[1]

    assert plan("50GiB").kv_cache_bytes == 50 * GIB and long_sizes.pop() == (896, 1024)
    # 15 of weights, 5 of a step, 1 of graphs, 0.6 of reserve, of 79 that are free: the long graphs'
    # one is too much.
    assert plan("57GiB").kv_cache_bytes == 57 * GIB and long_sizes.pop() == ()
    with pytest.raises(StartRefused):
        plan("58GiB")


def test_the_longest_steps_are_captured_where_that_leaves_nearly_all_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, llama: CausalLM
) -> None:
    long_sizes: list[tuple[int, ...]] = []
    monkeypatch.setattr(fitted_runner, "host_share", lambda *_: 0.9)
    every = device_defaults.long_graph_sizes(8192)

    def captured(graph_token: int) -> tuple[int, ...]:
        monkeypatch.setitem(globals(), "GRAPH_TOKEN", graph_token)
        about = (monkeypatch, llama, [0], RankPlace(), long_sizes)
        start(*about, max_num_seqs=256, max_num_batched_tokens=8192)
        return long_sizes.pop()

    # Of 57 GiB of cache 7,424 tokens take 0.9 and 7.3.
    assert captured(GIB // 8192) == (*every, 8192)
    assert captured(GIB // 1024) == tuple(size for size in every if size <= 3072)


def test_ranks_whose_reserves_differ_capture_again_together(monkeypatch: pytest.MonkeyPatch, llama: CausalLM) -> None:
    # More than was estimated, by less than half of this card's reserve and more than half of the
    # other's.
    graphs = [GIB + GIB // 5] * 2
    alike, other = (RankPlace(Shard(0, 2, Fellow(reserve))) for reserve in (80 * GIB, 256 << 20))
    alone = start(monkeypatch, llama, graphs)[1]
    assert start(monkeypatch, llama, graphs, alike)[1] == alone
    assert start(monkeypatch, llama, graphs, other)[1].num_blocks == alone.num_blocks - 1


def test_graphs_that_grow_with_every_capture_are_refused(monkeypatch: pytest.MonkeyPatch, llama: CausalLM) -> None:
    with pytest.raises(DoesNotFit, match="graph_sizes off"):
        start(monkeypatch, llama, [3 * GIB, 9 * GIB])


def test_a_cache_that_no_longer_fits_after_measuring_is_refused_with_what_does(
    monkeypatch: pytest.MonkeyPatch, llama: CausalLM
) -> None:
    with pytest.raises(StartRefused, match=r"activations 5,120.0 MiB .* kv_memory from 268435456 .* to \d+ fits"):
        start(monkeypatch, llama, [0], kv_memory="60GiB")
    assert start(monkeypatch, llama, [0], kv_memory="50GiB")[1].kv_cache_bytes == 50 * GIB


# The same steps by a CPU's runner are above; such a runner's own are in
# tests/worker/step/test_gpu_runner and speculation/test_gpu_verification.
@pytest.mark.slow
@pytest.mark.skipif(not triton_runtime.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    ("kv_dtype", "speculate"),
    [("int8", "ngram"), ("int8", "off"), ("auto", "off"), ("fp8", "off")],
)
def test_the_gpus_runner_takes_them_all(
    shallow_llama: CausalLM, kv_dtype: str, speculate: Literal["off", "ngram"]
) -> None:
    drafts = {} if speculate == "off" else {"speculate": speculate, "speculate_tokens": "3"}
    config = config_of(max_num_seqs=3, max_num_batched_tokens=17, kv_dtype=kv_dtype, **drafts)
    worker_sizes = WorkerSizes.of(config, 40)
    tokens_per_row = worker_sizes.tokens_per_row
    pool = BlockPool(6, config.block_size)
    shape = (6, 2, shallow_llama.num_kv_heads, config.block_size, shallow_llama.head_dim)
    dtype = kv_type(kv_dtype, torch.float32)
    kv_caches = allocate_kv_caches(shallow_llama.num_layers, shape, dtype, torch.device("cpu"))
    with triton_runtime.forced():
        limits, sizes = (
            StepLimits(3, 17, 40, tokens_per_row=tokens_per_row),
            AttentionSizes.of(shallow_llama.num_heads, kv_caches[0], shallow_llama.dtype, tokens_per_row),
        )
        sampler = Sampler(3, shallow_llama.vocab_size, torch.device("cpu"))
        rows = DeviceRows(limits.max_num_seqs, -(-limits.max_model_len // config.block_size), 6, torch.device("cpu"))
        speculation = gpu_speculation(shallow_llama, worker_sizes, sampler, rows, None)
        shapes = captured_shapes((1, 2), (16,), 3, sizes)
        runner = GpuRunner(shallow_llama, sampler, kv_caches, limits, sizes, shapes, rows=rows, speculation=speculation)
        deepest = deepest_steps(worker_sizes, pool)
        warm = list(gpu_steps(worker_sizes, pool))
        # The last ones, from where no row is taken.
        first = next(number for number in range(len(warm) - 30, len(warm)) if warm[number - 1].released_rows.size)
        plans = [*largest_steps(worker_sizes, pool), *deepest, *warm[first:]]
        drafted = [plan for plan in plans if (plan.forward.known_counts < plan.forward.counts - 1).any()]
        assert bool(drafted) == (speculate != "off")
        run_steps(runner, plans, lambda done: None)
    assert all(dequantized_blocks(cache, torch.arange(6)).isfinite().all() for cache in kv_caches)
