"""A worker that answers each plan at once with the bytes of one result, and computes nothing.

For `bench_hosts`. Owns the worker's side of the rings, as short as it can be.
"""

from __future__ import annotations

import argparse
import os

import numpy as np

from headrace_backend.step.messages import RecordKind
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_backend.step.ring import RingDescriptors, RingReader, RingWriter

_WRITE_TIMEOUT_S = 30.0
_SPIN_S = 50e-6


def _descriptors(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _answer(plan: StepPlan) -> bytes:
    count = plan.sample.rows.size
    return StepResult(plan.step_id, 0, 0, np.full(count, 7, np.int32), np.ones(count, np.uint8)).encode()


def main() -> None:
    """Serves until it is asked to end, or its parent is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan-ring", required=True)
    parser.add_argument("--result-ring", required=True)
    options, _ = parser.parse_known_args()
    parent = os.getppid()
    plans = RingReader(*_descriptors(options.plan_ring))
    memory, data, space = _descriptors(options.result_ring)
    results = RingWriter(RingDescriptors(memory, (data,), space))
    while os.getppid() == parent:
        record = plans.read(1.0, _SPIN_S)
        if record is None:
            continue
        kind, payload = record
        if kind == RecordKind.SHUTDOWN:
            return
        results.write(RecordKind.STEP_RESULT, _answer(StepPlan.decode(payload)), _WRITE_TIMEOUT_S)


if __name__ == "__main__":
    main()
