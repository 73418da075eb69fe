"""`headrace bench`: load on a running server, through the public client, and what its callers would feel.

Owns the load (closed loop: a fixed number of requests is open at any time), the clock readings and the percentiles. Prompts are random token ids, so
that no request finds another's prefix in the cache; answers go on past the end-of-text token, so that each has the length asked for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time

import rich.box
import rich.console
import rich.table

import headrace

_PERCENTILES = (50, 95, 99)


class BenchError(Exception):
    """The load can't be made: no server, or one that refuses it. The message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What to send: lengths in tokens."""

    server: str
    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    seed: int


@dataclasses.dataclass(slots=True)
class Sample:
    """One request as its caller saw it; times in seconds."""

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
class Result:
    """The figures: rates in tokens per second, percentiles in milliseconds."""

    server: str
    model: str
    device: str
    load: Load
    wall_s: float
    completed: int
    failed: int
    errors: dict[str, int]
    output_tok_s: float
    input_tok_s: float
    cached_tokens: int
    percentiles_ms: dict[str, dict[str, float]]


def run(load: Load) -> Result:
    """Sends the load and measures. Raises BenchError if the server can't be reached or its model can't take the lengths."""
    return asyncio.run(_run(load))


async def _run(load: Load) -> Result:
    async with headrace.AsyncClient(load.server) as client:
        try:
            model = await client.get_model()
        except headrace.HeadraceError as error:
            raise BenchError(f"{load.server}: {error}") from None
        if load.prompt_tokens + load.output_tokens > model.max_context_tokens:
            raise BenchError(
                f"--prompt-tokens {load.prompt_tokens} and --output-tokens {load.output_tokens} are {load.prompt_tokens + load.output_tokens} together; "
                f"{model.name} takes at most {model.max_context_tokens}"
            )
        started = time.perf_counter()
        samples = await _closed_loop(client, load, model.vocabulary_size)
        wall_s = time.perf_counter() - started
    return _summary(load, model, samples, wall_s)


async def _closed_loop(client: headrace.AsyncClient, load: Load, vocabulary_size: int) -> list[Sample]:
    rng = random.Random(load.seed)
    prompts = [[rng.randrange(vocabulary_size) for _ in range(load.prompt_tokens)] for _ in range(load.requests)]
    samples: list[Sample] = []

    async def caller() -> None:
        while prompts:
            samples.append(await _measured(client, prompts.pop(), load.output_tokens))

    await asyncio.gather(*(caller() for _ in range(min(load.concurrency, load.requests))))
    return samples


async def _measured(client: headrace.AsyncClient, prompt: list[int], output_tokens: int) -> Sample:
    sample = Sample()
    started = last = time.perf_counter()
    try:
        async with client.generate(token_ids=prompt, max_tokens=output_tokens, ignore_eos=True) as stream:
            async for event in stream:
                now = time.perf_counter()
                if isinstance(event, headrace.Delta) and event.token_ids:
                    last = _note(sample, now, started, last, len(event.token_ids))
                elif isinstance(event, headrace.Done):
                    sample.cached_tokens = event.usage.cached_tokens
    except headrace.HeadraceError as error:
        sample.error = type(error).__name__
    sample.e2e_s = time.perf_counter() - started
    return sample


def _note(sample: Sample, now: float, started: float, last: float, tokens: int) -> float:
    """Counts the tokens of one message; tokens that arrive together share the time since the message before."""
    if sample.output_tokens == 0:
        sample.ttft_s = now - started
    else:
        sample.gaps_s += [(now - last) / tokens] * tokens
    sample.output_tokens += tokens
    return now


def _summary(load: Load, model: headrace.Model, samples: list[Sample], wall_s: float) -> Result:
    good = [sample for sample in samples if not sample.error]
    errors = [sample.error for sample in samples if sample.error]
    columns = {
        "ttft": [sample.ttft_s for sample in good],
        "itl": [gap for sample in good for gap in sample.gaps_s],
        "tpot": [tpot for sample in good if (tpot := sample.tpot_s) is not None],
        "e2e": [sample.e2e_s for sample in good],
    }
    return Result(
        server=load.server,
        model=model.revision,
        device=model.device,
        load=load,
        wall_s=wall_s,
        completed=len(good),
        failed=len(errors),
        errors={name: errors.count(name) for name in sorted(set(errors))},
        output_tok_s=sum(sample.output_tokens for sample in good) / wall_s,
        input_tok_s=len(good) * load.prompt_tokens / wall_s,
        cached_tokens=sum(sample.cached_tokens for sample in good),
        percentiles_ms={name: percentiles_ms(values) for name, values in columns.items() if values},
    )


def percentiles_ms(values_s: list[float]) -> dict[str, float]:
    """p50, p95 and p99 (nearest rank) of times in seconds, in milliseconds."""
    ordered = sorted(values_s)
    return {f"p{percent}": 1e3 * ordered[max(0, -(-percent * len(ordered) // 100) - 1)] for percent in _PERCENTILES}


def report(result: Result, *, as_json: bool) -> None:
    """Prints the result, for people or for machines."""
    if as_json:
        print(json.dumps(dataclasses.asdict(result), indent=2))
        return
    console = rich.console.Console(highlight=False)
    load = result.load
    console.print(
        f"{result.model} on {result.device}, {result.server}: {load.requests} requests, {load.concurrency} open at once, ",
        end="",
    )
    console.print(f"{load.prompt_tokens} prompt and {load.output_tokens} output tokens each")
    table = rich.table.Table(box=rich.box.SIMPLE)
    table.add_column("ms")
    for percent in _PERCENTILES:
        table.add_column(f"p{percent}", justify="right")
    for name, row in result.percentiles_ms.items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    console.print(table)
    console.print(
        f"{result.output_tok_s:,.0f} output tokens/s, {result.input_tok_s:,.0f} prompt tokens/s over {result.wall_s:.2f} s"
    )
    if result.failed:
        console.print(f"{result.failed} requests failed: {result.errors}", style="red")
