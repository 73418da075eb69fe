"""What one step costs the engine on one core, without a model.

It counts plan, encode, settle, stops, token log and outboxes.

    python -m benchmarks.bench_scheduler --json FILE

A fake worker answers every sample with a token at once; its own time is not counted. For each
number of decoding rows and of waiting requests the batch is filled first, then steps are timed with
two in flight, as the backend runs them. A quarter of the rows have a stop string. In the cases
called parked, a row is free, and all that wait are of a tenant that runs one request and may not
take the blocks for another (`kv_cache_share`). `p50` and `p99` are elapsed time; `cpu` is the
thread's own CPU time, which says nearly the same on a machine that does other things too.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import time
from typing import Literal, NamedTuple

import numpy as np

from benchmarks import figures
from headrace_backend.config import EngineConfig
from headrace_backend.engine.engine import Engine
from headrace_backend.engine.request import (
    AbortCause,
    EngineRequest,
    ModelLimits,
    Subscriber,
    TenantLimits,
)
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_request.request import Request
from headrace_request.stop import Stop

VOCAB_SIZE = 32_000
PROMPT_TOKENS = 100
BLOCK_SIZE: Literal[16] = 16
END_OF_TEXT = np.array([2], np.int32).tobytes()
NUM_STREAMS = 4
# What a step claims to take.
STEP_NS = 5_000_000
LIMITS_US = {1: 60.0, 256: 600.0, 512: 1200.0}


class Case(NamedTuple):
    """One measurement."""

    rows: int
    waiting: int
    parked: bool = False


CASES = (
    Case(1, 0),
    Case(64, 0),
    Case(256, 0),
    Case(512, 0),
    Case(64, 100),
    Case(64, 10_000),
    Case(256, 100),
    Case(256, 10_000),
    Case(64, 10_000, parked=True),
    Case(256, 10_000, parked=True),
)


def build_engine(case: Case, num_steps: int) -> Engine:
    """An engine with room for the batch and the waiting requests."""
    max_tokens = num_steps + 128
    max_len = PROMPT_TOKENS + BLOCK_SIZE + max_tokens
    blocks_per_row = -(-max_len // BLOCK_SIZE)
    config = EngineConfig(
        model=pathlib.Path("none"),
        block_size=BLOCK_SIZE,
        max_num_seqs=case.rows + case.parked,
        max_num_batched_tokens=2048,
        max_waiting_requests=case.rows + case.waiting,
        max_waiting_tokens=1 << 28,
    )
    limits = ModelLimits(VOCAB_SIZE, max_len, (2,))
    token_bytes = [b"tok%d" % token for token in range(VOCAB_SIZE)]
    engine = Engine(config, limits, token_bytes, time.monotonic_ns)
    engine.worker_ready(case.rows * (blocks_per_row + 1))
    generator = np.random.default_rng(0)
    for index in range(case.rows + (0 if case.parked else case.waiting)):
        strings = (b"never seen", b"\n\n") if index % 4 == 0 else ()
        # Different lengths, so that rows do not all need their next block in the same step.
        prompt = generator.integers(3, VOCAB_SIZE, PROMPT_TOKENS + index % BLOCK_SIZE, np.int32)
        asked = Request(prompt.tobytes(), Stop(max_tokens, strings=strings, token_ids=END_OF_TEXT))
        engine.add(EngineRequest(f"r{index}", asked), Subscriber(index % NUM_STREAMS, index + 1))
    if case.parked:
        add_parked(engine, case, max_tokens, blocks_per_row)
    return engine


def add_parked(engine: Engine, case: Case, max_tokens: int, blocks_per_row: int) -> None:
    """Adds one request that runs, in the place of a row, and many behind it.

    These need all blocks of their tenant's share.
    """
    engine.abort("r0", "", AbortCause.CANCELLED)
    limits = TenantLimits(kv_cache_share=1 / (case.rows * (blocks_per_row + 1)) * blocks_per_row)
    running = np.full(PROMPT_TOKENS, 3, np.int32)
    waiting = np.full(blocks_per_row * BLOCK_SIZE - BLOCK_SIZE - 1, 4, np.int32)
    for index in range(case.waiting + 1):
        prompt, num_outputs = (waiting, 1) if index else (running, max_tokens)
        asked = Request(prompt.tobytes(), Stop(num_outputs))
        request = EngineRequest(f"p{index}", asked, tenant="parked", limits=limits)
        engine.add(request, Subscriber(index % NUM_STREAMS, 100_000 + index))


class Stopwatch:
    """Adds up elapsed and CPU time between start and stop."""

    def __init__(self) -> None:
        """At zero."""
        self.reset()

    def reset(self) -> None:
        """Back to zero."""
        self.wall_ns = self.cpu_ns = 0

    def start(self) -> None:
        """Begins a span."""
        self._cpu_began = time.thread_time_ns()
        self._began = time.perf_counter_ns()

    def stop(self) -> None:
        """Ends it."""
        self.wall_ns += time.perf_counter_ns() - self._began
        self.cpu_ns += time.thread_time_ns() - self._cpu_began


class InstantWorker:
    """Answers each plan with tokens that stop nothing."""

    def __init__(self) -> None:
        """No step yet."""
        self._generator = np.random.default_rng(1)

    def run(self, encoded: bytes) -> bytes:
        """The result of one plan, as bytes on both sides."""
        plan = StepPlan.decode(encoded)
        tokens = self._generator.integers(3, VOCAB_SIZE, plan.sample.rows.size, np.int32)
        began_ns = plan.step_id * STEP_NS
        finite, checked = np.ones(tokens.size, np.uint8), np.ones(plan.forward.checked_indices.size, np.uint8)
        return StepResult(plan.step_id, began_ns, began_ns + STEP_NS, tokens, finite, checked_ok=checked).encode()


def measure(case: Case, num_steps: int) -> dict[str, float]:
    """Microseconds per step at a full batch of decoding rows."""
    engine = build_engine(case, num_steps)
    worker = InstantWorker()
    plans: list[bytes] = []
    elapsed = Stopwatch()

    def turn() -> None:
        """Plans until two are in flight, then settles one; only the engine's part is timed."""
        elapsed.start()
        while (plan := engine.plan()) is not None:
            plans.append(plan.encode())
        elapsed.stop()
        result = worker.run(plans.pop(0))
        elapsed.start()
        engine.settle(StepResult.decode(result))
        for outbox in engine.take_outboxes().values():
            outbox.tokens.tobytes(), outbox.handles.tobytes(), outbox.output_indices.tobytes()
        elapsed.stop()

    while engine.load().running_sequences < case.rows or not plans:
        turn()
    for _ in range(PROMPT_TOKENS * case.rows // 2048 + 8):
        turn()
    times_us, cpu_us = [], []
    for _ in range(num_steps):
        elapsed.reset()
        turn()
        times_us.append(elapsed.wall_ns / 1e3)
        cpu_us.append(elapsed.cpu_ns / 1e3)
    assert engine.load().running_sequences == case.rows, "the batch stayed full"
    centiles = statistics.quantiles(times_us, n=100)
    return {
        "rows": case.rows,
        "waiting": case.waiting,
        "parked": case.parked,
        "p50_us": centiles[49],
        "p99_us": centiles[98],
        "cpu_p50_us": statistics.median(cpu_us),
        "cpu_p99_us": statistics.quantiles(cpu_us, n=100)[98],
    }


def main() -> None:
    """Measures all cases, prints them, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    parser.add_argument("--steps", type=int, default=1000, help="timed steps per case")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results = []
    print("rows  waiting  parked  p50 us  p99 us  cpu p50  cpu p99  limit us")
    for case in CASES:
        result = measure(case, arguments.steps)
        results.append(result)
        limit = LIMITS_US.get(case.rows)
        print(
            f"{case.rows:4d}  {case.waiting:7d}  {'yes' if case.parked else 'no':>6s}  {result['p50_us']:6.1f}  "
            f"{result['p99_us']:6.1f}  "
            f"{result['cpu_p50_us']:7.1f}  {result['cpu_p99_us']:7.1f}  "
            f"{'-' if limit is None else limit}"
        )
    figures.report("scheduler", {"steps": arguments.steps, "results": results}, arguments.json)


if __name__ == "__main__":
    main()
