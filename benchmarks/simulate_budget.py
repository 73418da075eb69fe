"""What the token budget does to latency and throughput, simulated.

The real engine runs on a clock of its own, over a device that only knows what steps cost.

    python -m benchmarks.simulate_budget --workloads poisson15,burst256,mix1000,longprompt_poisson15
    --slowness 1.12

**Every figure is simulated.** The device takes for a step what Llama-3.1-8B in bf16 takes on an
H200 by the ceilings measured there (`Device`), with a little noise and a rare hiccup, strictly one
step after another. Nothing is computed, so a run is a few seconds long and, for one seed, always
the same. Meant for choosing a policy, not for reporting a speed: planning, ring and launching count
as one millisecond or two that are hidden behind the step in flight if the plan is asked for early
enough, a service and its socket as nothing.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import math
import pathlib
import random
import statistics
from collections import deque
from typing import Literal

import numpy as np

from benchmarks import figures, workloads
from headrace_backend.config import EngineConfig
from headrace_backend.engine.engine import Engine
from headrace_backend.engine.request import EngineRequest, ModelLimits, Subscriber
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_kernels.attention.plan import gathering_pays
from headrace_kernels.attention.shares import SHARED_PROGRAMS, share_out
from headrace_request.request import Request
from headrace_request.stop import Stop

_VOCAB_SIZE = 128_256
_MAX_LEN = 131_072
_BLOCK_SIZE: Literal[16] = 16
# What 141 GB leave beside 16 GB of weights, at 128 KiB a token.
_NUM_BLOCKS = 54_000
_NUM_STREAMS = 4
_DEFAULT = "poisson15,burst256,mix1000,longprompt_poisson15"
# Tokens of a step, padding included, and what the products and all other kernels then take in ms:
# 4.2 at one row and 20.8 us a token beyond 256 measured.
_LINEAR_MS = ((1, 4.20), (32, 4.40), (128, 5.07), (256, 6.81), (8192, 171.9))
_LINEAR_TOKENS = [tokens for tokens, _ in _LINEAR_MS]
# 131,072 bytes of KV a token at 4.0 TB/s.
CONTEXT_MS = 131_072 / 4.0e12 * 1e3
# Attention of prompts. Floating-point operations per pair of query token and key: 4 a head and
# dimension, 32 layers.
_PAIR_FLOP = 4 * 32 * 128 * 32
# Query tokens of a tile (a shorter chunk costs as much), and key/value heads: each tile has one
# program per head.
_TILE_TOKENS = 32
_HEADS = 8
# Query heads per key/value head; and keys per token from which the worker gathers contexts outside
# of graphs.
_GROUP = 4
# Tiles and shares that a captured step has room for, as many as it has tokens: never too few here.
_MOST_ITEMS = 1 << 10
_GATHER_FROM_KEYS = 2048
# P programs of the paged kernel, up to as many as run at a time, compute together at _PAGED_FLOPS *
# P / (P + _PAGED_HALF). Measured: 64 programs 116 TFLOP/s (256 tokens after 8,000, each tile one
# program's), 256 programs 313, 375 and 395 (64, 128 and 256 tokens after 100,000, shared). That is
# of threads that read blocks: the copy engine's kernel has 339, 558 and 650 there (2026-11-30).
_PAGED_FLOPS = 1466e12
_PAGED_HALF = 745
# The gathered kernel: measured with 2,048 tiles, and with 128 (512 tokens after 100,000). Copying
# moves 131,072 bytes a token of context twice, at 4.0 TB/s.
_GATHERED_FLOPS = 640e12
_GATHERED_PROGRAM_FLOPS = 4.9e12
_GATHER_MS = 2 * 131_072 / 4.0e12 * 1e3
# A step outside of graphs takes at least as long as launching its kernels one by one. Assumed, not
# measured.
_LAUNCH_MS = 10.0
# From the engine's being asked for a plan to the launched forward pass, of a step without and with
# prompts: planning, ring, the worker's own time. Measured in poisson15 on two hosts: half of them
# took 0.79 and 1.49 ms, and 1.02 and 2.01; 99 in 100 without prompts 1.34 and 1.69.
_LEAD_MS, _MIXED_LEAD_MS = 0.9, 1.75
# Every so often it takes longer, by a few milliseconds at most: other work of the event loop,
# another process.
_LEAD_SPREAD = 0.2
_LEAD_HICCUPS = 0.01
_LEAD_HICCUP_MS = 2.0
_HICCUP_MS = 2.0
# From the end of a step to the engine's reading of its result.
_RESULT_MS = 0.3
# What a timer is late.
_TIMER_MS = 0.08


class Device:
    """Takes for a step what its cost model says."""

    def __init__(
        self,
        seed: int,
        slowness: float,
        captured: tuple[int, ...] = (),
        noise: float = 0.01,
        hiccups: float = 0.001,
        ahead: bool = False,
    ) -> None:
        """A device that nothing runs on.

        Args:
            seed: Seed of noise and hiccups.
            slowness: Multiplies every duration: a device that the engine's prior does not know.
            captured: Tokens that steps with prompts are padded to.
            noise: Standard deviation of a step's duration, relative.
            hiccups: Share of the steps that take `_HICCUP_MS` longer.
            ahead: Does not tell when it launched a step, so that no plan is held back.
        """
        self._captured = captured
        self._noise = noise
        self._hiccups = hiccups
        self._ahead = ahead
        self._random = random.Random(seed)
        self._slowness = slowness
        self.free_at_ms = 0.0
        self.steps: list[tuple[int, int, float]] = []
        # What it waited for its host between two steps of which the second was asked for while the
        # first ran.
        self.idle_ms = 0.0
        self._launched_ms = 0.0

    def run(self, plan: StepPlan, asked_ms: float) -> StepResult:
        """Launches the plan that the engine was asked for at `asked_ms`.

        It is computed as soon as the one before it is done.
        """
        has_prompts = bool((plan.forward.known_counts > 0).any())
        lead_ms = _MIXED_LEAD_MS if has_prompts else _LEAD_MS
        lead_ms *= self._random.lognormvariate(0.0, _LEAD_SPREAD)
        if self._random.random() < _LEAD_HICCUPS:
            lead_ms += self._random.uniform(0.0, _LEAD_HICCUP_MS)
        # The worker launches one step after the other.
        launched_ms = self._launched_ms = max(asked_ms + lead_ms, self._launched_ms)
        began_ms = max(launched_ms, self.free_at_ms)
        if asked_ms < self.free_at_ms + _RESULT_MS:
            self.idle_ms += began_ms - self.free_at_ms
        duration_ms = self._cost_ms(plan)
        self.free_at_ms = began_ms + duration_ms
        num_samples = plan.sample.rows.size
        tokens = np.full(num_samples, 5, np.int32)
        self.steps.append((int(plan.forward.known_counts.sum()), num_samples, duration_ms))
        times_ns = int(asked_ms * 1e6), int(self.free_at_ms * 1e6)
        finite, checked = np.ones(num_samples, np.uint8), np.ones(plan.forward.checked_indices.size, np.uint8)
        launched_ns = 0 if self._ahead else int(launched_ms * 1e6)
        return StepResult(plan.step_id, *times_ns, tokens, finite, launched_at_ns=launched_ns, checked_ok=checked)

    def _cost_ms(self, plan: StepPlan) -> float:
        forward = plan.forward
        decodes = forward.known_counts == 0
        context_ms = float(forward.starts[decodes].sum() + decodes.sum()) * CONTEXT_MS
        if decodes.all():
            cost_ms = self._decodes_ms(plan) + context_ms
        else:
            cost_ms = self._mixed_ms(
                plan,
                list(zip(forward.starts[~decodes].tolist(), forward.counts[~decodes].tolist(), strict=True)),
                context_ms,
            )
        hiccup_ms = _HICCUP_MS if self._random.random() < self._hiccups else 0.0
        return self._slowness * cost_ms * self._random.lognormvariate(0.0, self._noise) + hiccup_ms

    def _decodes_ms(self, plan: StepPlan) -> float:
        """All but attention in a step of decodes."""
        return linear_ms(plan.num_tokens)

    def _mixed_ms(self, plan: StepPlan, chunks: list[tuple[int, int]], context_ms: float) -> float:
        counts, starts = np.array([count for _, count in chunks]), np.array([start for start, _ in chunks])
        padded = next((size for size in self._captured if size >= plan.num_tokens), 0)
        if padded:
            return linear_ms(padded) + context_ms + _attention_ms(chunks, gathered=False)
        gathers = gathering_pays(counts, starts + counts, _GROUP, _GATHER_FROM_KEYS)
        launched_ms = _LAUNCH_MS if self._captured else 0.0
        return max(launched_ms, linear_ms(plan.num_tokens) + context_ms + _attention_ms(chunks, gathers))


def _attention_ms(chunks: list[tuple[int, int]], gathered: bool) -> float:
    """Milliseconds that chunks (start, tokens) of prompts take in all layers.

    There are as many programs as tiles, or shares of them, and heads; of the gathered kernel the
    longest has its own rate.
    """
    tiles = [math.ceil(count / _TILE_TOKENS) for _, count in chunks]
    flop = sum(
        n * _TILE_TOKENS * (start + count / 2) * _PAIR_FLOP for n, (start, count) in zip(tiles, chunks, strict=True)
    )
    longest_flop = max(_TILE_TOKENS * (start + count) for start, count in chunks) * _PAIR_FLOP / _HEADS
    if gathered:
        copy_ms = sum(start + count for start, count in chunks) * _GATHER_MS
        return copy_ms + 1e3 * max(flop / _GATHERED_FLOPS, longest_flop / _GATHERED_PROGRAM_FLOPS)
    keys = np.repeat([start + count for start, count in chunks], tiles)
    num_programs = min(int(share_out(keys, _HEADS, _MOST_ITEMS).sum()) * _HEADS, SHARED_PROGRAMS)
    return 1e3 * flop / (_PAGED_FLOPS * num_programs / (num_programs + _PAGED_HALF))


def linear_ms(num_tokens: int) -> float:
    """Milliseconds of all but attention in a step of so many tokens.

    Between the measured points in a straight line, beyond them on the last one.
    """
    index = min(max(bisect.bisect_left(_LINEAR_TOKENS, num_tokens), 1), len(_LINEAR_MS) - 1)
    (left, left_ms), (right, right_ms) = _LINEAR_MS[index - 1], _LINEAR_MS[index]
    return left_ms + (right_ms - left_ms) * (num_tokens - left) / (right - left)


@dataclasses.dataclass
class Answer:
    """When a request was sent and its tokens came, in ms."""

    sent_ms: float
    arrivals_ms: list[float] = dataclasses.field(default_factory=list)


class Simulation:
    """One workload, from its first request to its last token."""

    def __init__(
        self,
        workload: workloads.Workload,
        config: EngineConfig,
        device: Device,
        tokens_per_row: int = 1,
        drafted_graphs: tuple[tuple[int, float], ...] = (),
        num_blocks: int = _NUM_BLOCKS,
    ) -> None:
        """An engine that has computed nothing.

        Args:
            workload: What is asked of it.
            config: Its configuration.
            device: What computes its steps.
            tokens_per_row: Most tokens that a step settles for a row that decodes, by its drafts.
            drafted_graphs: Tokens and microseconds of the graphs that verify drafts.
            num_blocks: Blocks of its KV cache.
        """
        self.now_ms = 1000.0
        limits = ModelLimits(_VOCAB_SIZE, _MAX_LEN, (2,))
        self.engine = Engine(config, limits, None, lambda: int(self.now_ms * 1e6), lambda: 0)
        self.engine.worker_ready(
            num_blocks,
            on_gpu=True,
            captured_mixed_sizes=config.captured_mixed_sizes(),
            tokens_per_row=tokens_per_row,
            drafted_graphs=drafted_graphs,
        )
        self._device = device
        self._results: deque[tuple[float, StepResult]] = deque()
        self._num_open = 0
        # Requests of all workloads so far.
        self._num_sent = 0
        self.take(workload)

    def take(self, workload: workloads.Workload) -> None:
        """Has what is asked from now on be this workload's, and `answers` too; nothing runs."""
        self._workload = workload
        arrivals_s = workload.arrivals_s or (0.0,) * len(workload.trace)
        self._unsent = deque(enumerate(self.now_ms + 1e3 * arrival for arrival in arrivals_s))
        self.answers: dict[int, Answer] = {}

    def run(self) -> None:
        """Plays events in their order until nothing is left."""
        while self._unsent or self.engine.has_work:
            self._send()
            while (plan := self.engine.plan()) is not None:
                result = self._device.run(StepPlan.decode(plan.encode()), self.now_ms)
                self._results.append((result.finished_at_ns / 1e6 + _RESULT_MS, result))
            self._read()
            self._wait()
        while self._results:
            self._wait()

    def _send(self) -> None:
        most_open = self._workload.concurrency or len(self._workload.trace)
        while self._unsent and self._unsent[0][1] <= self.now_ms and self._num_open < most_open:
            index, planned_ms = self._unsent.popleft()
            prompt, num_tokens = self._workload.trace[index]
            asked = Request(np.array(prompt, np.int32).tobytes(), Stop(num_tokens), priority=self.priority(index))
            request = EngineRequest(f"r{self._num_sent}", asked)
            self._num_sent += 1
            self.engine.add(request, Subscriber(index % _NUM_STREAMS, index + 1))
            sent_ms = planned_ms if self._workload.arrivals_s is not None else self.now_ms
            self.answers[index] = Answer(sent_ms)
            self._num_open += 1

    def priority(self, index: int) -> int:
        """The priority of the workload's request of this index."""
        return 0

    def _wait(self) -> None:
        """Goes on to whatever comes first: a result, a request, or a plan that is due."""
        next_ms = self._results[0][0] if self._results else math.inf
        if self._unsent and self._unsent[0][1] > self.now_ms:
            next_ms = min(next_ms, self._unsent[0][1])
        due_ns = self.engine.plan_due_ns
        if due_ns is not None:
            next_ms = min(next_ms, due_ns / 1e6 + _TIMER_MS)
        if next_ms is math.inf:
            return
        self.now_ms = max(self.now_ms, next_ms)
        if self._results and self._results[0][0] <= self.now_ms:
            self.engine.settle(self._results.popleft()[1])
            self._read()

    def _read(self) -> None:
        for outbox in self.engine.take_outboxes().values():
            for handle in outbox.handles:
                self.answers[handle - 1].arrivals_ms.append(self.now_ms)
            self._num_open -= sum(type(event).__name__ == "RequestDone" for _, event in outbox.events)


