"""A worker that computes nothing: what it samples follows from row and position.

It answers at once or at the end of steps of a set length.

For benchmarks of all that stands around a model. Owns the worker's side of the rings, as short as
it can be; the engine before it is the real one (`instant_backend`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import time

import numpy as np

from benchmarks.fake_backend import text_tokens
from headrace_backend.step.messages import MemoryPlan, RecordKind, WorkerReady, encode_message
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_backend.step.ring import RingDescriptors, RingReader, RingWriter
from headrace_backend.worker.lifetime import die_with_parent
from headrace_model_folder import ModelFolder

_WRITE_TIMEOUT_S = 30.0
_STRIDE = 37


class _Model:
    """Draws tokens with plain text."""

    def __init__(self, folder: ModelFolder, step_s: float) -> None:
        self._tokens = text_tokens(folder).astype(np.int32)
        self._step_s = step_s
        self._free_at_s = 0.0

    def run(self, payload: bytes) -> bytes:
        """The result of a plan.

        A step begins when the one before has ended and its plan is there.
        """
        plan = StepPlan.decode(payload)
        started_ns = time.monotonic_ns()
        sample = plan.sample
        tokens = self._tokens[(sample.rows * _STRIDE + sample.output_positions) % self._tokens.size]
        if self._step_s:
            self._free_at_s = max(started_ns / 1e9, self._free_at_s) + self._step_s
            time.sleep(max(0.0, self._free_at_s - time.monotonic()))
        finite, checked = np.ones(tokens.size, np.uint8), np.ones(plan.forward.checked_indices.size, np.uint8)
        ended_ns = time.monotonic_ns()
        return StepResult(plan.step_id, started_ns, ended_ns, tokens, finite, checked_ok=checked).encode()


def _descriptors(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _work(plans: RingReader, results: RingWriter, model: _Model) -> None:
    while True:
        record = plans.read(timeout_s=1.0)
        if record is None:
            continue
        kind, payload = record
        if kind == RecordKind.SHUTDOWN:
            return
        results.write(RecordKind.STEP_RESULT, model.run(payload), timeout_s=_WRITE_TIMEOUT_S)


def main() -> None:
    """Works until it is asked to end, or its engine ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, required=True)
    for name in ("--config-json", "--plan-ring", "--result-ring", "--rank", "--board", "--parent-pid"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    die_with_parent(int(options.parent_pid))
    config = json.loads(options.config_json)
    memory, data, space = _descriptors(options.result_ring)
    results = RingWriter(RingDescriptors(memory, (data,), space))
    num_blocks, block_size = config["num_blocks"], config["block_size"]
    model = _Model(ModelFolder.open(pathlib.Path(config["model"]), require_weights=False), options.step_ms / 1e3)
    plan = MemoryPlan("cpu", 1 << 30, 1 << 20, 1 << 16, 0, 1 << 20, 4096, num_blocks, block_size)
    for message in (plan, WorkerReady("cpu", num_blocks, block_size, 1000, {})):
        results.write(RecordKind.MESSAGE, encode_message(message), timeout_s=_WRITE_TIMEOUT_S)
    _work(RingReader(*_descriptors(options.plan_ring)), results, model)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
