"""A worker without a model.

It speaks the rings as the real one does, and draws each next token from the token before it and its
position.

The rule makes any mistake visible: a lost, doubled or stale token changes everything after it, and
so does recomputing with wrong inputs.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import pathlib
import random
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from headrace_backend.step.messages import (
    LoadProgress,
    MemoryPlan,
    Notice,
    QuantizationReport,
    RecordKind,
    StepRaised,
    WorkerFailed,
    WorkerReady,
    encode_message,
)
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_backend.step.rank_board import RankBoard
from headrace_backend.step.ring import RingDescriptors, RingReader, RingWriter
from headrace_backend.worker.lifetime import die_with_parent

VOCABULARY = 300
# Ids from here on are ordinary; the rule never draws one below.
FIRST_TOKEN = 4
# Of rank 0's start; each next rank takes a second longer in all of it.
_PHASES_S = {"ranks": 1.5, "ceilings": 0.3, "weights": 12.25, "profile": 0.8, "graphs": 6.5}


def next_token(token: int, position: int) -> int:
    """What the fake model says after `token` at `position`."""
    return FIRST_TOKEN + (31 * token + 7 * position + 11) % (VOCABULARY - FIRST_TOKEN)


def prompt_entry(token: int, num_tops: int) -> tuple[float, int, list[int]]:
    """What the fake model reports about a prompt's token.

    The entry has its log probability, its rank and the most likely tokens.
    """
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
        result.logprob_indices = np.array([i for i, _ in asked], np.int32)
        result.logprob_sampled = np.full(len(asked), -0.5, np.float32)
        result.logprob_ranks = np.ones(len(asked), np.int32)
        result.logprob_counts = np.array([count for _, count in asked], np.int32)
        result.top_token_ids = np.array(tops, np.int32)
        result.top_logprobs = np.full(len(tops), -0.5, np.float32)

    def _add_prompt_logprobs(self, result: StepResult, plan: StepPlan, tokens: list[int]) -> None:
        runs = plan.prompt_logprobs
        following = iter(runs.token_ids.tolist())
        entries = []
        for first, count, num_tops in zip(
            runs.first_indices.tolist(), runs.counts.tolist(), runs.num_tops.tolist(), strict=True
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


def gpu_plan(rank: int, num_blocks: int, block_size: int, is_measured: bool) -> MemoryPlan:
    """A plan with a value in every field, as only a GPU's has."""
    return MemoryPlan(
        device=f"cuda:{rank}",
        total_bytes=79 << 30,
        weight_bytes=15 << 30,
        activation_bytes=3 << 30,
        graph_bytes=700 << 20,
        kv_cache_bytes=60 << 30,
        kv_block_bytes=2 << 20,
        num_blocks=num_blocks,
        block_size=block_size,
        is_measured=is_measured,
        device_bytes=80 << 30,
        other_bytes=500 << 20,
        reserve_bytes=615 << 20,
        pinned_host_bytes=1 << 30,
        stream_bytes=256 << 20,
        state_bytes=3 << 28,
        num_checkpoints=4,
        checkpoint_bytes=3 << 24,
        rotary_bytes=64 << 20,
    )


def gpu_start(rank: int, num_blocks: int, block_size: int) -> list[object]:
    """What a worker with a GPU sends before its first step, with a value in every field."""
    quantization = QuantizationReport(
        "int4", 128, 4.25, 0.03, 0.09, "model.layers.0.mlp.down_proj", "int8", 8.03, 0.004
    )
    progress = [
        LoadProgress(phase, done, total, unit)
        for phase, total, unit in (("ranks", 2, "ranks"), ("weights", 15360, "MiB"), ("graphs", 28, "shapes"))
        for done in (0, total)
    ]
    return [
        Notice("NVIDIA X: its launch rules were not measured"),
        gpu_plan(rank, num_blocks, block_size, is_measured=False),
        *progress,
        gpu_plan(rank, num_blocks, block_size, is_measured=True),
        WorkerReady(
            device=f"cuda:{rank}",
            num_blocks=num_blocks,
            block_size=block_size,
            parameter_count=8_030_261_248,
            phases_s={name: seconds + rank for name, seconds in _PHASES_S.items()},
            load_gb_s=1.31,
            memory=gpu_plan(rank, num_blocks, block_size, is_measured=True),
            captured_mixed_sizes=(64, 128, 256),
            copy_bytes_per_s=4.1e12,
            matmul_flops_per_s=7.2e14,
            quantization=quantization,
        ),
    ]


