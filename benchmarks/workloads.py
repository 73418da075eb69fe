"""Request traces used for every engine under comparison: lists of (prompt token ids, output tokens)."""

import random

Trace = list[tuple[list[int], int]]


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, 120_000) for _ in range(length)]


def _uniform(count: int, prompt: int, output: int, seed: int) -> Trace:
    rng = random.Random(seed)
    return [(_prompt(rng, prompt), output) for _ in range(count)]


def single(count: int = 4, seed: int = 1) -> Trace:
    """One request at a time, 512 -> 256: latency."""
    return _uniform(count, 512, 256, seed)


def burst256(count: int = 256, seed: int = 2) -> Trace:
    """256 requests at once, 512 -> 256: throughput at a full batch."""
    return _uniform(count, 512, 256, seed)


def mix1000(count: int = 1000, seed: int = 3) -> Trace:
    """1,000 users at once, log-normal lengths (median 365 -> 148): throughput under a long queue."""
    rng = random.Random(seed)
    trace = []
    for _ in range(count):
        prompt = max(16, min(2048, int(rng.lognormvariate(5.9, 0.9))))
        output = max(16, min(512, int(rng.lognormvariate(5.0, 0.7))))
        trace.append((_prompt(rng, prompt), output))
    return trace


def prefill8k(count: int = 32, seed: int = 4) -> Trace:
    """32 prompts of 8,000 tokens, one output token: prefill rate."""
    return _uniform(count, 8000, 1, seed)


def longctx(count: int = 32, seed: int = 5) -> Trace:
    """32 sequences of 8,000 -> 128: decode over a long KV cache."""
    return _uniform(count, 8000, 128, seed)


# poisson15: mix1000(300, seed=7) sent at 15 requests/s, random.Random(0).expovariate
