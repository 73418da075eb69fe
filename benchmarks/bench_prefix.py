"""What a prefix hit saves: time to first token of prompts that share a long beginning.

It is measured with the beginning cached and without.

Every prompt is `shared` tokens plus `own` tokens. Cold: a shared part that the cache has not seen.
Warm: one that an earlier request left behind. Cold and warm requests alternate on one engine, one
at a time; the engine's own count of cached tokens is printed beside the times.

Then `wave` requests come at once, whose shared part nobody has sent before: how many of their
prompts' tokens were computed, and how long all of them took.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import random
import statistics
import time
from typing import Any

from benchmarks.engine_session import EngineSession, engine_session
from benchmarks.figures import report


async def _pair(
    session: EngineSession, rng: random.Random, vocab: int, shared: int, own: int
) -> list[tuple[float, int]]:
    """One cold and one warm request: (TTFT in ms, cached tokens) of each."""
    prefix = [rng.randrange(10, vocab) for _ in range(shared)]
    measured = []
    for _ in range(2):
        answer = await session.generate([*prefix, *(rng.randrange(10, vocab) for _ in range(own))], 2)
        assert answer.done is not None
        measured.append((answer.ttft_s * 1e3, answer.done.cached_tokens))
    return measured


async def _wave(session: EngineSession, rng: random.Random, vocab: int, shared: int, own: int, count: int) -> list[int]:
    """Cached tokens of so many requests that come at once with a new shared part."""
    prefix = [rng.randrange(10, vocab) for _ in range(shared)]
    prompts = [[*prefix, *(rng.randrange(10, vocab) for _ in range(own))] for _ in range(count)]
    answers = await asyncio.gather(*(session.generate(prompt, 1) for prompt in prompts))
    return [answer.done.cached_tokens for answer in answers if answer.done is not None]


async def run(model: pathlib.Path, shared: int, own: int, pairs: int, threads: int, wave: int) -> dict[str, Any]:
    """Alternates cold and warm requests, then sends a wave."""
    async with engine_session({"model": str(model), "worker_threads": threads}) as session:
        rng = random.Random(5)
        vocab = session.model.vocabulary_size
        await _pair(session, rng, vocab, shared, own)
        measured = [await _pair(session, rng, vocab, shared, own) for _ in range(pairs)]
        began_s = time.perf_counter()
        cached = await _wave(session, rng, vocab, shared, own, wave)
        wave_s = time.perf_counter() - began_s
    cold = statistics.median(pair[0][0] for pair in measured)
    warm = statistics.median(pair[1][0] for pair in measured)
    return {
        "shared_tokens": shared,
        "own_tokens": own,
        "pairs": pairs,
        "threads": threads,
        "cold_ttft_ms": round(cold, 2),
        "warm_ttft_ms": round(warm, 2),
        "ratio": round(cold / warm, 2),
        "cold_cached_tokens": max(pair[0][1] for pair in measured),
        "warm_cached_tokens": min(pair[1][1] for pair in measured),
        "wave_requests": wave,
        "wave_prompt_tokens": wave * (shared + own),
        "wave_computed_tokens": wave * (shared + own) - sum(cached),
        "wave_s": round(wave_s, 2),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path("models/demo"))
    parser.add_argument("--shared", type=int, default=1600)
    parser.add_argument("--own", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--wave", type=int, default=64)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    about = (options.model, options.shared, options.own, options.pairs, options.threads, options.wave)
    figures = asyncio.run(run(*about))
    report("prefix", figures, options.json)


if __name__ == "__main__":
    main()
