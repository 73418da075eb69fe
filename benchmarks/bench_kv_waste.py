"""How much of the KV cache is allocated but unused: paged blocks against a contiguous cache.

Requests have the lengths of mix1000.

The real engine plans every step; a worker without a model answers. Allocated slots and used slots
are read off the step plans themselves (block table updates and positions), so the figure holds for
what a worker is asked to keep. All steps weigh the same. Beside it, for the same steps, stands what
a cache would waste that reserves for each running sequence one contiguous stretch of (a) the whole
context, (b) its prompt and max_tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import time
from typing import Any, Literal

import numpy as np

from benchmarks.figures import report
from benchmarks.workloads import mix1000
from headrace_backend.config import EngineConfig
from headrace_backend.engine.engine import Engine
from headrace_backend.engine.request import EngineRequest, ModelLimits
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_request.request import Request
from headrace_request.sampling import Sampling
from headrace_request.stop import Stop

CONTEXT = 4096


@dataclasses.dataclass(slots=True)
class Row:
    """What a worker holds for one row."""

    reserved: int
    allocated: int = 0
    used: int = 0


@dataclasses.dataclass(slots=True)
class Sums:
    """Slots, summed over steps."""

    used: int = 0
    paged: int = 0
    reserved: int = 0
    whole_context: int = 0
    steps: int = 0
    rows: int = 0


class Ledger:
    """Follows the plans and adds up what each kind of cache holds."""

    def __init__(self, block_size: int, reserved: dict[int, int]) -> None:
        self._block_size = block_size
        self._reserved = reserved
        self._rows: dict[int, Row] = {}
        self.sums = Sums()

    def follow(self, plan: StepPlan) -> None:
        """One step more."""
        for row in plan.released_rows.tolist():
            self._rows.pop(row, None)
        for admission in plan.admissions:
            self._rows[admission.row] = Row(self._reserved[admission.sampling.seed])
        forward = plan.forward
        for row, count in zip(forward.table_rows.tolist(), forward.table_counts.tolist(), strict=True):
            self._rows[row].allocated += count * self._block_size
        for row, start, count in zip(
            forward.rows.tolist(), forward.starts.tolist(), forward.counts.tolist(), strict=True
        ):
            self._rows[row].used = start + count
        self._add()

    def _add(self) -> None:
        rows, sums = self._rows.values(), self.sums
        sums.used += sum(row.used for row in rows)
        sums.paged += sum(row.allocated for row in rows)
        sums.reserved += sum(row.reserved for row in rows)
        sums.whole_context += CONTEXT * len(rows)
        sums.rows += len(rows)
        sums.steps += 1


def request(index: int, prompt: list[int], output: int) -> EngineRequest:
    """A greedy request of fixed length.

    Its seed tells the ledger which request a row belongs to.
    """
    sampling = Sampling(temperature=0.0, seed=index)
    asked = Request(np.asarray(prompt, np.int32).tobytes(), Stop(output), sampling)
    return EngineRequest(f"r{index}", asked, detached=True)


def answer(plan: StepPlan) -> StepResult:
    """Any token for every sample."""
    samples = plan.sample.rows.size
    now = time.monotonic_ns()
    tokens, finite = np.full(samples, 7, np.int32), np.ones(samples, np.uint8)
    checked = np.ones(plan.forward.checked_indices.size, np.uint8)
    return StepResult(plan.step_id, now, now, tokens, finite, checked_ok=checked)


def run(requests: int, rows: int, block_size: Literal[16, 32, 64], seed: int) -> dict[str, Any]:
    """Serves the whole trace and returns shares of allocated slots that are not used.

    They are averaged over steps.
    """
    trace = mix1000(requests, seed)
    config = EngineConfig(
        model=pathlib.Path("none"),
        block_size=block_size,
        max_num_seqs=rows,
        enable_prefix_cache=False,
        max_waiting_requests=requests,
    )
    engine = Engine(
        config, ModelLimits(vocab_size=120_000, max_model_len=CONTEXT, eos_token_ids=()), None, time.monotonic_ns
    )
    engine.worker_ready(rows * CONTEXT // block_size)
    for index, (prompt, output) in enumerate(trace):
        engine.add(request(index, prompt, output), None)
    ledger = Ledger(block_size, {index: len(prompt) + output for index, (prompt, output) in enumerate(trace)})
    for _ in itertools.count():
        plan = engine.plan()
        if plan is None:
            break
        ledger.follow(plan)
        engine.settle(answer(plan))
    sums = ledger.sums
    return {
        "requests": requests,
        "rows": rows,
        "block_size": block_size,
        "seed": seed,
        "steps": sums.steps,
        "mean_rows": round(sums.rows / sums.steps, 2),
        "waste_paged": round(1 - sums.used / sums.paged, 4),
        "waste_contiguous_prompt_and_max_tokens": round(1 - sums.used / sums.reserved, 4),
        "waste_contiguous_whole_context": round(1 - sums.used / sums.whole_context, 4),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--block-size", type=int, choices=(16, 32, 64), default=16)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    report("kv_waste", run(options.requests, options.rows, options.block_size, options.seed), options.json)


if __name__ == "__main__":
    main()
