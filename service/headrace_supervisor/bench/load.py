"""What `headrace bench` sends, and when: lengths, prompts, and the points of a run.

Owns the load's description and its random numbers. Prompts are random token ids, so that no request
finds another's prefix in the cache. Nothing is sent here (`sending`).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, slots=True)
class Length:
    """How long prompts or answers are, in tokens: all the same, or log-normal around a median."""

    tokens: int
    # Standard deviation of the logarithm; 0: all the same.
    spread: float = 0.0

    def draw(self, rng: random.Random, most: int) -> int:
        """One length, from 1 to `most`."""
        drawn = self.tokens if not self.spread else round(self.tokens * rng.lognormvariate(0.0, self.spread))
        return max(1, min(most, drawn))


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One level of load.

    It is a number of requests open at once (closed loop), or requests per second (open loop,
    Poisson).
    """

    concurrency: int = 0
    rate: float = 0.0

    @property
    def label(self) -> str:
        """The name in tables and plots."""
        return f"{self.rate:g}/s" if self.rate else f"{self.concurrency} open"


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What to send to which server."""

    server: str
    # Name of the model; "": the server's default.
    model: str
    points: tuple[Point, ...]
    prompt: Length
    output: Length
    # A point ends after so many requests or so many seconds, whichever comes first; 0: no such
    # bound.
    requests: int
    seconds: float
    # Requests before the first point, which do not count.
    warm_up: int
    # What counts as a good answer: milliseconds to the first token, and per token after it.
    ttft_limit_ms: float
    tpot_limit_ms: float
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One request."""

    token_ids: list[int]
    output_tokens: int
    # Open loop: seconds after the beginning of the point.
    at_s: float


def prompts(load: Load, point: int, vocabulary_size: int, max_context: int) -> Iterator[Prompt]:
    """The requests of point number `point`, as many as its bounds allow.

    Seconds of an open loop are bounded here, those of a closed loop by its sender.
    """
    rng = random.Random(f"{load.seed}/{point}")
    rate, at_s = (load.points[point].rate, 0.0) if point >= 0 else (0.0, 0.0)
    for _ in itertools.islice(itertools.count(), load.requests or None):
        at_s += rng.expovariate(rate) if rate else 0.0
        if rate and load.seconds and at_s > load.seconds:
            return
        output = load.output.draw(rng, max_context - 1)
        prompt = load.prompt.draw(rng, max_context - output)
        yield Prompt([rng.randrange(vocabulary_size) for _ in range(prompt)], output, at_s)
