"""What the number of drafts does to tokens per second, simulated.

The real engine runs on a clock of its own, over a device that knows what steps cost and accepts
each draft with a set probability.

    python -m benchmarks.simulate_speculation --batches 1,32,256 --acceptances 0,0.6,0.9

**Every figure is simulated.** Without drafts the device takes for a step what `simulate_budget`
says; a step with drafts is padded to a graph (`GRAPHS_US`), any drafts cost `JUMP_MS`, and a pass
of the drafter what `--drafters` says: ngram nothing, eagle and draft what one layer, and 16 layers
of a quarter of the size, take to read their weights. Meant for choosing a policy, not for reporting
a speed. A row's figure is the ratio to the same engine without drafts.
"""

from __future__ import annotations

import argparse
import bisect
import math
import pathlib
import random

import numpy as np

from benchmarks import figures, workloads
from benchmarks.simulate_budget import Device, Simulation, linear_ms
from headrace_backend.config import EngineConfig
from headrace_backend.step.plan import StepPlan, StepResult

# Milliseconds of one pass. A layer of the model reads a 32nd of its weights (4.2 ms); a model of
# 1e9 parameters an eighth.
PASS_MS = {"ngram": 0.0, "eagle": 0.15, "draft": 0.55}
# What verifying any drafts costs beside their tokens: another kernel of attention, a larger graph
# (4.0 ms became 4.4 with four drafts of one row, H200, 2026-11-23).
JUMP_MS = 0.3
# Graphs of decodes with drafts, as a worker timed them (H200, 2026-11-23): tokens, microseconds.
# Larger ones, which were not timed, take longer by the arithmetic of their tokens.
GRAPHS_US = (
    *((2, 4219.0), (4, 4221.0), (8, 4274.0), (9, 4460.0), (16, 4496.0), (18, 4654.0), (32, 4676.0), (36, 4748.0)),
    *((48, 4810.0), (64, 4812.0), (72, 4819.0), (80, 4880.0), (96, 4959.0), (112, 5096.0), (128, 5124.0)),
    *((144, 5255.0), (160, 5426.0), (176, 5742.0), (192, 5958.0), (208, 6057.0), (240, 6626.0), (256, 6741.0)),
    (288, 7947.0),
    *((tokens, 7947.0 + 1e3 * (linear_ms(tokens) - linear_ms(288))) for tokens in (512, 576, 1024, 1152, 2048, 2304)),
)
_GRAPH_TOKENS = [tokens for tokens, _ in GRAPHS_US]
MOST_DRAFTS = 8
_TOKEN = 5
_PROMPT_TOKENS = 64
# Tokens of each output before those that count, while the engine learns, and those that count.
_WARM_TOKENS = 400
_COUNTED_TOKENS = 600


class DraftingDevice(Device):
    """A device that accepts drafts with a set probability, and takes its time to draft them."""

    def __init__(self, acceptance: float, pass_ms: float, slowness: float, noise: float, seed: int) -> None:
        """A device that nothing runs on.

        Args:
            acceptance: Probability of a draft's being right, if those before it were.
            pass_ms: Time to draft one token for all rows, in milliseconds.
            slowness: Multiplies the duration of every step.
            noise: Standard deviation of a step's duration, relative.
            seed: Seed of acceptance and noise.
        """
        super().__init__(seed, slowness, noise=noise, hiccups=0.0)
        self._acceptance = acceptance
        self._pass_ms = pass_ms
        self._draws = random.Random(seed)
        # Drafts of a row that the next step may verify.
        self._num_proposed = 0
        self.num_drafts = 0

    def run(self, plan: StepPlan, asked_ms: float) -> StepResult:
        """Computes the plan's step and settles what is accepted; then drafts for the next one."""
        result = super().run(plan, asked_ms)
        forward = plan.forward
        drafts = forward.counts[forward.known_counts == 0] - 1
        assert max(drafts, default=0) <= self._num_proposed, "drafts are announced with the step before"
        if drafts.any():
            self.free_at_ms += JUMP_MS
            self.num_drafts += int(drafts.sum())
            counts = np.ones(plan.sample.rows.size, np.int32)
            counts[: drafts.size] += [self._num_accepted(count) for count in drafts.tolist()]
            result.counts = counts
            result.tokens, result.ok = np.full(counts.sum(), _TOKEN, np.int32), np.ones(counts.sum(), np.uint8)
        self._num_proposed = plan.num_proposed
        self.free_at_ms += plan.num_proposed * self._pass_ms
        result.finished_at_ns = int(self.free_at_ms * 1e6)
        return result

    def _decodes_ms(self, plan: StepPlan) -> float:
        """Adds to a step with drafts what its graph takes longer than that of its rows."""
        num_rows, num_tokens = plan.forward.rows.size, plan.num_tokens
        if num_tokens == num_rows:
            return linear_ms(num_rows)
        return linear_ms(num_rows) + (_graph_us(num_tokens) - _graph_us(num_rows)) / 1e3

    def _num_accepted(self, num_drafts: int) -> int:
        accepted = 0
        while accepted < num_drafts and self._draws.random() < self._acceptance:
            accepted += 1
        return accepted


