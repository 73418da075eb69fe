"""A worker without a model: speaks the rings as the real one does, and draws each next token from the token before it and its position.

The rule makes any mistake visible: a lost, doubled or stale token changes everything after it, and so does recomputing with wrong inputs.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import pathlib
import random
import signal
import time
from typing import NoReturn

import numpy as np

from headrace_backend.ring import RingDescriptors, RingReader, RingWriter
from headrace_backend.step_plan import StepPlan, StepResult
from headrace_backend.worker.lifetime import die_with_parent
from headrace_backend.worker_messages import (
    LoadProgress,
    MemoryPlan,
    RecordKind,
    WorkerFailed,
    WorkerReady,
    encode_message,
)

VOCABULARY = 300
# Ids from here on are ordinary; the rule never draws one below.
FIRST_TOKEN = 4


def next_token(token: int, position: int) -> int:
    """What the fake model says after `token` at `position`."""
    return FIRST_TOKEN + (31 * token + 7 * position + 11) % (VOCABULARY - FIRST_TOKEN)


def prompt_entry(token: int, num_tops: int) -> tuple[float, int, list[int]]:
    """What the fake model tells of a token of a prompt: its log probability, its rank, the most likely tokens."""
    return -token / 4, 1 + token % 9, [(token + offset) % VOCABULARY for offset in range(num_tops)]


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """The whole continuation of a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens) - 1))
    return tokens[len(prompt) :]


