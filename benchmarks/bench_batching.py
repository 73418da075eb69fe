"""In-flight against static batching: same engine, kernels and batch limit, lengths of mix1000.

`static`: a batch of fixed shape runs until its longest answer has ended; rows whose answers ended
early are computed on as padding, which is what an engine without in-flight batching does, and what
they generate is thrown away. `static_dropped`: the same, but ended rows leave the batch and stand
empty; a kinder rival, which only an engine that could also refill them can be. `in_flight`:
everything is sent at once and the scheduler fills each row as it falls free. Printed: useful output
tokens per second, and the reason for the difference, the share of row-steps without a useful token.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import random
import time
from typing import Any

from benchmarks.engine_session import Answer, EngineSession, engine_session
from benchmarks.figures import report
from benchmarks.workloads import mix1000

Trace = list[tuple[list[int], int]]
MODES = ("static", "static_dropped", "in_flight")


def fitted(trace: Trace, vocab_size: int, max_context: int) -> Trace:
    """The trace's lengths with prompts cut so that any output of the trace fits behind them.

    Ids are below the vocabulary size.
    """
    rng = random.Random(0)
    room = max_context - max(output for _, output in trace)
    return [([rng.randrange(10, vocab_size) for _ in range(min(len(p), room))], output) for p, output in trace]


async def _send(session: EngineSession, trace: Trace) -> list[Answer]:
    return list(await asyncio.gather(*(session.generate(prompt, output) for prompt, output in trace)))


async def _serve(session: EngineSession, trace: Trace, rows: int, mode: str) -> list[Answer]:
    """Serves the trace in one of MODES."""
    if mode == "in_flight":
        return await _send(session, trace)
    answers: list[Answer] = []
    for first in range(0, len(trace), rows):
        batch = trace[first : first + rows]
        longest = max(output for _, output in batch)
        padded = [(prompt, longest) for prompt, _ in batch] if mode == "static" else batch
        answers += await _send(session, padded)
    return answers


async def _measure(session: EngineSession, trace: Trace, rows: int, mode: str) -> dict[str, float]:
    before = (await session.load()).step_count
    begin = time.perf_counter()
    await _serve(session, trace, rows, mode)
    wall = time.perf_counter() - begin
    steps = (await session.load()).step_count - before
    useful = sum(output for _, output in trace)
    return {
        "output_tok_s": round(useful / wall, 1),
        "wall_s": round(wall, 2),
        "output_tokens": useful,
        "steps": steps,
        "ms_per_step": round(wall / steps * 1e3, 2),
        "idle_row_steps_share": round(1 - useful / (steps * rows), 4),
    }


async def run(model: pathlib.Path, requests: int, rows: int, seed: int, threads: int, device: str) -> dict[str, Any]:
    """All modes on fresh engines, so that none inherits another's cache."""
    figures: dict[str, Any] = {"requests": requests, "rows": rows, "seed": seed, "threads": threads}
    for mode in MODES:
        engine = {"model": str(model), "max_num_seqs": rows, "enable_prefix_cache": False, "worker_threads": threads}
        async with engine_session(engine | {"max_waiting_requests": requests + 1, "device": device}) as session:
            figures["device"] = session.model.device
            trace = fitted(mix1000(requests, seed), session.model.vocabulary_size, session.model.max_context_tokens)
            await _send(session, trace[:rows])
            figures[mode] = await _measure(session, trace, rows, mode)
    for mode in MODES[:2]:
        figures[f"ratio_to_{mode}"] = round(figures["in_flight"]["output_tok_s"] / figures[mode]["output_tok_s"], 3)
    return figures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path("models/demo"))
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    sizes = (options.requests, options.rows, options.seed, options.threads)
    report("batching", asyncio.run(run(options.model, *sizes, options.device)), options.json)


if __name__ == "__main__":
    main()
