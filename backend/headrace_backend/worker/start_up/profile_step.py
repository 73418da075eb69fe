"""Runs the largest steps there can be with the real weights, to see how much memory a step needs.

Owns which steps those are and the arithmetic on the allocator's answers. The steps go through the
same runner as any others, over a cache of a few blocks; runner and cache are dropped afterwards.
What is measured is everything but weights and cache: the runner's own tensors, the activations, the
sampler's copies of the logits, and the libraries' memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from headrace_backend.step.plan import StepPlan
from headrace_backend.worker.start_up.device_memory import DeviceMemory
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.start_up.synthetic_steps import (
    BlockPool,
    Chunk,
    SamplingKind,
    drafted_step,
    make_step,
    release_step,
)
from headrace_backend.worker.step.runner import Runner, run_steps

# Blocks of the cache that the profile runs with.
PROFILE_BLOCKS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """What the steps took, in bytes."""

    # What was reserved before: the weights.
    weights: int
    # The most that steps need beyond weights and cache.
    activations: int
    # Free on the device when all but the weights was given back.
    free: int


def largest_steps(sizes: WorkerSizes, pool: BlockPool) -> Iterator[StepPlan]:
    """Yields steps that no planned step exceeds, but for what it sees of a context.

    One has the whole token budget over all rows with every sampling option. Where tokens are
    drafted, one draws as many as a step may. Of several ranks one has rows that are dealt out to
    them, for which NCCL takes memory of its own.
    """
    budget, num_rows, longest = sizes.max_num_batched_tokens, sizes.max_rows, sizes.max_model_len
    share, rest = divmod(budget, num_rows)
    counts = [min(share + (row < rest), longest) for row in range(num_rows)]
    yield make_step([Chunk(0, count) for count in counts], pool, SamplingKind.EVERYTHING)
    yield release_step(num_rows)
    if sizes.num_ranks > 1:
        yield make_step([Chunk(0, 1)] * num_rows, pool, SamplingKind.RANDOM)
        yield release_step(num_rows)
    if sizes.num_drafts and longest > 1 + sizes.num_drafts:
        prompts = make_step([Chunk(0, 1)] * num_rows, pool, SamplingKind.EVERYTHING)
        yield prompts
        yield drafted_step(prompts, min(sizes.num_drafts, budget // num_rows - 1))
        yield release_step(num_rows)


def deepest_steps(sizes: WorkerSizes, pool: BlockPool) -> Iterator[StepPlan]:
    """Yields a step of the whole token budget at the end of the longest context."""
    longest = sizes.max_model_len
    count = min(sizes.max_num_batched_tokens, longest)
    yield make_step([Chunk(longest - count, count)], pool, SamplingKind.RANDOM)
    yield release_step(1)


def measure_steps(
    memory: DeviceMemory,
    make_runner: Callable[[], tuple[Runner, int]],
    plans: Sequence[StepPlan],
    on_step: Callable[[int], None],
    look: Callable[[Runner], None] = lambda _: None,
) -> Profile:
    """Runs the plans with a runner of their own and says what they took.

    Args:
        memory: Memory of the device that the weights, and nothing else of ours, lie on.
        make_runner: Makes the runner and its cache; gives it with the cache's bytes.
        plans: The steps.
        on_step: Called after each step, as `runner.run_steps` does.
        look: Called with the runner before it is dropped; what it runs is measured too.
    """
    memory.release()
    weights = memory.reserved()
    memory.reset_peak()
    runner, cache_bytes = make_runner()
    run_steps(runner, plans, on_step)
    look(runner)
    del runner
    peak = memory.peak_reserved()
    memory.release()
    return Profile(weights, max(peak - weights - cache_bytes, 0), memory.free())
