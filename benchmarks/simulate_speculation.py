"""What the number of drafts does to tokens per second, simulated.

The real engine runs on a clock of its own, over a device that knows what steps cost and accepts
each draft with a set probability.

    python -m benchmarks.simulate_speculation --batches 1,32,256 --acceptances 0,0.6,0.9

**Every figure is simulated.** Without drafts the device takes for a step what `simulate_budget`
says; a step with drafts is padded to a graph (`GRAPHS_US`), any drafts cost `JUMP_MS`, and a pass
of the drafter what `--drafters` says: ngram nothing, eagle and draft what one layer, and 16 layers
of a quarter of the size, take to read their weights. With `--catch-up-ms` the drafter is a draft
model that defers steps as a worker's does (`deferred_steps`): each pass that catches up takes so
long, and `--catch-up-us` for each of its tokens. Meant for choosing a policy, not for reporting a
speed. A row's figure is the ratio to the same engine without drafts. With `--in-turns` each engine
answers all cases, one after the other, as those of `bench_speculation` do, and what it has to learn
about each counts.
"""

from __future__ import annotations

import argparse
import bisect
import math
import pathlib
import random
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks import figures, workloads
from benchmarks.simulate_budget import Device, Simulation, linear_ms
from headrace_backend.config import EngineConfig
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_backend.worker.speculation.deferred_steps import DeferredSteps, window_tokens
from headrace_backend.worker.speculation.drafted_rows import DraftedRows

# Milliseconds of one pass. A layer of the model reads a 32nd of its weights (4.2 ms); a model of
# 1e9 parameters an eighth.
PASS_MS = {"ngram": 0.0, "eagle": 0.15, "draft": 0.55}
# What verifying any drafts costs beside their tokens: another kernel of attention, a larger graph
# (4.0 ms became 4.4 with four drafts of one row, H200, 2026-11-23).
JUMP_MS = 0.3
# Graphs of decodes with drafts, as a worker timed them (H200, 2026-11-24): tokens, microseconds.
# Between them in a straight line. Those of 385 to 511 tokens take longer than 512, and are left out
# as workers do.
_TIMED_US = (
    *((2, 4156.0), (8, 4212.0), (16, 4390.0), (32, 4769.0), (64, 4780.0), (128, 5281.0), (192, 6172.0)),
    *((256, 7070.0), (320, 8637.0), (384, 9725.0), (512, 12550.0), (640, 15726.0), (768, 18834.0)),
    *((1024, 24690.0), (2048, 48293.0)),
)
_GRAPH_TOKENS = [*(2, 4, 8, 9, 16, 18, 32, 36), *range(48, 385, 16), *range(512, 1025, 16), 1152, 1536, 2048]
_TIMES = np.array(_TIMED_US)
GRAPHS_US: tuple[tuple[int, float], ...] = tuple(
    (tokens, float(np.interp(tokens, _TIMES[:, 0], _TIMES[:, 1]))) for tokens in _GRAPH_TOKENS
)
MOST_DRAFTS = 8
_MOST_ROWS, _MOST_TOKENS = 256, 8192
_TOKEN = 5
_PROMPT_TOKENS = 64
# Tokens of the first answer of an engine.
_FIRST_TOKENS = 32
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
        self.acceptance = acceptance
        self._pass_ms = pass_ms
        self._draws = random.Random(seed)
        # Milliseconds of a pass that catches up with deferred steps, and of each of its tokens;
        # none: no step is deferred.
        self.catch_up_ms: tuple[float, float] | None = None
        self._deferred = DeferredSteps(_MOST_ROWS, window_tokens(_MOST_TOKENS), _MOST_TOKENS)
        # Drafts of a row that the next step may verify.
        self._num_proposed = 0
        self.num_drafts = 0

    def run(self, plan: StepPlan, asked_ms: float) -> StepResult:
        """Computes the plan's step and settles what is accepted; then drafts for the next one."""
        result = super().run(plan, asked_ms)
        forward = plan.forward
        drafts = forward.counts[forward.known_counts == 0] - 1
        self.free_at_ms += self._caught_up_ms(plan)
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

    def _caught_up_ms(self, plan: StepPlan) -> float:
        """What a draft model takes for the tokens that the plan has it catch up with."""
        if self.catch_up_ms is None:
            return 0.0
        self._deferred.begin(plan)
        drafted = DraftedRows.of(plan)
        pieces = [] if drafted is None else list(self._deferred.drafted(drafted))
        if plan.forward.rows.size:
            pieces += self._deferred.overdue(plan)
            self._deferred.noted(plan)
        pass_ms, token_ms = self.catch_up_ms
        return sum(pass_ms + token_ms * piece.num_tokens for piece in pieces)

    def _decodes_ms(self, plan: StepPlan) -> float:
        """Adds to a step with drafts what its graph takes longer than that of its rows."""
        num_rows, num_tokens = plan.forward.rows.size, plan.num_tokens
        if num_tokens == num_rows:
            return linear_ms(num_rows)
        return linear_ms(num_rows) + (_graph_us(num_tokens) - _graph_us(num_rows)) / 1e3

    def _num_accepted(self, num_drafts: int) -> int:
        accepted = 0
        while accepted < num_drafts and self._draws.random() < self.acceptance:
            accepted += 1
        return accepted


