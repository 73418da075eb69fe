"""What rows under a form cost a step, and those beside them; and rows with a penalty.

    python -m benchmarks.bench_masked_steps --shape llama-3.1-8b --rows 64,256 --json FILE

Within one engine, in turns, as many rows at once answer in these ways, drawing at random with the
same seeds:

- `plain`: without a form.
- `drawn`: each row under a JSON Schema, each token drawn.
- `skipped`: the same, but tokens that the form leaves no choice about are not drawn.
- `one`: one row under a schema, the others without; the figures are the others'.
- `penalized`: without a form, with a repetition penalty.

Schemas are arrays of what `made_schemas` makes, too long to end before the rows do. Weights of a
shape are dummies and give tokens at random, which is harder for a lexer than what a model writes.

Times are taken at this end of the engine's stream, from the last row's first token to the first
row's end. `itl` is between tokens of a row, `step` between two moments at which tokens came (ms).
Ratios are to `plain` of the same turn. CPU time is that of the engine's process, mask threads
included, and of its workers, in microseconds a step.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import pathlib
import random
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import psutil

from benchmarks.engine_session import Answer, EngineSession, Prompt, engine_session
from benchmarks.figures import report
from benchmarks.made_schemas import long_schema
from benchmarks.measurements import rank
from benchmarks.sending import planning
from benchmarks.shapes import SHAPES, write_model_folder
from headrace_request.sampling import Sampling
from headrace_request.structured_output import StructuredOutput

WAYS: Final = ("plain", "drawn", "skipped", "one", "penalized")
_PENALTY: Final = 1.05
_PROMPT_TOKENS: Final = 64
_FIRST_ID: Final = 10
_START_S: Final = 300.0


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """What one way came to, once; times in seconds."""

    # Between tokens of a row, of all rows that count.
    gaps_s: np.ndarray[Any, np.dtype[np.float64]]
    # Between moments at which tokens came.
    steps_s: np.ndarray[Any, np.dtype[np.float64]]
    tokens_per_s: float
    engine_cpu_us: float
    worker_cpu_us: float
    # Share of the steps whose plan came too late, so that the device waited.
    late_plans: float
    answers: list[list[int]]


class Asker:
    """Makes the requests of all ways, and has an engine answer them."""

    def __init__(self, session: EngineSession, num_tokens: int, num_schemas: int) -> None:
        """Takes a warm engine."""
        self._session = session
        self._num_tokens = num_tokens
        self._forms = [StructuredOutput("json_schema", long_schema(seed, num_tokens)) for seed in range(num_schemas)]

    def _prompt(self, way: str, row: int, turn: int) -> Prompt:
        draw = random.Random(row)
        ids = [draw.randrange(_FIRST_ID, self._session.model.vocabulary_size // 2) for _ in range(_PROMPT_TOKENS)]
        penalty = _PENALTY if way == "penalized" else 1.0
        has_form = way in ("drawn", "skipped") or (way == "one" and row == 0)
        return dataclasses.replace(
            Prompt.of(ids, self._num_tokens),
            sampling=Sampling(temperature=1.0, seed=1 + row + 1000 * turn, repetition_penalty=penalty),
            structured_output=self._forms[row % len(self._forms)] if has_form else None,
            min_tokens=self._num_tokens,
            max_drafts=0 if way == "drawn" else -1,
        )

    async def turn(self, way: str, num_rows: int, number: int) -> Turn:
        """Has rows answer at once. Raises RuntimeError if one ended too early."""
        prompts = [self._prompt(way, row, number) for row in range(num_rows)]
        before, (engine_s, workers_s) = planning(await self._session.load()), self._cpu_s()
        answers = await asyncio.gather(*map(self._session.ask, prompts))
        after, (engine_end_s, workers_end_s) = planning(await self._session.load()), self._cpu_s()
        short = [answer for answer in answers if len(answer.arrivals_array) != self._num_tokens]
        if short:
            why = f"{len(short[0].arrivals_array)} tokens: {short[0].ends}"
            raise RuntimeError(f"{way}: {len(short)} answers ended before {self._num_tokens} tokens, one after {why}")
        num_steps = np.unique(np.concatenate([answer.arrivals_array for answer in answers])).size
        return Turn(
            *_times(answers, answers[1:] if way == "one" else answers),
            engine_cpu_us=1e6 * (engine_end_s - engine_s) / num_steps,
            worker_cpu_us=1e6 * (workers_end_s - workers_s) / num_steps,
            late_plans=(after["late_plans"] - before["late_plans"]) / num_steps,
            answers=[answer.token_ids for answer in answers],
        )

    def _cpu_s(self) -> tuple[float, float]:
        workers = self._session.process.workers()
        times = [process.cpu_times() for process in (*workers, psutil.Process(workers[0].ppid()))]
        *of_workers, engine = [spent.user + spent.system for spent in times]
        return engine, sum(of_workers)


def _times(answers: Sequence[Answer], counted: Sequence[Answer]) -> tuple[Any, Any, float]:
    """Gaps of the rows that count, steps of all, and tokens per second, while all rows answered."""
    begin_s = max(answer.arrivals_array[0] for answer in answers)
    end_s = min(answer.arrivals_array[-1] for answer in answers)

    def within(answer: Answer) -> Any:
        times = answer.arrivals_array
        return times[(times >= begin_s) & (times <= end_s)]

    arrivals = np.concatenate([within(answer) for answer in answers])
    gaps_s = np.concatenate([np.diff(within(answer)) for answer in counted])
    return gaps_s, np.diff(np.unique(arrivals)), arrivals.size / (end_s - begin_s)


def row_of(way: str, num_rows: int, turns: Sequence[Turn], plain: Sequence[Turn]) -> dict[str, Any]:
    """The figures of one way, each the median of its turns, and the ratios to `plain`."""

    def middle(name: str) -> float:
        values: list[float] = [getattr(turn, name) for turn in turns]
        return round(statistics.median(values), 3)

    return {
        "way": way,
        "rows": num_rows,
        "turns": len(turns),
        "itl_p50": _pooled(turns, "gaps_s", 0.5),
        "itl_p99": _pooled(turns, "gaps_s", 0.99),
        "step_p50": _pooled(turns, "steps_s", 0.5),
        "step_p99": _pooled(turns, "steps_s", 0.99),
        "step_mean": round(1e3 * float(np.concatenate([turn.steps_s for turn in turns]).mean()), 3),
        "tokens_per_s": middle("tokens_per_s"),
        "engine_cpu_us": middle("engine_cpu_us"),
        "worker_cpu_us": middle("worker_cpu_us"),
        "late_plans": middle("late_plans"),
        "itl_p50_ratio": _ratios(turns, plain, lambda turn: rank(turn.gaps_s, 0.5)),
        "itl_p99_ratio": _ratios(turns, plain, lambda turn: rank(turn.gaps_s, 0.99)),
        "step_p50_ratio": _ratios(turns, plain, lambda turn: rank(turn.steps_s, 0.5)),
        "step_mean_ratio": _ratios(turns, plain, lambda turn: float(turn.steps_s.mean())),
        "tokens_per_s_ratio": _ratios(turns, plain, lambda turn: turn.tokens_per_s),
    }


def _pooled(turns: Sequence[Turn], name: str, share: float) -> float | None:
    return rank(np.concatenate([getattr(turn, name) for turn in turns]), share)


def _ratios(turns: Sequence[Turn], plain: Sequence[Turn], figure: Any) -> list[float]:
    """The median ratio of pairs of turns, the smallest and the largest."""
    found = [figure(turn) / figure(other) for turn, other in zip(turns, plain, strict=True)]
    return [round(value, 4) for value in (statistics.median(found), min(found), max(found))]


async def compare(asker: Asker, num_rows: int, ways: Sequence[str], num_turns: int) -> list[dict[str, Any]]:
    """All ways with so many rows, in turns, after one that counts for none.

    Each turn begins with another way.
    """
    turns: dict[str, list[Turn]] = {way: [] for way in ways}
    for number in range(num_turns + 1):
        first = number % len(ways)
        for way in (*ways[first:], *ways[:first]):
            turns[way].append(await asker.turn(way, num_rows, number))
    counted = {way: found[1:] for way, found in turns.items()}
    rows = [row_of(way, num_rows, found, counted["plain"]) for way, found in counted.items()]
    if {"drawn", "skipped"} <= set(ways):
        pairs = itertools.chain.from_iterable(
            zip(one.answers, other.answers, strict=True)
            for one, other in zip(turns["drawn"], turns["skipped"], strict=True)
        )
        rows[ways.index("skipped")]["equal_to_drawn"] = round(statistics.mean(one == other for one, other in pairs), 3)
    return rows


async def run(options: argparse.Namespace, model: pathlib.Path) -> list[dict[str, Any]]:
    """All figures, each printed as soon as it is there."""
    engine: dict[str, Any] = {
        "model": str(model),
        "device": options.device,
        "enable_prefix_cache": False,
        "worker_threads": options.threads,
        "max_num_seqs": max(options.rows),
        "max_model_len": _PROMPT_TOKENS + options.tokens + 16,
    }
    if options.shape:
        engine["load"] = "dummy"
    rows = []
    async with engine_session(engine, _START_S) as session:
        asker = Asker(session, options.tokens, options.schemas)
        for num_rows in options.rows:
            found = await compare(asker, num_rows, options.ways, options.turns)
            for row in found:
                print(json.dumps(row), flush=True)
            rows += found
        device = session.model.device
    return [row | {"device": device} for row in rows]


def _ways(text: str) -> tuple[str, ...]:
    ways = tuple(text.split(","))
    if unknown := set(ways) - set(WAYS):
        raise argparse.ArgumentTypeError(f"no such way: {', '.join(unknown)}; there are {', '.join(WAYS)}")
    return ways if "plain" in ways else ("plain", *ways)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path("models/demo"))
    parser.add_argument("--shape", choices=SHAPES, help="instead of --model, with dummy weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[8])
    parser.add_argument("--ways", type=_ways, default=WAYS, help="some of these; plain is always one")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--turns", type=int, default=3, help="turns of each way that count")
    parser.add_argument("--schemas", type=int, default=64, help="schemas, of which rows take one after the other")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of the worker")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        model = options.model
        if options.shape:
            model = write_model_folder(options.shape, pathlib.Path(name), tokenizer=True)
        report("masked_steps", {"results": asyncio.run(run(options, model))}, options.json)


if __name__ == "__main__":
    main()