def simulate(name: str, arguments: argparse.Namespace) -> dict[str, float | str]:
    """The figures of one workload."""
    workload = workloads.build(name, arguments.seed)
    if workload.users is not None:
        raise SystemExit(f"{name}: people who think are not simulated")
    if workload.arrivals_s is not None:
        workload = dataclasses.replace(workload, arrivals_s=tuple(a / arguments.rate for a in workload.arrivals_s))
    config = EngineConfig(
        model=pathlib.Path("none"),
        block_size=_BLOCK_SIZE,
        max_num_seqs=arguments.rows,
        max_num_batched_tokens=arguments.max_tokens,
        step_time_target_ms=arguments.target_ms,
        enable_prefix_cache=False,
        max_waiting_requests=2048,
    )
    device = Device(
        arguments.seed,
        arguments.slowness,
        config.captured_mixed_sizes(),
        arguments.noise,
        arguments.hiccups,
        arguments.ahead,
    )
    simulation = Simulation(workload, config, device)
    began_ms = simulation.now_ms
    simulation.run()
    measured = [answer for index, answer in simulation.answers.items() if index not in workload.apart]
    ttft = [answer.arrivals_ms[0] - answer.sent_ms for answer in measured]
    gaps = [b - a for answer in measured for a, b in zip(answer.arrivals_ms, answer.arrivals_ms[1:], strict=False)]
    wall_s = (simulation.now_ms - began_ms) / 1e3
    apart = [simulation.answers[index] for index in workload.apart]
    mixed = [step for step in device.steps if step[0]]
    return {
        "workload": name,
        "ttft_p50_ms": figures.percentile(ttft, 0.5),
        "ttft_p95_ms": figures.percentile(ttft, 0.95),
        "itl_p50_ms": figures.percentile(gaps, 0.5),
        "itl_p99_ms": figures.percentile(gaps, 0.99),
        "itl_max_ms": max(gaps, default=math.nan),
        "output_tok_s": sum(len(answer.arrivals_ms) for answer in simulation.answers.values()) / wall_s,
        "input_tok_s": sum(len(prompt) for prompt, _ in workload.trace) / wall_s,
        "wall_s": wall_s,
        "steps": len(device.steps),
        "held_plans": simulation.engine.load().held_plans,
        "late_plans": simulation.engine.load().late_plans,
        "device_idle_ms": device.idle_ms,
        "mixed_steps": len(mixed),
        "prefill_tokens_per_mixed_step": statistics.mean([step[0] for step in mixed]),
        "apart_ttft_s": figures.percentile([(a.arrivals_ms[0] - a.sent_ms) / 1e3 for a in apart], 0.5),
    }


