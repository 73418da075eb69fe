"""The engine against `transformers` generate on one machine, with fixed output lengths.

Weights, threads and type are equal, and both are greedy.

Development-only (transformers is no dependency of the server). Two cases: one request alone, and
mixed lengths, where transformers gets left-padded batches of 32 that run until their longest output
is done, and the engine gets the same requests at once with 32 rows. Runs are interleaved; medians
and spread are reported. The outputs of both are compared token by token.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.bench_batching import Trace, fitted
from benchmarks.engine_session import EngineSession, engine_session
from benchmarks.figures import report
from benchmarks.workloads import mix1000

ROWS = 32


class Rival:
    """transformers with its KV cache, in this process."""

    def __init__(self, model: pathlib.Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None

    def batch(self, trace: Trace) -> list[list[int]]:
        """One padded batch, run until the longest output is done.

        Each output is cut to its own length.
        """
        width, steps = max(len(p) for p, _ in trace), max(o for _, o in trace)
        ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in trace])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in trace])
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=mask, do_sample=False, min_new_tokens=steps, max_new_tokens=steps, pad_token_id=0
            )
        return [row[width : width + output].tolist() for row, (_, output) in zip(out, trace, strict=True)]

    def run(self, trace: Trace) -> list[list[int]]:
        """All requests, in batches of 32."""
        return [ids for first in range(0, len(trace), ROWS) for ids in self.batch(trace[first : first + ROWS])]


async def _ours(session: EngineSession, trace: Trace) -> list[list[int]]:
    answers = await asyncio.gather(*(session.generate(prompt, output) for prompt, output in trace))
    return [answer.token_ids for answer in answers]


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of requests whose outputs are equal to the last token."""
    return round(sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours), 4)


async def _compare(session: EngineSession, rival: Rival, trace: Trace, repeats: int) -> dict[str, Any]:
    tokens = sum(output for _, output in trace)
    mine, other = [], []
    ours: list[list[int]] = []
    theirs: list[list[int]] = []
    for _ in range(repeats):
        begin = time.perf_counter()
        ours = await _ours(session, trace)
        middle = time.perf_counter()
        theirs = await asyncio.to_thread(rival.run, trace)
        mine.append(tokens / (middle - begin))
        other.append(tokens / (time.perf_counter() - middle))
    return {
        "headrace_tok_s": round(statistics.median(mine), 1),
        "headrace_range": [round(min(mine), 1), round(max(mine), 1)],
        "transformers_tok_s": round(statistics.median(other), 1),
        "transformers_range": [round(min(other), 1), round(max(other), 1)],
        "ratio": round(statistics.median(mine) / statistics.median(other), 3),
        "equal_outputs_share": _agreement(ours, theirs),
    }


async def run(model: pathlib.Path, requests: int, threads: int, repeats: int) -> dict[str, Any]:
    """Both cases."""
    engine = {"model": str(model), "dtype": "fp32", "max_num_seqs": ROWS, "enable_prefix_cache": False}
    async with engine_session(engine | {"worker_threads": threads, "device": "cpu"}) as session:
        rival = Rival(model, threads)
        trace = fitted(mix1000(requests, 3), session.model.vocabulary_size, session.model.max_context_tokens)
        single = fitted([(list(range(64)), 256)], session.model.vocabulary_size, session.model.max_context_tokens)
        await _compare(session, rival, single, 1)
        return {
            "threads": threads,
            "single": await _compare(session, rival, single, repeats),
            "mixed_32": {"requests": requests, **await _compare(session, rival, trace, repeats)},
        }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path("models/demo"))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    figures = asyncio.run(run(options.model, options.requests, options.threads, options.repeats))
    report("transformers", figures, options.json)


if __name__ == "__main__":
    main()
