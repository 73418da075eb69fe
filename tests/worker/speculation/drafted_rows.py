"""Drives a runner that drafts as an engine does: a step ahead of what it has read.

Each plan's positions are upper bounds, by as much as steps in flight may settle less than planned.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Sequence

import torch
from tests.worker.driver import BLOCK_SIZE, Entry, admission, execute, step

from headrace_backend.step.plan import RowAdmission, StepPlan, StepResult
from headrace_backend.worker.speculation.drafter import SettledTokens
from headrace_backend.worker.step.runner import Runner


@dataclasses.dataclass
class Job:
    """One row: its prompt, how many tokens it is to write, and what it asks of the sampler."""

    row: int
    prompt: list[int]
    count: int
    parameters: dict[str, object] = dataclasses.field(default_factory=dict)
    # Tokens settled, with whether they were finite, and their log probabilities as reported.
    tokens: list[int] = dataclasses.field(default_factory=list)
    ok: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[tuple[float, int, list[int], list[float]]] = dataclasses.field(default_factory=list)
    # Tokens that are planned to be settled at most.
    num_planned: int = 0
    # Its last step that was read had drafts and settled nothing: the next one has none.
    is_held_up: bool = False

    def admission(self) -> RowAdmission:
        return admission(self.row, **self.parameters)

    def blocks(self) -> list[int]:
        """Blocks that only this row uses, in an order that is not theirs in memory."""
        return [self.row * 8 + (3 * index) % 8 for index in range(8)]

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.count or (bool(self.ok) and not self.ok[-1])


class GuessingDrafter:
    """Proposes the answers that it is given, by row, each token wrong with some probability."""

    wants_hidden = False

    def __init__(self, num_drafts: int, answers: dict[int, list[int]], share_right: float, seed: int = 0) -> None:
        self.num_drafts = num_drafts
        self._answers = answers
        self._share_right = share_right
        self._random = random.Random(seed)

    def admit(self, admissions: list[RowAdmission]) -> None:
        pass

    def follow(self, *_: object) -> None:
        pass

    def propose(self, settled: SettledTokens) -> torch.Tensor:
        drafts = []
        for row, place in zip(settled.rows_on_host.tolist(), settled.output_positions.tolist(), strict=True):
            answer = [*self._answers.get(row, [])[place:], *[0] * self.num_drafts][: self.num_drafts]
            drafts.append(
                [token if self._random.random() < self._share_right else (token + 1) % 97 for token in answer]
            )
        return torch.tensor(drafts, dtype=torch.int32, device=settled.rows.device)

    def reset(self) -> None:
        pass


def plain_answers(make: Callable[[], Runner], jobs: Sequence[Job]) -> list[Job]:
    """What the same jobs get token by token, one after the other."""
    return [run(make(), [dataclasses.replace(job, tokens=[], ok=[], logprobs=[], num_planned=0)])[0] for job in jobs]


def run(
    runner: Runner,
    jobs: Sequence[Job],
    num_drafts: Callable[[], int] = lambda: 0,
    ahead: int = 1,
    on_result: Callable[[StepResult], None] = lambda result: None,
) -> list[Job]:
    """Computes all jobs together.

    Args:
        runner: Computes steps.
        jobs: Each in a row of its own, within 8 blocks.
        num_drafts: How many drafts a row's next entry has.
        ahead: Steps that are planned before a result is read.
        on_result: Sees each result.
    """
    in_flight: deque[tuple[list[Job], list[int], StepResult]] = deque()
    first = step(
        [Entry(job.row, 0, job.prompt, (job.row,)) for job in jobs],
        [job.admission() for job in jobs],
        {job.row: job.blocks() for job in jobs},
    )
    for job in jobs:
        job.num_planned = 1
    in_flight.append((list(jobs), [1] * len(jobs), execute(runner, first)))
    while in_flight or not all(job.is_done for job in jobs):
        live = [job for job in jobs if not job.is_done and job.num_planned < job.count]
        if live:
            plan, most = _next_plan(live, num_drafts)
            in_flight.append((live, most, execute(runner, plan)))
        if in_flight and (len(in_flight) > ahead or not live):
            _read(*in_flight.popleft(), on_result)
    return list(jobs)


def _next_plan(jobs: list[Job], num_drafts: Callable[[], int]) -> tuple[StepPlan, list[int]]:
    entries, most = [], []
    for job in jobs:
        bound = len(job.prompt) + job.num_planned - 1
        # As an engine: no further than the answer may be long, nor than there is room.
        drafts = min(num_drafts() * (not job.is_held_up), job.count - job.num_planned - 1, 8 * BLOCK_SIZE - bound - 1)
        entries.append(Entry(job.row, bound, None, (job.row,), job.num_planned, num_drafts=max(drafts, 0)))
        most.append(1 + entries[-1].num_drafts)
        job.num_planned += most[-1]
    return step(entries), most


def _read(jobs: list[Job], most: list[int], result: StepResult, on_result: Callable[[StepResult], None]) -> None:
    counts = result.counts.tolist() or [1] * len(jobs)
    assert len(result.tokens) == len(result.ok) == sum(counts)
    # Only what drafts may be to blame for settles nothing.
    assert all((limit == 1) <= count <= limit for count, limit in zip(counts, most, strict=True))
    top_first, reported = 0, {}
    for index, place in enumerate(result.logprob_indices.tolist()):
        num_top = int(result.logprob_counts[index])
        tops = slice(top_first, top_first + num_top)
        reported[place] = (
            float(result.logprob_sampled[index]),
            int(result.logprob_ranks[index]),
            result.top_token_ids[tops].tolist(),
            result.top_logprobs[tops].tolist(),
        )
        top_first += num_top
    first = 0
    for job, count, limit in zip(jobs, counts, most, strict=True):
        job.num_planned -= limit - count
        job.is_held_up = count == 0
        for place in range(first, first + count):
            # What was planned behind an output's end is dropped.
            if not job.is_done:
                job.tokens.append(int(result.tokens[place]))
                job.ok.append(int(result.ok[place]))
                if place in reported:
                    job.logprobs.append(reported[place])
        first += count
    on_result(result)