def main() -> None:
    """Simulates the workloads asked for, prints them, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=_DEFAULT, help=f"of {', '.join(workloads.WORKLOADS)}")
    parser.add_argument("--target-ms", type=float, default=0.0, help="step_time_target_ms; 0: the default of a GPU")
    parser.add_argument("--max-tokens", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--rows", type=int, default=256, help="max_num_seqs")
    parser.add_argument("--slowness", type=float, default=1.0, help="a device so many times slower")
    parser.add_argument("--noise", type=float, default=0.05, help="standard deviation of a step's duration, relative")
    parser.add_argument("--hiccups", type=float, default=0.005, help="share of steps that take 2 ms longer")
    parser.add_argument("--ahead", action="store_true", help="hold no plan back: each is sent a whole step ahead")
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals of open loops so many times as fast")
    parser.add_argument("--seed", type=int, default=0, help="of the workload and of the noise")
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    arguments = parser.parse_args()
    results = [simulate(name, arguments) for name in arguments.workloads.split(",")]
    print(
        "SIMULATED             TTFT ms p50     p95   ITL ms p50    p99    max    out tok/s  in tok/s  steps  "
        "tokens/mixed step  held  late  idle ms"
    )
    for figure in results:
        print(
            f"{figure['workload']:20} {figure['ttft_p50_ms']:12.1f} {figure['ttft_p95_ms']:7.1f} "
            f"{figure['itl_p50_ms']:12.2f} "
            f"{figure['itl_p99_ms']:6.2f} {figure['itl_max_ms']:6.1f} {figure['output_tok_s']:12,.0f} "
            f"{figure['input_tok_s']:9,.0f} "
            f"{figure['steps']:6} {figure['prefill_tokens_per_mixed_step']:8.0f} "
            f"{figure['held_plans']:16} {figure['late_plans']:5} {figure['device_idle_ms']:8.0f}"
            + (
                f"  long prompt: first token after {figure['apart_ttft_s']:.1f} s"
                if figure["apart_ttft_s"] == figure["apart_ttft_s"]
                else ""
            )
        )
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    figures.report("simulate_budget", {"simulated": True, **settings, "results": results}, arguments.json)


if __name__ == "__main__":
    main()
