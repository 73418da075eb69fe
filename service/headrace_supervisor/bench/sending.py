"""Sends the load of `headrace bench` through the public client, and reads the clock.

Owns both loops: closed (so many requests open at any time) and open (Poisson arrivals, sent whether
or not earlier ones have ended, which is how users come). Answers go on past the end-of-text token,
so that each has the length asked for. Ctrl-C ends the sending; levels that are measured stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import headrace
from headrace.connections.connection import ConnectionOptions
from headrace_supervisor.bench.load import Load, Point, Prompt, prompts
from headrace_supervisor.bench.progress import BenchProgress


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
    """The points that were measured, all of them unless it was interrupted, and who answered."""

    model: headrace.Model
    points: list[PointRun]


def run(
    load: Load,
    connection: ConnectionOptions,
    progress: BenchProgress,
    on_point: Callable[[PointRun], None] = lambda _: None,
) -> Run:
    """Sends the load.

    Args:
        load: What to send.
        connection: Key and TLS.
        progress: Counts answers.
        on_point: Called with each point that is measured.

    Raises:
        BenchError: The server can't be reached, or its model can't take the lengths.
        KeyboardInterrupt: It was interrupted before the server had answered.
    """
    try:
        return asyncio.run(_Sender(load, connection, progress, on_point).run())
    except (ValueError, OSError) as error:
        raise BenchError(str(error)) from None


class _Sender:
    """One run's load, and who hears how it goes."""

    def __init__(
        self,
        load: Load,
        connection: ConnectionOptions,
        progress: BenchProgress,
        on_point: Callable[[PointRun], None],
    ) -> None:
        self._load, self._connection = load, connection
        self._progress, self._on_point = progress, on_point

    async def run(self) -> Run:
        async with headrace.AsyncClient(self._load.server, **self._connection) as client:
            run = Run(await self._model(client), [])
            # Ctrl-C cancels this task. What is measured is handed on all the same.
            with contextlib.suppress(asyncio.CancelledError):
                await self._measure(client, run)
        return run

    async def _model(self, client: headrace.AsyncClient) -> headrace.Model:
        load = self._load
        try:
            model = await client.get_model(load.model or None)
        except headrace.HeadraceError as error:
            # What says that nobody listens names the address.
            where = "" if load.server in str(error) else f"{load.server}: "
            raise BenchError(f"{where}{error}") from None
        asked = load.prompt.tokens + load.output.tokens
        if asked > model.max_context_tokens:
            raise BenchError(
                f"--prompt-tokens {load.prompt.tokens} and --output-tokens {load.output.tokens} are {asked} together; "
                f"{model.name} takes at most {model.max_context_tokens}"
            )
        return model

    async def _measure(self, client: headrace.AsyncClient, run: Run) -> None:
        load, sizes = self._load, (run.model.vocabulary_size, run.model.max_context_tokens)
        caller = _Caller(client, load, self._progress.on_answer)
        if load.warm_up:
            warm = dataclasses.replace(load, requests=load.warm_up)
            with self._progress.warm_up(load.warm_up):
                await _closed_loop(caller, prompts(warm, -1, *sizes), load.warm_up, 0.0)
        for index, point in enumerate(load.points):
            async with self._progress.level(load, point):
                run.points.append(await _point(caller, point, prompts(load, index, *sizes)))
            self._on_point(run.points[-1])


@dataclasses.dataclass(frozen=True, slots=True)
class _Caller:
    """Who sends: its connection, what it asks for, and who hears of each answer."""

    client: headrace.AsyncClient
    load: Load
    on_answer: Callable[[], None]


async def _point(caller: _Caller, point: Point, requests: Iterator[Prompt]) -> PointRun:
    started_s, computed_s = time.perf_counter(), time.process_time()
    if point.rate:
        samples = await _open_loop(caller, requests)
    else:
        samples = await _closed_loop(caller, requests, point.concurrency, caller.load.seconds)
    wall_s = time.perf_counter() - started_s
    return PointRun(point, samples, wall_s, (time.process_time() - computed_s) / wall_s)


async def _closed_loop(caller: _Caller, requests: Iterator[Prompt], concurrency: int, seconds: float) -> list[Sample]:
    samples: list[Sample] = []
    end_s = time.perf_counter() + seconds if seconds else float("inf")

    async def call_in_turn() -> None:
        for prompt in requests:
            samples.append(await _measured(caller, prompt, time.perf_counter()))
            if time.perf_counter() >= end_s:
                return

    await asyncio.gather(*(call_in_turn() for _ in range(concurrency)))
    return samples


async def _open_loop(caller: _Caller, requests: Iterator[Prompt]) -> list[Sample]:
    begin_s = time.perf_counter()
    tasks: list[asyncio.Task[Sample]] = []
    try:
        for prompt in requests:
            due_s = begin_s + prompt.at_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            # Counted from when it was due: a sender that falls behind must not make the server look
            # faster.
            tasks.append(asyncio.create_task(_measured(caller, prompt, due_s)))
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _measured(caller: _Caller, prompt: Prompt, started_s: float) -> Sample:
    sample = Sample(len(prompt.token_ids))
    last_s, model = started_s, caller.load.model or None
    stream = caller.client.generate(
        token_ids=prompt.token_ids, max_tokens=prompt.output_tokens, ignore_eos=True, model=model
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
    caller.on_answer()
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
