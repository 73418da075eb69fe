"""The lower rungs of `bench_ladder`, on a plain model.

They are recompute, a cache, static batches, and in-flight batching over a contiguous cache.

Owns how each rung serves a trace. A process of its own, so that its memory is free again before the
engine starts: the trace comes as JSON on standard input, one line of JSON per rung goes out.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.plain_model import ContiguousCache, PlainModel
from benchmarks.shapes import shape_of
from benchmarks.workloads import Trace

Answers = list[list[int]]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclasses.dataclass(slots=True)
class _Row:
    """A running request."""

    output: int
    # Of the newest token, whose key and value are not in the cache yet.
    position: int
    answer: list[int]


class Rungs:
    """All rungs on one model; each serves a trace and returns the answers, in the trace's order."""

    def __init__(self, model: PlainModel, rows: int, max_len: int) -> None:
        self._model = model
        self._rows = rows
        self._max_len = max_len

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, device=self._model.device)

    def _cache(self, rows: int) -> ContiguousCache:
        return ContiguousCache(self._model.shape, rows, self._max_len, self._model.dtype, self._model.device)

    def recompute(self, trace: Trace) -> Answers:
        """Each token computes the whole sequence anew; one request at a time."""
        answers = []
        for prompt, output in trace:
            ids = list(prompt)
            for _ in range(output):
                token = self._model.prefill(self._tensor([ids]), self._tensor([len(ids)]), None, self._tensor([0]))
                ids.append(int(token))
            answers.append(ids[len(prompt) :])
        return answers

    def cached(self, trace: Trace) -> Answers:
        """A KV cache; one request at a time."""
        return self._batches(trace, 1)

    def static(self, trace: Trace) -> Answers:
        """Batches of fixed shape, with padded prompts.

        All rows run until the longest answer of the batch has ended.
        """
        return self._batches(trace, self._rows)

    def _batches(self, trace: Trace, size: int) -> Answers:
        cache = self._cache(size)
        answers: Answers = []
        for first in range(0, len(trace), size):
            batch = trace[first : first + size]
            longest = max(len(prompt) for prompt, _ in batch)
            ids = self._tensor([prompt + [0] * (longest - len(prompt)) for prompt, _ in batch])
            lengths = [len(prompt) for prompt, _ in batch]
            rows = self._tensor(list(range(len(batch))))
            tokens = self._model.prefill(ids, self._tensor(lengths), cache, rows)
            columns = [tokens]
            for step in range(max(output for _, output in batch) - 1):
                # Rows that have their answer are padding; they stay on their last slot.
                positions = [min(length + step, self._max_len - 1) for length in lengths]
                tokens = self._model.decode(tokens, self._tensor(positions), cache, rows, max(positions) + 1)
                columns.append(tokens)
            table = torch.stack(columns, dim=1).tolist()
            answers += [row[:output] for row, (_, output) in zip(table, batch, strict=True)]
        return answers

    def in_flight(self, trace: Trace) -> Answers:
        """A row whose answer has ended takes the next request at once.

        Prompts are computed alone, between steps.
        """
        cache, waiting = self._cache(self._rows), deque(enumerate(trace))
        answers: Answers = [[] for _ in trace]
        running: dict[int, _Row] = {}
        while waiting or running:
            for row in range(self._rows):
                if row not in running and waiting:
                    index, (prompt, output) = waiting.popleft()
                    inputs = self._tensor([prompt]), self._tensor([len(prompt)])
                    token = int(self._model.prefill(*inputs, cache, self._tensor([row])))
                    answers[index].append(token)
                    running[row] = _Row(output, len(prompt), answers[index])
            running = {row: state for row, state in running.items() if len(state.answer) < state.output}
            self._step(running, cache)
        return answers

    def _step(self, running: dict[int, _Row], cache: ContiguousCache) -> None:
        if not running:
            return
        rows = sorted(running)
        states = [running[row] for row in rows]
        positions = [state.position for state in states]
        inputs = self._tensor([state.answer[-1] for state in states]), self._tensor(positions)
        tokens = self._model.decode(*inputs, cache, self._tensor(rows), max(positions) + 1).tolist()
        for state, token in zip(states, tokens, strict=True):
            state.position += 1
            state.answer.append(token)


def _measured(name: str, serve: Callable[[Trace], Answers], trace: Trace, warm: Trace) -> dict[str, Any]:
    serve(warm)
    begin_s = time.perf_counter()
    tokens = sum(map(len, serve(trace)))
    wall_s = time.perf_counter() - begin_s
    return {
        "rung": name,
        "requests": len(trace),
        "output_tok_s": round(tokens / wall_s, 2),
        "wall_s": round(wall_s, 3),
    }


def main() -> None:
    """One job, as `bench_ladder` writes it."""
    job = json.load(sys.stdin)
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    trace: Trace = [(prompt, output) for prompt, output in job["trace"]]
    model = PlainModel(shape_of(pathlib.Path(job["model"])), DTYPES[job["dtype"]], torch.device(job["device"]))
    rungs = Rungs(model, job["rows"], job["max_len"])
    few, warm = job["few"], [(prompt, min(output, 4)) for prompt, output in trace]
    print(json.dumps(_measured("recompute", rungs.recompute, trace[:few], warm[:1])), flush=True)
    print(json.dumps(_measured("kv_cache", rungs.cached, trace[: 4 * few], warm[:1])), flush=True)
    print(json.dumps(_measured("static", rungs.static, trace, warm[: job["rows"]])), flush=True)
    print(json.dumps(_measured("in_flight", rungs.in_flight, trace, warm[: job["rows"]])), flush=True)


if __name__ == "__main__":
    main()
