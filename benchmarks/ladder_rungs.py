"""What one rung of the ladder is measured by, and the record that rungs are written to.

Owns what all rungs share (`Ladder`), the rates of one engine's rungs, and the gains. Which rungs
there are, and on which engines, is `bench_ladder`'s.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.bench_speculation import Case, prompts, turn
from benchmarks.ceilings import Ceilings
from benchmarks.engine_options import Plan
from benchmarks.engine_session import EngineSession
from benchmarks.measurements import summary
from benchmarks.roofline import BYTES
from benchmarks.sending import send
from benchmarks.workloads import Workload

_SINGLE_REQUESTS = 4
_DRAFTED_TOKENS = 128
_DRAFTED_TURNS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Requests of the rungs."""

    # Rows of the rungs below `full`, and the requests that each of them serves.
    rows: int
    requests: int
    # Of the slowest rung; the next serves twice as many.
    few: int
    # Of `full` and what follows.
    many: int
    # Longest context at which a token with and without a cache is timed.
    longest_context: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ladder:
    """What all rungs share."""

    plan: Plan
    ceilings: Ceilings
    workload: Workload
    sizes: Sizes
    threads: int
    # The rungs of few bits and those of several GPUs: name -> fields of EngineConfig.
    low_bits: dict[str, dict[str, Any]]
    more_gpus: dict[str, dict[str, Any]]
    # Probability that a draft is right; 0: there is no rung with drafts.
    acceptance: float

    @property
    def on_gpu(self) -> bool:
        """Whether there are graphs, and kernels of ours."""
        return self.ceilings.device == "cuda"

    @property
    def dtype(self) -> str:
        """Type of weights and cache; "auto" is the engine's own rule."""
        if self.plan.engine.dtype != "auto":
            return self.plan.engine.dtype
        return "bf16" if self.on_gpu else "fp32"

    @property
    def most_rows(self) -> int:
        """Rows of `full` and what follows: the engine's default."""
        return self.plan.engine.max_num_seqs

    def first(self, count: int, concurrency: int | None = None) -> Workload:
        """The first requests of the trace, all at once or so many open at a time."""
        return dataclasses.replace(self.workload, trace=self.workload.trace[:count], concurrency=concurrency)

    def plain_job(self) -> dict[str, Any]:
        """What the plain rungs are asked for."""
        below = self.first(self.sizes.requests)
        return {
            "model": self.plan.settings["model"],
            "device": self.ceilings.device,
            "dtype": self.dtype,
            "threads": self.threads,
            "rows": self.sizes.rows,
            "few": self.sizes.few,
            "max_len": below.longest,
            "longest_context": min(self.sizes.longest_context, self.plan.shape.max_position_embeddings),
            "trace": below.trace,
        }

    def mfu(self, served: Workload, wall_s: float) -> float:
        """Share of the matrix rate that useful products took.

        Args:
            served: Requests that were answered, of which every token counts once.
            wall_s: Seconds that they took.
        """
        shape = self.plan.shape
        outputs = sum(output for _, output in served.trace)
        tokens = outputs + sum(len(prompt) for prompt, _ in served.trace)
        operations = 2 * (shape.multiplied_parameters * tokens + shape.head_parameters * outputs)
        return round(operations / wall_s / self.ceilings.best_flop_s, 5)


class Record:
    """The rungs so far, and what stands beside them."""

    def __init__(self) -> None:
        """Starts with nothing."""
        self.rungs: list[dict[str, Any]] = []
        self.beside: dict[str, Any] = {}

    def add(self, rung: dict[str, Any]) -> None:
        """Appends a rung with its gains: over the one before, or over full, and over the first."""
        if rate := rung.get("output_tok_s"):
            first, before = (self.rungs[0], _before(self.rungs)) if self.rungs else (rung, rung)
            rung["gain"] = round(rate / before["output_tok_s"], 2)
            rung["total_gain"] = round(rate / first["output_tok_s"], 2)
        self.rungs.append(rung)
        shown = f"{rung['output_tok_s']:>10,.1f} tok/s {rung['gain']:>7.2f} x" if rate else " " * 26
        single = f"{rung['single_tok_s']:>8,.1f} tok/s one at a time" if rung.get("single_tok_s") else ""
        print(f"{rung['rung']:<12} {shown} {single}", flush=True)


def _before(rungs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rung that the next one's gain is over: the last, or `full` for those above it."""
    return next((rung for rung in rungs if rung["rung"] == "full"), rungs[-1])


class EngineRungs:
    """One engine, and the rungs that are measured on it."""

    def __init__(self, ladder: Ladder, session: EngineSession) -> None:
        """Takes a warm engine."""
        self._ladder, self._session = ladder, session

    async def rung(self, name: str, workload: Workload, single: bool = True) -> dict[str, Any]:
        """Serves a workload, and a few requests one at a time.

        Args:
            name: The rung's.
            workload: What to serve.
            single: Whether requests are served one at a time too.
        """
        run = await send(self._session, workload, name.encode(), max_drafts=0)
        served = summary(run.requests, run.begin_s)
        rung = {"rung": name, **{field: served[field] for field in ("requests", "output_tok_s", "wall_s")}}
        rung["mfu"] = self._ladder.mfu(workload, served["wall_s"])
        return rung | (await self._single(name) if single else {})

    async def _single(self, name: str) -> dict[str, Any]:
        workload = self._ladder.first(_SINGLE_REQUESTS, concurrency=1)
        run = await send(self._session, workload, f"{name} single".encode(), max_drafts=0)
        rate = summary(run.requests, run.begin_s)["output_tok_s"]
        return {"single_tok_s": rate, "bandwidth": self._bandwidth(rate)}

    def _bandwidth(self, tokens_per_s: float) -> float:
        """Share of the copy bandwidth with which weights are read, once a token."""
        shape, model = self._ladder.plan.shape, self._session.model
        width = 8 * BYTES[model.dtype]
        bits = shape.multiplied_parameters * (model.quantization.bits_per_weight or width)
        bits += shape.head_parameters * (model.quantization.head_bits_per_weight or width)
        return round(bits / 8 * tokens_per_s / self._ladder.ceilings.copy_bytes_s, 4)

    async def speculation(self, weights: str) -> dict[str, Any]:
        """One request at a time with drafts, against the same requests without.

        Args:
            weights: Name of the rung whose engine it is.
        """
        case = Case(1, self._ladder.acceptance, "plain", _DRAFTED_TOKENS)
        drafted = prompts(case, self._session.model.vocabulary_size)
        without = [dataclasses.replace(prompt, max_drafts=0) for prompt in drafted]
        rates: tuple[list[float], list[float]] = ([], [])
        for _ in range(_DRAFTED_TURNS):
            for asked, rate in zip((without, drafted), rates, strict=True):
                rate.append((await turn(self._session, asked)).tokens_per_s)
        off, on = (round(statistics.median(rate), 1) for rate in rates)
        return {
            "rung": "speculation",
            "on": weights,
            "acceptance": self._ladder.acceptance,
            "single_tok_s": on,
            "single_tok_s_off": off,
            "single_gain": round(on / off, 2),
        }
