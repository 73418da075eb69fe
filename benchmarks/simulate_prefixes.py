"""What waiting for a shared prefix saves in prompt tokens, and what it does to first tokens.

The real engine runs on a clock of its own, over the device of `simulate_budget`.

    python -m benchmarks.simulate_prefixes

Each case is played twice: as the engine is, and with every request for itself, which finds what is
published and waits for nobody. `least` is the number of prompt tokens that must be computed if no
block is computed twice. **Times are simulated**; counts are what the engine planned.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import random
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from benchmarks import figures, workloads
from benchmarks.simulate_budget import Device, Simulation
from headrace_backend.config import EngineConfig
from headrace_backend.engine.scheduling import prefix_followers

_BLOCK_SIZE: Literal[16] = 16
_SHARED_TOKENS = 16_000
_OWN_TOKENS = 100
_OUTPUT_TOKENS = 32
_COUNT = 64
_VOCAB_SIZE = 100_000
# No request saves so many tokens by waiting.
_NEVER = 1 << 30


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests that share prefixes."""

    name: str
    prompts: tuple[list[int], ...]
    # Milliseconds from one request to the next.
    gap_ms: float = 0.0
    # Of each request; empty: all the same.
    priorities: tuple[int, ...] = ()
    num_blocks: int = 54_000


class PrioritySimulation(Simulation):
    """A simulation of requests with priorities."""

    def __init__(self, case: Case, config: EngineConfig, device: Device) -> None:
        """An engine that has computed nothing of the case."""
        self._priorities = case.priorities
        trace = [(prompt, _OUTPUT_TOKENS) for prompt in case.prompts]
        arrivals_s = tuple(index * case.gap_ms / 1e3 for index in range(len(trace)))
        workload = workloads.Workload(case.name, trace, arrivals_s)
        super().__init__(workload, config, device, num_blocks=case.num_blocks)

    def priority(self, index: int) -> int:
        """The priority of the case's request of this index."""
        return self._priorities[index] if self._priorities else 0


def least_tokens(prompts: Iterable[list[int]], block_size: int = _BLOCK_SIZE) -> int:
    """Prompt tokens that must be computed: every block once, and what follows a prompt's last one.

    A prompt's last token is always computed, as something is drawn behind it.
    """
    blocks: set[int] = set()
    num_own = 0
    for prompt in prompts:
        key = 0
        ends = range(block_size, len(prompt), block_size)
        for end in ends:
            key = hash((key, *prompt[end - block_size : end]))
            blocks.add(key)
        num_own += len(prompt) - len(ends) * block_size
    return len(blocks) * block_size + num_own


def cases(seed: int) -> list[Case]:
    """All cases, of prompts drawn with a seed."""
    rng = random.Random(seed)

    def drawn(count: int) -> list[int]:
        return [rng.randrange(10, _VOCAB_SIZE) for _ in range(count)]

    def ended(prefixes: list[list[int]]) -> tuple[list[int], ...]:
        """Prompts that begin with these in turns."""
        return tuple([*prefixes[index % len(prefixes)], *drawn(_OWN_TOKENS)] for index in range(_COUNT))

    one, two = drawn(_SHARED_TOKENS), drawn(_SHARED_TOKENS)
    half = one[: _SHARED_TOKENS // 2]
    fork = [[*half, *drawn(_SHARED_TOKENS // 2)] for _ in range(8)]
    rising = tuple(min(index, 100) for index in range(_COUNT))
    return [
        Case("wave", ended([one])),
        Case("staggered by 20 ms", ended([one]), 20.0),
        Case("two prefixes in turns", ended([one, two])),
        Case("forks: 8 ends of a half", ended(fork)),
        Case("first less urgent, 5 ms", ended([one]), 5.0, (0, *[1] * (_COUNT - 1))),
        Case("ever more urgent, 5 ms", ended([one]), 5.0, rising),
        Case("wave, 1,100 blocks", ended([one]), num_blocks=1100),
        Case("two in turns, 2,100 blocks", ended([one, two]), num_blocks=2100),
        Case("two in turns, 1,100 blocks", ended([one, two]), num_blocks=1100),
        Case("forks, 4,000 blocks", ended(fork), num_blocks=4000),
    ]


@contextlib.contextmanager
def _each_for_itself() -> Iterator[None]:
    least, prefix_followers.LEAST_SHARED_TOKENS = prefix_followers.LEAST_SHARED_TOKENS, _NEVER
    try:
        yield
    finally:
        prefix_followers.LEAST_SHARED_TOKENS = least


def play(case: Case, budget: int, seed: int) -> tuple[int, list[float]]:
    """Prompt tokens that a case computed, and each request's time to its first token in ms."""
    config = EngineConfig(
        model=pathlib.Path("none"),
        block_size=_BLOCK_SIZE,
        max_num_seqs=_COUNT,
        max_num_batched_tokens=budget,
        max_waiting_tokens=1 << 30,
    )
    device = Device(seed, 1.0, config.captured_mixed_sizes(), noise=0.0, hiccups=0.0)
    simulation = PrioritySimulation(case, config, device)
    simulation.run()
    answers = [simulation.answers[index] for index in range(len(case.prompts))]
    return sum(step[0] for step in device.steps), [answer.arrivals_ms[0] - answer.sent_ms for answer in answers]


def compare(case: Case, budget: int, seed: int) -> dict[str, Any]:
    """The figures of a case, played as it is and with every request for itself."""
    computed, ttft_ms = play(case, budget, seed)
    with _each_for_itself():
        alone_computed, alone_ttft_ms = play(case, budget, seed)
    least = least_tokens(case.prompts)
    return {
        "case": case.name,
        "budget": budget,
        "least_tokens": least,
        "computed_tokens": computed,
        "ratio": computed / least,
        "ttft_mean_ms": sum(ttft_ms) / len(ttft_ms),
        "ttft_p95_ms": figures.percentile(ttft_ms, 0.95),
        "alone_ratio": alone_computed / least,
        "alone_ttft_mean_ms": sum(alone_ttft_ms) / len(alone_ttft_ms),
        "alone_ttft_p95_ms": figures.percentile(alone_ttft_ms, 0.95),
        "most_later_ms": max(ttft - alone for ttft, alone in zip(ttft_ms, alone_ttft_ms, strict=True)),
    }


def main() -> None:
    """Plays all cases, prints them, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", default="2048,8192", help="max_num_batched_tokens")
    parser.add_argument("--seed", type=int, default=0, help="of prompts")
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    arguments = parser.parse_args()
    results = []
    print("                                       as it is                          each for itself")
    print(
        "case                        budget    computed  of least  TTFT ms  p95   of least  TTFT ms  p95   latest by ms"
    )
    for case in cases(arguments.seed):
        for budget in map(int, arguments.budgets.split(",")):
            figure = compare(case, budget, arguments.seed)
            results.append(figure)
            print(
                f"{case.name:27} {budget:6}  {figure['computed_tokens']:10,}  {figure['ratio']:7.2f}x "
                f"{figure['ttft_mean_ms']:8.0f} {figure['ttft_p95_ms']:6.0f}  {figure['alone_ratio']:7.2f}x "
                f"{figure['alone_ttft_mean_ms']:8.0f} {figure['alone_ttft_p95_ms']:6.0f}  "
                f"{figure['most_later_ms']:8.0f}",
                flush=True,
            )
    settings = {"budgets": arguments.budgets, "seed": arguments.seed}
    figures.report("simulate_prefixes", {"simulated": True, **settings, "results": results}, arguments.json)


if __name__ == "__main__":
    main()