class FakeModel:
    def __init__(self, num_rows: int) -> None:
        self.last_sampled = [0] * num_rows
        self.num_logprobs = [-1] * num_rows

    def run(self, plan: StepPlan) -> StepResult:
        started = time.monotonic_ns()
        for admission in plan.admissions:
            self.num_logprobs[admission.row] = admission.num_logprobs
        tokens, positions = self._flatten(plan)
        rows = plan.sample.rows.tolist()
        sampled = [next_token(tokens[i], positions[i]) for i in plan.sample.token_indices.tolist()]
        for row, token in zip(rows, sampled, strict=True):
            self.last_sampled[row] = token
        result = StepResult(
            plan.step_id,
            started,
            time.monotonic_ns(),
            np.array(sampled, np.int32),
            np.ones(len(sampled), np.uint8),
            checked_ok=np.ones(plan.forward.checked_indices.size, np.uint8),
        )
        self._add_logprobs(result, rows, sampled)
        self._add_prompt_logprobs(result, plan, tokens)
        return result

    def _flatten(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        forward = plan.forward
        known = iter(forward.token_ids.tolist())
        tokens: list[int] = []
        positions: list[int] = []
        columns = (forward.rows, forward.starts, forward.counts, forward.known_counts)
        for row, start, count, known_count in zip(*(column.tolist() for column in columns), strict=True):
            tokens += [next(known) for _ in range(known_count)]
            tokens += [self.last_sampled[row]] * (count - known_count)
            positions += range(start, start + count)
        return tokens, positions

    def _add_logprobs(self, result: StepResult, rows: list[int], sampled: list[int]) -> None:
        asked = [(i, self.num_logprobs[row]) for i, row in enumerate(rows) if self.num_logprobs[row] >= 0]
        tops = [(sampled[i] + j) % VOCABULARY for i, count in asked for j in range(count)]
        result.logprob_samples = np.array([i for i, _ in asked], np.int32)
        result.logprob_sampled = np.full(len(asked), -0.5, np.float32)
        result.logprob_ranks = np.ones(len(asked), np.int32)
        result.logprob_counts = np.array([count for _, count in asked], np.int32)
        result.top_token_ids = np.array(tops, np.int32)
        result.top_logprobs = np.full(len(tops), -0.5, np.float32)

    def _add_prompt_logprobs(self, result: StepResult, plan: StepPlan, tokens: list[int]) -> None:
        told = plan.prompt_logprobs
        following = iter(told.token_ids.tolist())
        entries = []
        for first, count, num_tops in zip(
            told.first_indices.tolist(), told.counts.tolist(), told.num_tops.tolist(), strict=True
        ):
            for index in range(first, first + count):
                token = next(following)
                assert index == first + count - 1 or tokens[index + 1] == token, "the token after it is another"
                entries.append(prompt_entry(token, num_tops))
        tops = [top for _, _, ids in entries for top in ids]
        result.prompt_sampled = np.array([sampled for sampled, _, _ in entries], np.float32)
        result.prompt_ranks = np.array([rank for _, rank, _ in entries], np.int32)
        result.prompt_top_token_ids = np.array(tops, np.int32)
        result.prompt_top_logprobs = np.full(len(tops), -0.5, np.float32)


def take_all_memory() -> NoReturn:
    taken = []
    while True:
        taken.append(bytearray(b"x") * (16 << 20))


def descriptors(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    faulthandler.register(signal.SIGUSR1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=0.0)
    # Besides, a random sleep of up to 20 ms in each step, noted in this file: step id, then when the step had ended, CLOCK_MONOTONIC ns.
    parser.add_argument("--random-sleeps", type=pathlib.Path)
    parser.add_argument("--start-s", type=float, default=0.0)
    # Tokens of the mixed steps that it claims to replay from graphs.
    parser.add_argument("--captured", type=int, nargs="+", default=[])
    parser.add_argument("--refuse-model", action="store_true")
    parser.add_argument("--die-at-start", action="store_true")
    # Where a file of this name exists, memory is too small, and the file is gone then.
    parser.add_argument("--no-memory-file", type=pathlib.Path)
    # Where a file of this name exists, a step that reads it fails as a forward pass that raises would.
    parser.add_argument("--fail-file", type=pathlib.Path)
    # Where a file of this name exists, a step takes memory until the process is ended, and the file is gone then.
    parser.add_argument("--hungry-file", type=pathlib.Path)
    # A step that computes this token of a prompt fails, every time.
    parser.add_argument("--poison-token", type=int, default=-1)
    parser.add_argument("--config-json", required=True)
    parser.add_argument("--plan-ring", required=True)
    parser.add_argument("--result-ring", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    # What several ranks share; there is nothing to share here.
    parser.add_argument("--ranks")
    # This rank says how far it is and then nothing more, while the others wait for it.
    parser.add_argument("--silent-rank", type=int, default=-1)
    options = parser.parse_args()
    die_with_parent(options.parent_pid)
    config = json.loads(options.config_json)
    plans = RingReader(*descriptors(options.plan_ring))
    memory, data, space = descriptors(options.result_ring)
    results = RingWriter(RingDescriptors(memory, (data,), space))

    def send(message: object) -> None:
        results.write(RecordKind.MESSAGE, encode_message(message), timeout_s=30.0)

    if options.die_at_start:
        return 1
    if options.refuse_model:
        send(WorkerFailed("model.safetensors: tensor 'x' is missing", invalid_model=True))
        return 2
    if options.no_memory_file is not None and options.no_memory_file.exists():
        options.no_memory_file.unlink()
        send(WorkerFailed("weights 2.0 MiB; 1.0 MiB are free", invalid_model=True, does_not_fit=True))
        return 2
    block_size = config["block_size"]
    send(MemoryPlan("cpu", 1 << 30, 1 << 20, 1 << 16, 0, 1 << 20, 4096, options.blocks, block_size))
    if options.rank == options.silent_rank:
        send(LoadProgress("weights", 3, 40, "MiB"))
        signal.pause()
    send(LoadProgress("weights", 1, 1, "tensors"))
    if options.silent_rank >= 0:
        send(LoadProgress("ranks", 1, config["tp"], "ranks"))
        signal.pause()
    time.sleep(options.start_s)
    captured = tuple(options.captured)
    phases_s = {"weights": options.start_s}
    send(WorkerReady("cpu", options.blocks, block_size, 1000, phases_s, captured_mixed_sizes=captured))
    model = FakeModel(config["max_num_seqs"])
    while True:
        record = plans.read(timeout_s=1.0)
        if record is None:
            continue
        kind, payload = record
        if kind == RecordKind.SHUTDOWN:
            return 0
        plan = StepPlan.decode(payload)
        poisoned = options.poison_token in plan.forward.token_ids
        if poisoned or (options.fail_file is not None and options.fail_file.exists()):
            if options.fail_file is not None:
                # Once: the next worker may take its first step before a test has seen this one fail.
                options.fail_file.unlink(missing_ok=True)
            send(WorkerFailed("forward pass failed", invalid_model=False, step_id=plan.step_id))
            return 1
        if options.hungry_file is not None and options.hungry_file.exists():
            options.hungry_file.unlink()
            take_all_memory()
        time.sleep(options.step_ms / 1000)
        if options.random_sleeps is not None:
            time.sleep(random.uniform(0, 0.02))
            with options.random_sleeps.open("a") as noted:
                noted.write(f"{plan.step_id} {time.monotonic_ns()}\n")
        result = model.run(plan).encode()
        if options.rank == 0:
            results.write(RecordKind.STEP_RESULT, result, timeout_s=30.0)


if __name__ == "__main__":
    raise SystemExit(main())
