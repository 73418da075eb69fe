"""Which long steps take the host so long to launch that a graph makes them shorter.

Owns the steps that are tried, how the host's part is measured, and the rule. Which sizes there are
to choose from says the configuration; graphs are the runner's.

A step of a few hundred tokens is always captured. The launches of longer ones are hidden behind the
products, unless products are short beside their number: a rank of four has a fourth of each product
of a 70B model, and launches as many as one that has all. Where the host is busy until nearly the
end of a step, padding it to a captured one costs nothing. What the host takes depends on the
machine and on its neighbours, too: it took 0.52 ms for a layer of 70B on one core of an H200's
host, and 0.97 on another in the same minute (2026-11-22), and of several ranks the slowest counts.
So theirs are captured up to the length at which the host has as much time again as it needs.

Where half of a step of the whole token budget is the host's, as it is of mixtures of experts, whose
products are short and many, such steps have a graph, too, which prompts that wait fill. Launching
16 prompts of 512 tokens of Qwen3-30B-A3B took three hosts 104 to 108 ms, of which their cards
needed some 63 (docs/experiments.md, "grouped GEMMs by the copy engine"), and the hosts of two ranks
120, of which theirs needed some 45.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from headrace_backend.worker.start_up.synthetic_steps import BlockPool, SamplingKind, make_step, prompts, release_step
from headrace_backend.worker.step.runner import Runner

# The host's part of a step's time from which on it is captured: of one rank, and of several.
_BOUND_ALONE, _BOUND_TOGETHER = 0.9, 0.5
# The same of full steps, to which nothing is padded.
_BOUND_FULL = 0.5
# The first round compiles what a size may need.
_ROUNDS = 2


def tried_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns which of the ascending sizes are measured.

    These are the first, each that is more than a third larger than the one before, and the last.
    """
    tried: list[int] = []
    for size in sizes:
        if not tried or 3 * size > 4 * tried[-1] or size == sizes[-1]:
            tried.append(size)
    return tuple(tried)


def launch_bound_sizes(
    sizes: Sequence[int], world_size: int, share_of: Callable[[int], float], full_size: int = 0
) -> tuple[int, ...]:
    """Returns the sizes to capture, from the first on without a gap, and then the full one.

    A step is padded to the next of those without a gap.

    Args:
        sizes: Tokens of steps, ascending.
        world_size: Number of ranks.
        full_size: Tokens of full steps, if they are longer than these; 0: they have no graph.
        share_of: Measures one size: the host's part of the step's time, on the rank where that is
            the most.
    """
    longest, share, bound = 0, 1.0, _BOUND_ALONE if world_size == 1 else _BOUND_TOGETHER
    for size in tried_sizes(sizes):
        share = share_of(size)
        if share < bound:
            break
        longest = size
    found = tuple(size for size in sizes if size <= longest)
    # The host has less of longer steps.
    may_be_full = sizes and full_size > sizes[-1] and share >= _BOUND_FULL
    if may_be_full and share_of(full_size) >= _BOUND_FULL:
        return (*found, full_size)
    return found


def host_share(
    runner: Runner, num_tokens: int, max_model_len: int, vocab_size: int, pool: BlockPool, wait: Callable[[], None]
) -> float:
    """The part of a step's time for which the host is busy launching it, by the shortest of each.

    Args:
        runner: Launches it kernel by kernel.
        num_tokens: Tokens of the step's prompts, which are as few as hold so many.
        max_model_len: Longest sequence, in tokens.
        vocab_size: Number of token ids. All are among the step's tokens, as far as it has as many:
            experts are done sooner with tokens that are all alike.
        pool: Blocks to write to.
        wait: Waits for the device.
    """
    plan = make_step(prompts(num_tokens, max_model_len), pool, SamplingKind.GREEDY)
    plan.forward.token_ids = np.arange(num_tokens, dtype=np.int32) % vocab_size
    launched, done = [], []
    for _ in range(_ROUNDS):
        wait()
        began = time.perf_counter()
        runner.sample(plan, runner.forward(plan))
        launched.append(time.perf_counter() - began)
        wait()
        done.append(time.perf_counter() - began)
        runner.forward(release_step(len(plan.forward.rows)))
    return min(launched) / min(done)