def _graph_us(num_tokens: int) -> float:
    """Microseconds of the smallest graph that holds so many tokens."""
    return GRAPHS_US[bisect.bisect_left(_GRAPH_TOKENS, num_tokens)][1]


def tokens_per_s(
    batch: int,
    acceptance: float,
    drafts: str,
    pass_ms: float = 0.0,
    slowness: float = 1.0,
    seed: int = 0,
    knows_graphs: bool = True,
) -> float:
    """Output tokens per simulated second of `batch` rows that are written all the time.

    Args:
        batch: Rows.
        acceptance: Probability of a draft's being right.
        drafts: A number of drafts, "auto" or "off".
        pass_ms: Time to draft one token for all rows, in milliseconds.
        slowness: Multiplies the duration of every step.
        seed: Seed of acceptance and noise.
        knows_graphs: Whether the worker has reported what its graphs take.
    """
    length = _WARM_TOKENS + _COUNTED_TOKENS
    trace = [([7] * _PROMPT_TOKENS, length)] * batch
    config = EngineConfig(
        model=pathlib.Path("none"),
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        enable_prefix_cache=False,
        speculate="off" if drafts == "off" else "mtp",
        speculate_tokens="auto" if drafts == "off" else drafts,
    )
    device = DraftingDevice(acceptance, pass_ms, slowness, 0.02, seed)
    num_drafts = 0 if drafts == "off" else MOST_DRAFTS
    graphs = GRAPHS_US if knows_graphs else ()
    simulation = Simulation(workloads.Workload("simulated", trace), config, device, 1 + num_drafts, graphs)
    simulation.run()
    arrivals_ms = [answer.arrivals_ms for answer in simulation.answers.values()]
    begin_ms = max(arrivals[_WARM_TOKENS] for arrivals in arrivals_ms)
    end_ms = min(arrivals[-1] for arrivals in arrivals_ms)
    count = sum(begin_ms < arrival <= end_ms for arrivals in arrivals_ms for arrival in arrivals)
    return 1e3 * count / (end_ms - begin_ms)


def compare(
    batch: int, acceptance: float, pass_ms: float, choices: list[str], slowness: float, knows_graphs: bool = True
) -> dict[str, float]:
    """Tokens per second of each choice as a ratio to those without drafts, on one device."""
    off = tokens_per_s(batch, acceptance, "off", slowness=slowness)
    return {
        drafts: tokens_per_s(batch, acceptance, drafts, pass_ms, slowness, knows_graphs=knows_graphs) / off
        for drafts in choices
    }


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    """Simulates what is asked for, prints it, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32, 64, 128, 256], help="rows")
    parser.add_argument("--acceptances", type=_numbers, default=[0, 0.6, 0.7, 0.8, 0.9, 1], help="per draft")
    parser.add_argument("--drafters", default="ngram,eagle,draft", help=f"of {', '.join(PASS_MS)}")
    parser.add_argument("--drafts", default="1,2,4,8,auto", help="numbers of drafts, and auto")
    parser.add_argument("--slowness", type=float, default=1.0, help="a device so many times slower")
    parser.add_argument("--untold", action="store_true", help="the engine does not know what graphs take")
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    arguments = parser.parse_args()
    choices = arguments.drafts.split(",")
    rows: list[dict[str, float | str]] = []
    print(f"SIMULATED  batch  accepted  {'  '.join(f'{choice:>5}' for choice in choices)}  auto / best fixed")
    for drafter in arguments.drafters.split(","):
        for batch in map(int, arguments.batches):
            for acceptance in arguments.acceptances:
                pass_ms, knows_graphs = PASS_MS[drafter], not arguments.untold
                ratios = compare(batch, acceptance, pass_ms, choices, arguments.slowness, knows_graphs)
                rows += [
                    {"drafter": drafter, "batch": batch, "acceptance": acceptance, "k": k, "ratio_to_off": ratio}
                    for k, ratio in ratios.items()
                ]
                best = max([1.0, *(ratio for k, ratio in ratios.items() if k != "auto")])
                printed = "  ".join(f"{ratio:5.2f}" for ratio in ratios.values())
                print(
                    f"{drafter:9} {batch:6} {acceptance:9.2f}  {printed}  {ratios.get('auto', math.nan) / best:.3f}",
                    flush=True,
                )
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    figures.report("simulate_speculation", {"simulated": True, **settings, "results": rows}, arguments.json)


if __name__ == "__main__":
    main()