def _graph_us(num_tokens: int) -> float:
    """Microseconds of the smallest graph that holds so many; beyond the largest in proportion."""
    largest, largest_us = GRAPHS_US[-1]
    if num_tokens > largest:
        return largest_us * num_tokens / largest
    return GRAPHS_US[bisect.bisect_left(_GRAPH_TOKENS, num_tokens)][1]


class Session:
    """An engine that answers one case after the other, and keeps what it has learned."""

    def __init__(
        self,
        drafts: str,
        pass_ms: float = 0.0,
        slowness: float = 1.0,
        seed: int = 0,
        knows_graphs: bool = True,
        catch_up_ms: tuple[float, float] | None = None,
    ) -> None:
        """An engine that has answered one short request, half of whose drafts were right.

        Args:
            drafts: A number of drafts, "auto" or "off".
            pass_ms: Time to draft one token for all rows, in milliseconds.
            slowness: Multiplies the duration of every step.
            seed: Seed of acceptance and noise.
            knows_graphs: Whether the worker has reported what its graphs take.
            catch_up_ms: Milliseconds of a pass that catches up, and of each of its tokens; None: no
                step is deferred.
        """
        config = EngineConfig(
            model=pathlib.Path("none"),
            max_num_seqs=_MOST_ROWS,
            max_num_batched_tokens=_MOST_TOKENS,
            enable_prefix_cache=False,
            speculate="off" if drafts == "off" else "mtp",
            speculate_tokens="auto" if drafts == "off" else drafts,
        )
        self._device = DraftingDevice(0.5, pass_ms, slowness, 0.02, seed)
        self._device.catch_up_ms = catch_up_ms
        num_drafts = 0 if drafts == "off" else MOST_DRAFTS
        graphs = GRAPHS_US if knows_graphs else ()
        self._simulation = Simulation(_case(1, _FIRST_TOKENS), config, self._device, 1 + num_drafts, graphs)
        self._simulation.run()

    def tokens_per_s(self, batch: int, acceptance: float, num_tokens: int, first: int = 0) -> float:
        """Output tokens per simulated second of `batch` rows that are written all the time.

        Args:
            batch: Rows.
            acceptance: Probability of a draft's being right.
            num_tokens: Tokens of each answer.
            first: Tokens of each answer before those that count.
        """
        self._device.acceptance = acceptance
        self._simulation.take(_case(batch, num_tokens))
        self._simulation.run()
        arrivals_ms = [answer.arrivals_ms for answer in self._simulation.answers.values()]
        begin_ms = max(arrivals[first] for arrivals in arrivals_ms)
        end_ms = min(arrivals[-1] for arrivals in arrivals_ms)
        if end_ms <= begin_ms:
            begin_ms = min(arrivals[first] for arrivals in arrivals_ms)
            end_ms = max(arrivals[-1] for arrivals in arrivals_ms)
        count = sum(begin_ms < arrival <= end_ms for arrivals in arrivals_ms for arrival in arrivals)
        return 1e3 * count / (end_ms - begin_ms)


def _case(batch: int, num_tokens: int) -> workloads.Workload:
    return workloads.Workload("simulated", [([7] * _PROMPT_TOKENS, num_tokens)] * batch)


def compare(
    batch: int,
    acceptance: float,
    pass_ms: float,
    choices: list[str],
    slowness: float,
    knows_graphs: bool = True,
    seed: int = 0,
    catch_up_ms: tuple[float, float] | None = None,
) -> dict[str, float]:
    """Tokens per second of each choice as a ratio to those without drafts, each by a new engine.

    What engines have to learn at first does not count.
    """

    def figure(session: Session) -> float:
        return session.tokens_per_s(batch, acceptance, _WARM_TOKENS + _COUNTED_TOKENS, _WARM_TOKENS)

    off = figure(Session("off", slowness=slowness, seed=seed))
    how = pass_ms, slowness, seed, knows_graphs, catch_up_ms
    return {drafts: figure(Session(drafts, *how)) / off for drafts in choices}


