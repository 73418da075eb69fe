"""Sends the load of `headrace bench` through the public client, and reads the clock.

Owns both loops: closed (so many requests open at any time) and open (Poisson arrivals, sent whether
or not earlier ones have ended, which is how users come). Answers go on past the end-of-text token,
so that each has the length asked for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator

import headrace
from headrace.connections.connection import ConnectionOptions
from headrace_supervisor.bench.load import Load, Point, Prompt, prompts


class BenchError(Exception):
    """The load can't be made: no server, or one that refuses it. The message says why."""


@dataclasses.dataclass(slots=True)
class Sample:
    """One request as its caller saw it; times in seconds."""

    prompt_tokens: int
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    # Time since the previous message over its tokens, once per token.
    gaps_s: list[float] = dataclasses.field(default_factory=list)
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclasses.dataclass(frozen=True, slots=True)
class PointRun:
    """One level of load as it went."""

    point: Point
    samples: list[Sample]
    wall_s: float
    # Share of the time in which this process computed: near 1, the client was the bottleneck, not
    # the server.
    client_busy: float


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """All points, and who answered."""

    model: headrace.Model
    points: list[PointRun]


def run(load: Load, connection: ConnectionOptions) -> Run:
    """Sends the load.

    Raises BenchError if the server can't be reached or its model can't take the lengths.
    """
    try:
        return asyncio.run(_run(load, connection))
    except (ValueError, OSError) as error:
        raise BenchError(str(error)) from None


async def _run(load: Load, connection: ConnectionOptions) -> Run:
    async with headrace.AsyncClient(load.server, **connection) as client:
        try:
            model = await client.get_model(load.model or None)
        except headrace.HeadraceError as error:
            raise BenchError(f"{load.server}: {error}") from None
        sizes = model.vocabulary_size, model.max_context_tokens
        if load.prompt.tokens + load.output.tokens > model.max_context_tokens:
            raise BenchError(
                f"--prompt-tokens {load.prompt.tokens} and --output-tokens {load.output.tokens} are "
                f"{load.prompt.tokens + load.output.tokens} together; "
                f"{model.name} takes at most {model.max_context_tokens}"
            )
        warm = dataclasses.replace(load, requests=load.warm_up)
        if load.warm_up:
            await _closed_loop(client, load, prompts(warm, -1, *sizes), load.warm_up, 0.0)
        points = [await _point(client, load, index, sizes) for index in range(len(load.points))]
    return Run(model, points)


async def _point(client: headrace.AsyncClient, load: Load, index: int, sizes: tuple[int, int]) -> PointRun:
    point = load.points[index]
    requests = prompts(load, index, *sizes)
    started_s, computed_s = time.perf_counter(), time.process_time()
    if point.rate:
        samples = await _open_loop(client, load, requests)
    else:
        samples = await _closed_loop(client, load, requests, point.concurrency, load.seconds)
    wall_s = time.perf_counter() - started_s
    return PointRun(point, samples, wall_s, (time.process_time() - computed_s) / wall_s)


async def _closed_loop(
    client: headrace.AsyncClient, load: Load, requests: Iterator[Prompt], concurrency: int, seconds: float
) -> list[Sample]:
    samples: list[Sample] = []
    end_s = time.perf_counter() + seconds if seconds else float("inf")

    async def caller() -> None:
        for prompt in requests:
            samples.append(await _measured(client, load, prompt, time.perf_counter()))
            if time.perf_counter() >= end_s:
                return

    await asyncio.gather(*(caller() for _ in range(concurrency)))
    return samples


async def _open_loop(client: headrace.AsyncClient, load: Load, requests: Iterator[Prompt]) -> list[Sample]:
    begin_s = time.perf_counter()
    tasks = []
    for prompt in requests:
        due_s = begin_s + prompt.at_s
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        # Counted from when it was due: a sender that falls behind must not make the server look
        # faster.
        tasks.append(asyncio.create_task(_measured(client, load, prompt, due_s)))
    return list(await asyncio.gather(*tasks))


async def _measured(client: headrace.AsyncClient, load: Load, prompt: Prompt, started_s: float) -> Sample:
    sample = Sample(len(prompt.token_ids))
    last_s = started_s
    stream = client.generate(
        token_ids=prompt.token_ids, max_tokens=prompt.output_tokens, ignore_eos=True, model=load.model or None
    )
    try:
        async with stream:
            async for event in stream:
                now_s = time.perf_counter()
                if isinstance(event, headrace.Delta) and event.token_ids:
                    _note(sample, now_s, started_s, last_s, len(event.token_ids))
                    last_s = now_s
                elif isinstance(event, headrace.Done):
                    sample.cached_tokens = event.usage.cached_tokens
    except headrace.HeadraceError as error:
        sample.error = type(error).__name__
    sample.e2e_s = time.perf_counter() - started_s
    return sample


def _note(sample: Sample, now_s: float, started_s: float, last_s: float, tokens: int) -> None:
    """Counts the tokens of one message.

    Tokens that arrive together share the time since the message before.
    """
    if sample.output_tokens == 0:
        sample.ttft_s = now_s - started_s
    else:
        sample.gaps_s += [(now_s - last_s) / tokens] * tokens
    sample.output_tokens += tokens
