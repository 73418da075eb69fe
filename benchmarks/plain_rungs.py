"""The lower rungs of `bench_ladder`, on a plain model.

They are recompute, a cache, static batches, and in-flight batching over a contiguous cache. Beside
them: what a token costs with and without a cache, by context, and attention that writes its scores
to memory against a fused kernel.

Owns how each rung serves a trace. A process of its own, so that its memory is free again before the
larger engines start. Standard input has a line of JSON with the job, and an empty line once nothing
else runs on the device; each line of standard output is one object of JSON: `{"ready": true}` when
the weights lie there, then the rungs, `{"contexts": [...]}` and, on a GPU, `{"attention": [...]}`.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import pathlib
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.plain_attention import compared_attention
from benchmarks.plain_model import ContiguousCache, PlainModel
from benchmarks.shapes import shape_of
from benchmarks.workloads import Trace

Answers = list[list[int]]
_CONTEXTS = (512, 2048, 8192, 32_768)
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


def contexts(model: PlainModel, longest: int) -> list[dict[str, Any]]:
    """Milliseconds of one token with and without a cache, behind contexts of several lengths.

    Args:
        model: The plain model.
        longest: Longest context, in tokens, of those that are tried.
    """
    return [_at_context(model, tokens) for tokens in _CONTEXTS if tokens <= longest]


def _at_context(model: PlainModel, tokens: int) -> dict[str, Any]:
    ids = torch.randint(10, model.shape.vocab_size, (1, tokens), device=model.device)
    row, length = torch.tensor([0], device=model.device), torch.tensor([tokens], device=model.device)
    cache = ContiguousCache(model.shape, 1, tokens, model.dtype, model.device)

    def anew() -> int:
        return int(model.prefill(ids, length, None, row))

    def cached() -> int:
        return int(model.decode(ids[:, -1], length - 1, cache, row, tokens))

    # Long ones by the clock once: shorter ones before them have warmed up what there is.
    repeats = 2 if tokens < _CONTEXTS[-1] else 1
    recompute_ms, cache_ms = _fastest_ms(anew, repeats), _fastest_ms(cached, 2)
    return {
        "context": tokens,
        "recompute_ms": round(recompute_ms, 3),
        "kv_cache_ms": round(cache_ms, 3),
        "gain": round(recompute_ms / cache_ms, 2),
    }


def _fastest_ms(run: Callable[[], object], repeats: int) -> float:
    """The fastest of some runs; the first one of a size may compile and allocate."""
    taken_ms = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        run()
        taken_ms.append((time.perf_counter() - begin_s) * 1e3)
    return min(taken_ms)


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def _serve_all(rungs: Rungs, trace: Trace, rows: int, few: int) -> None:
    warm = [(prompt, min(output, 4)) for prompt, output in trace]
    _say(**_measured("recompute", rungs.recompute, trace[:few], warm[:1]))
    _say(**_measured("kv_cache", rungs.cached, trace[: 2 * few], warm[:1]))
    _say(**_measured("static", rungs.static, trace, warm[:rows]))
    _say(**_measured("in_flight", rungs.in_flight, trace, warm[:rows]))


def main() -> None:
    """One job, as `bench_ladder` writes it."""
    job = json.loads(sys.stdin.readline())
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    trace: Trace = [(prompt, output) for prompt, output in job["trace"]]
    model = PlainModel(shape_of(pathlib.Path(job["model"])), DTYPES[job["dtype"]], torch.device(job["device"]))
    _say(ready=True)
    sys.stdin.readline()
    _serve_all(Rungs(model, job["rows"], job["max_len"]), trace, job["rows"], job["few"])
    _say(contexts=contexts(model, job["longest_context"]))
    on_gpu = model.device.type == "cuda"
    # Scores of 8,192 tokens take what the weights lie in.
    del model
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        _say(attention=compared_attention())


if __name__ == "__main__":
    main()