def compare_in_turns(
    cases: Sequence[tuple[int, float, int]],
    pass_ms: float,
    choices: list[str],
    slowness: float,
    knows_graphs: bool,
    seed: int,
    catch_up_ms: tuple[float, float] | None = None,
) -> Iterator[dict[str, float]]:
    """Ratios as `compare` gives them, of each case of batch, acceptance and tokens in turns.

    Each choice has one engine for all cases. A case begins with what the one before it has taught,
    and all its tokens count but the first.
    """
    off = Session("off", slowness=slowness, seed=seed)
    how = pass_ms, slowness, seed, knows_graphs, catch_up_ms
    sessions = {drafts: Session(drafts, *how) for drafts in choices}
    for case in cases:
        off_tokens_per_s = off.tokens_per_s(*case)
        yield {drafts: session.tokens_per_s(*case) / off_tokens_per_s for drafts, session in sessions.items()}


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _compared(
    arguments: argparse.Namespace, pass_ms: float, choices: list[str]
) -> Iterator[tuple[tuple[int, float, int], dict[str, float]]]:
    """Each case that is asked for with its ratios, as they come."""
    cases = [
        (int(batch), acceptance, int(num_tokens))
        for batch, num_tokens in zip(arguments.batches, arguments.tokens, strict=True)
        for acceptance in arguments.acceptances
    ]
    deferred = None if arguments.catch_up_ms is None else (arguments.catch_up_ms, arguments.catch_up_us / 1e3)
    how = arguments.slowness, not arguments.untold, arguments.seed, deferred
    if arguments.in_turns:
        found = compare_in_turns(cases, pass_ms, choices, *how)
        yield from zip(cases, found, strict=True)
        return
    for case in cases:
        batch, acceptance, _ = case
        yield case, compare(batch, acceptance, pass_ms, choices, *how)


def main() -> None:
    """Simulates what is asked for, prints it, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32, 64, 128, 256], help="rows")
    parser.add_argument("--acceptances", type=_numbers, default=[0, 0.6, 0.7, 0.8, 0.9, 1], help="per draft")
    parser.add_argument("--in-turns", action="store_true", help="each engine answers all cases, one after the other")
    parser.add_argument(
        "--tokens", type=_numbers, default=[1000, 400, 256, 192, 160, 96], help="of each batch's answers, in turns"
    )
    parser.add_argument("--drafters", default="ngram,eagle,draft", help=f"of {', '.join(PASS_MS)}")
    parser.add_argument("--drafts", default="1,2,4,8,auto", help="numbers of drafts, and auto")
    parser.add_argument("--slowness", type=float, default=1.0, help="a device so many times slower")
    parser.add_argument("--seed", type=int, default=0, help="of acceptance and noise")
    parser.add_argument("--catch-up-ms", type=float, help="of a draft model's pass that catches up with steps")
    parser.add_argument("--catch-up-us", type=float, default=0.0, help="of each token of such a pass")
    parser.add_argument("--untold", action="store_true", help="the engine does not know what graphs take")
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    arguments = parser.parse_args()
    if not arguments.in_turns:
        arguments.tokens = [_WARM_TOKENS + _COUNTED_TOKENS] * len(arguments.batches)
    if len(arguments.tokens) != len(arguments.batches):
        parser.error("--tokens: one number for each of --batches")
    choices = arguments.drafts.split(",")
    rows: list[dict[str, float | str]] = []
    print(f"SIMULATED  batch  accepted  {'  '.join(f'{choice:>5}' for choice in choices)}  auto / best fixed")
    for drafter in arguments.drafters.split(","):
        for (batch, acceptance, _), ratios in _compared(arguments, PASS_MS[drafter], choices):
            rows += [
                {"drafter": drafter, "batch": batch, "acceptance": acceptance, "k": k, "ratio_to_off": ratio}
                for k, ratio in ratios.items()
            ]
            best = max([1.0, *(ratio for k, ratio in ratios.items() if k != "auto")])
            printed = "  ".join(f"{ratio:5.3f}" for ratio in ratios.values())
            print(
                f"{drafter:9} {batch:6} {acceptance:9.2f}  {printed}  {ratios.get('auto', math.nan) / best:.3f}",
                flush=True,
            )
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    figures.report("simulate_speculation", {"simulated": True, **settings, "results": rows}, arguments.json)


if __name__ == "__main__":
    main()