def start_on_cpu(options: argparse.Namespace, config: dict[str, Any], send: Callable[[object], None]) -> None:
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
    send(
        WorkerReady(
            "cpu",
            options.blocks,
            block_size,
            1000,
            phases_s,
            captured_mixed_sizes=captured,
            marks_per_step=max(options.parts, 1),
        )
    )


# A step that computes it does something to its worker; the rule never draws it.
POISON = 3
# To the real worker with a poison, which may draw shorter runs of it.
POISON_PROMPT = [POISON] * 9


def die_or_hang(poison: str) -> NoReturn:
    """A worker that can't say what happened to it."""
    if poison == "exit":
        os._exit(7)
    if poison == "crash":
        # Its stack is nobody's business here.
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)
    while True:
        time.sleep(1.0)


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
    # Besides, a random sleep of up to 20 ms in each step, noted in this file: step id, then when
    # the step had ended, CLOCK_MONOTONIC ns.
    parser.add_argument("--random-sleeps", type=pathlib.Path)
    parser.add_argument("--start-s", type=float, default=0.0)
    # Tokens of the mixed steps that it claims to replay from graphs.
    parser.add_argument("--captured", type=int, nargs="+", default=[])
    parser.add_argument("--refuse-model", action="store_true")
    parser.add_argument("--die-at-start", action="store_true")
    # Where a file of this name exists, memory is too small, and the file is gone then.
    parser.add_argument("--no-memory-file", type=pathlib.Path)
    # Where a file of this name exists, a step that reads it fails as a forward pass that raises
    # would.
    parser.add_argument("--fail-file", type=pathlib.Path)
    parser.add_argument("--fails-by", choices=["raise", "fail"], default="fail")
    # Where a file of this name exists, a step takes memory until the process is ended, and the file
    # is gone then.
    parser.add_argument("--hungry-file", type=pathlib.Path)
    # What becomes of the worker in a step that computes POISON, every time.
    parser.add_argument("--poison", choices=["raise", "fail", "hang", "exit", "crash"])
    # Parts of a step that are marked on the board as they are done, and how long each takes.
    parser.add_argument("--parts", type=int, default=0)
    parser.add_argument("--part-ms", type=float, default=0.0)
    parser.add_argument("--config-json", required=True)
    parser.add_argument("--plan-ring", required=True)
    parser.add_argument("--result-ring", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--follows", action="store_true")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--board", type=int, required=True)
    # What several ranks find each other by, on one host or on several; nobody is to be found here.
    parser.add_argument("--store", type=int)
    parser.add_argument("--meeting")
    # It starts as a worker with a GPU does: every field of what it sends has a value.
    parser.add_argument("--gpu", action="store_true")
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
    if options.gpu:
        for message in gpu_start(options.rank, options.blocks, config["block_size"]):
            send(message)
    else:
        start_on_cpu(options, config, send)
    line = RankBoard(options.board, config["pp"] * config["tp"]).line(options.rank)
    model = FakeModel(config["max_num_seqs"])
    while True:
        record = plans.read(timeout_s=1.0)
        if record is None:
            continue
        kind, payload = record
        if kind == RecordKind.SHUTDOWN:
            return 0
        plan = StepPlan.decode(payload)
        line.begin_step(plan.step_id)
        poison = options.poison if POISON in plan.forward.token_ids else None
        if options.fail_file is not None and options.fail_file.exists():
            # Once: the next worker may take its first step before a test has seen this one fail.
            options.fail_file.unlink(missing_ok=True)
            poison = options.fails_by
        if poison == "raise":
            send(StepRaised("forward pass raised", plan.step_id))
            while (record := plans.read(timeout_s=1.0)) is None or record[0] == RecordKind.STEP_PLAN:
                pass
            assert record[0] == RecordKind.RESET
            continue
        if poison == "fail":
            send(WorkerFailed("forward pass failed", invalid_model=False, step_id=plan.step_id))
            return 1
        if poison is not None:
            die_or_hang(poison)
        if options.hungry_file is not None and options.hungry_file.exists():
            options.hungry_file.unlink()
            take_all_memory()
        time.sleep(options.step_ms / 1000)
        for _ in range(options.parts):
            time.sleep(options.part_ms / 1000)
            line.make_progress()
        if options.random_sleeps is not None:
            time.sleep(random.uniform(0, 0.02))
            with options.random_sleeps.open("a") as noted:
                noted.write(f"{plan.step_id} {time.monotonic_ns()}\n")
        result = model.run(plan).encode()
        if not options.follows:
            results.write(RecordKind.STEP_RESULT, result, timeout_s=30.0)


if __name__ == "__main__":
    raise SystemExit(main())
