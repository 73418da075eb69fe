"""In-flight against static batching: same engine, same kernels, same batch limit, the lengths of mix1000.

Static batching sends a batch and waits until its longest answer has ended before it sends the next; rows whose answers ended early
stand idle meanwhile. In-flight batching sends everything and lets the scheduler fill each row as it falls free. The benchmark prints the
tokens per second of both and the reason for the difference: the share of row-steps that did no work.
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


def fitted(trace: Trace, vocab_size: int, max_context: int) -> Trace:
    """The trace's lengths with prompts cut to what the context leaves and ids drawn below the vocabulary size."""
    rng = random.Random(0)
    return [
        ([rng.randrange(10, vocab_size) for _ in range(min(len(prompt), max_context - output))], output)
        for prompt, output in trace
    ]


async def _in_flight(session: EngineSession, trace: Trace) -> list[Answer]:
    return list(await asyncio.gather(*(session.generate(prompt, output) for prompt, output in trace)))


async def _static(session: EngineSession, trace: Trace, rows: int) -> list[Answer]:
    answers: list[Answer] = []
    for first in range(0, len(trace), rows):
        answers += await _in_flight(session, trace[first : first + rows])
    return answers


async def _measure(session: EngineSession, trace: Trace, rows: int, static: bool) -> dict[str, float]:
    before = (await session.load()).step_count
    begin = time.perf_counter()
    answers = await (_static(session, trace, rows) if static else _in_flight(session, trace))
    wall = time.perf_counter() - begin
    steps = (await session.load()).step_count - before
    tokens = sum(len(a.token_ids) for a in answers)
    worked = sum(a.done.step_count for a in answers if a.done)
    return {
        "output_tok_s": round(tokens / wall, 1),
        "wall_s": round(wall, 2),
        "output_tokens": tokens,
        "steps": steps,
        "idle_row_steps_share": round(1 - worked / (steps * rows), 4),
    }


async def run(model: pathlib.Path, requests: int, rows: int, seed: int, threads: int) -> dict[str, Any]:
    """Both ways on fresh engines, so that neither inherits the other's cache."""
    figures: dict[str, Any] = {"requests": requests, "rows": rows, "seed": seed}
    for name in ("static", "in_flight"):
        engine = {"model": str(model), "max_num_seqs": rows, "enable_prefix_cache": False, "worker_threads": threads}
        async with engine_session(engine | {"max_waiting_requests": requests + 1}) as session:
            assert session.model is not None
            trace = fitted(mix1000(requests, seed), session.model.vocabulary_size, session.model.max_context_tokens)
            await session.generate(trace[0][0], 8)
            figures[name] = await _measure(session, trace, rows, name == "static")
    figures["ratio"] = round(figures["in_flight"]["output_tok_s"] / figures["static"]["output_tok_s"], 3)
    return figures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path("models/demo"))
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    report(
        "batching",
        asyncio.run(run(options.model, options.requests, options.rows, options.seed, options.threads)),
        options.json,
    )


if __name__ == "__main__":
    main()
