"""Sends a workload through an engine session, and makes sure that a measurement is one: warm, complete, and helped by no cache.

Owns the loops (open by arrival times, closed by requests open at once, closed by people who think) and the warm-up. What the figures are is in `measurements`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import time
from collections.abc import Mapping, Sequence

from benchmarks.engine_session import Answer, EngineSession, Prompt
from benchmarks.measurements import Request
from benchmarks.workloads import Turn, Users, Workload, build, fitted
from headrace_protos.engine.v1 import engine_pb2

# Counters of the worker that must stand still once it is warm; a backend that does not count them has none.
_COUNTERS = ("late_work",)
# How the engine planned: what of it changed belongs to a measurement, and none of it is wrong.
_PLANNING = ("step_count", "held_plans", "late_plans")
_WARM_UP_SEED = 1_000_003
# Greedy otherwise.
_PENALIZED = engine_pb2.EngineSampling(top_p=1.0, repetition_penalty=1.1)
_MAX_ROUNDS = 5
_UNCOUNTED_ROUNDS = 2


class NotMeasured(Exception):
    """The run is no measurement; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One workload as it went."""

    requests: list[Request]
    begin_s: float
    cached_tokens: int
    # The most that a request of an open loop was sent behind its time.
    latest_s: float


def uncached(run: Run, workload: Workload) -> Run:
    """The run, if all of its prompts were computed.

    Raises:
        NotMeasured: Tokens came from the prefix cache.
    """
    if run.cached_tokens:
        raise NotMeasured(f"{workload.name}: {run.cached_tokens} tokens came from the prefix cache")
    return run


def counters(load: engine_pb2.Load) -> dict[str, int]:
    """The worker's counts of what must not happen on a warm server; empty if this backend has none."""
    return {name: int(getattr(load, name)) for name in _COUNTERS if name in load.DESCRIPTOR.fields_by_name}


def planning(load: engine_pb2.Load) -> dict[str, int]:
    """Steps so far, those whose plan was held back, and those of them that the device had to wait for."""
    return {name: int(getattr(load, name)) for name in _PLANNING}


async def _open_loop(session: EngineSession, prompts: Sequence[Prompt], arrivals_s: Sequence[float]) -> list[Answer]:
    begin_s = time.perf_counter()
    answers = []
    for prompt, arrival_s in zip(prompts, arrivals_s, strict=True):
        await asyncio.sleep(max(0.0, begin_s + arrival_s - time.perf_counter()))
        answers.append(await session.send(prompt))
    return answers


async def _closed_loop(session: EngineSession, prompts: Sequence[Prompt], concurrency: int) -> list[Answer]:
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(prompts))

    async def caller() -> None:
        for index, prompt in waiting:
            answers[index] = await session.ask(prompt)

    await asyncio.gather(*(caller() for _ in range(concurrency)))
    return [answers[index] for index in range(len(prompts))]


async def send(session: EngineSession, workload: Workload, salt: bytes) -> Run:
    """Sends the workload and waits for its last token.

    Args:
        session: The engine.
        workload: What to send.
        salt: Sets this run apart in the prefix cache from runs of the same prompts.

    Raises:
        NotMeasured: An answer has not the length that was asked for.
    """
    prompts = [Prompt.of(ids, output, salt) for ids, output in workload.trace]
    penalized = [dataclasses.replace(prompt, sampling=_PENALIZED) for prompt in prompts[: workload.penalized]]
    prompts[: workload.penalized] = penalized
    gc.collect()
    gc.freeze()
    begin_s = time.perf_counter()
    if workload.users is not None:
        answers = await _people(session, prompts, workload.users)
    elif workload.arrivals_s is not None:
        answers = dict(enumerate(await _open_loop(session, prompts, workload.arrivals_s)))
    else:
        answers = dict(enumerate(await _closed_loop(session, prompts, workload.concurrency or len(prompts))))
    await asyncio.gather(*(answer.finished for answer in answers.values()))
    return _checked(workload, answers, begin_s)


async def _people(session: EngineSession, prompts: Sequence[Prompt], users: Users) -> dict[int, Answer]:
    """Answers by place in the trace."""
    begin_s = time.perf_counter()
    answers: dict[int, Answer] = {}

    async def user(turns: Sequence[Turn]) -> None:
        for turn in turns:
            await asyncio.sleep(turn.think_s)
            if time.perf_counter() - begin_s > users.seconds:
                return
            answers[turn.index] = await session.ask(prompts[turn.index])

    await asyncio.gather(*(user(turns) for turns in users.turns))
    return answers


def _checked(workload: Workload, answers: Mapping[int, Answer], begin_s: float) -> Run:
    requests = []
    for index, answer in sorted(answers.items()):
        ids, output = workload.trace[index]
        times = answer.arrivals_array
        if len(times) != output:
            raise NotMeasured(f"{workload.name}: an answer of {output} tokens ended after {len(times)}")
        requests.append(Request(answer.start_s, len(ids), times))
    arrivals = workload.arrivals_s or ()
    if not requests:
        raise NotMeasured(f"{workload.name}: nobody came to ask anything")
    late = [answers[index].start_s - begin_s - due for index, due in enumerate(arrivals)]
    cached = sum(answer.done.cached_tokens for answer in answers.values() if answer.done)
    return Run(requests, begin_s, cached, max(late, default=0.0))


async def warm_up(
    session: EngineSession, workloads: Sequence[Workload], rows: int, most_tokens: int
) -> tuple[int, bool]:
    """Sends what resembles the workloads, with other prompts, until a round compiles and captures nothing (without counters: two rounds).

    Args:
        session: The engine.
        workloads: What will be measured.
        rows: Sequences of the largest batch.
        most_tokens: Prompt tokens of one round and workload, about.

    Returns:
        Rounds that it took, and whether the last one was quiet.
    """
    for number in range(1, _MAX_ROUNDS + 1):
        before = counters(await session.load())
        for workload in [_full_batch(rows), *workloads]:
            small = _shortened(workload, most_tokens, session.model)
            await send(session, small, salt=f"warm-up {number}".encode())
        if counters(await session.load()) == before and (before or number == _UNCOUNTED_ROUNDS):
            return number, True
    return _MAX_ROUNDS, False


def _full_batch(rows: int) -> Workload:
    trace = build("burst256", _WARM_UP_SEED).trace
    return Workload("full batch", [(ids[:16], 16) for ids, _ in itertools.islice(itertools.cycle(trace), rows)])


def _shortened(workload: Workload, most_tokens: int, model: engine_pb2.EngineModel) -> Workload:
    """The first requests, all at once, with their prompts' lengths but short answers."""
    kept, total = [], 0
    for ids, output in workload.trace:
        if total >= most_tokens:
            break
        total += len(ids)
        # Other ids of the same length: no prompt that will be measured is seen before.
        kept.append(([10 + (token * 7 + 1) % 119_990 for token in ids], min(output, 8)))
    one_by_one = dataclasses.replace(workload, trace=kept, arrivals_s=None, users=None, apart=frozenset())
    return fitted(one_by_one, model.vocabulary_size, model.max_context_tokens)
