"""Sends a workload through an engine session, and makes sure that a measurement is one.

It must be warm, complete, and helped by no cache.

Owns the loops (open by arrival times, closed by requests open at once, closed by people who think)
and the warm-up. What the figures are is in `measurements`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import time
from collections.abc import Mapping, Sequence

from benchmarks.ending import CutShort, Ending
from benchmarks.engine_session import Answer, EngineSession, Prompt
from benchmarks.measurements import Request
from benchmarks.workloads import USERS_DRAIN_SECONDS, Turn, Users, Workload, build, fitted
from headrace_protos.engine.v1 import engine_pb2
from headrace_request.sampling import Sampling

# Counters of the worker that must stand still once it is warm; a backend that does not count them
# has none.
_COUNTERS = ("late_work",)
# How the engine planned: what of it changed belongs to a measurement, and none of it is wrong.
_PLANNING = ("step_count", "held_plans", "late_plans")
_WARM_UP_SEED = 1_000_003
# Greedy otherwise.
_PENALIZED = Sampling(temperature=0.0, repetition_penalty=1.1)
_MAX_ROUNDS = 5
_UNCOUNTED_ROUNDS = 2
# For requests that are given up to leave the engine.
_ABORT_S = 10.0


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
    # Requests that were sent and given up, because the time was over.
    unanswered: int = 0


class Unfinished(CutShort):
    """The end came while a workload was sent.

    Attributes:
        run: what had been answered by then; None where nothing had.
    """

    def __init__(self, why: str, run: Run | None) -> None:
        super().__init__(why)
        self.run = run


def uncached(run: Run, workload: Workload) -> Run:
    """The run, if all of its prompts were computed.

    Raises:
        NotMeasured: Tokens came from the prefix cache.
    """
    if run.cached_tokens:
        raise NotMeasured(f"{workload.name}: {run.cached_tokens} tokens came from the prefix cache")
    return run


def counters(load: engine_pb2.Load) -> dict[str, int]:
    """The worker's counts of what a warm server must not do; empty if this backend has none."""
    return {name: int(getattr(load, name)) for name in _COUNTERS if name in load.DESCRIPTOR.fields_by_name}


def planning(load: engine_pb2.Load) -> dict[str, int]:
    """Steps so far, those whose plan was held back, and those that the device had to wait for.

    The last are among the second.
    """
    return {name: int(getattr(load, name)) for name in _PLANNING}


# Requests that were sent, by place in the trace.
_Answers = dict[int, Answer]


async def _open_loop(
    session: EngineSession, prompts: Sequence[Prompt], arrivals_s: Sequence[float], answers: _Answers
) -> None:
    begin_s = time.perf_counter()
    for index, (prompt, arrival_s) in enumerate(zip(prompts, arrivals_s, strict=True)):
        await asyncio.sleep(max(0.0, begin_s + arrival_s - time.perf_counter()))
        answers[index] = await session.send(prompt)


async def _closed_loop(session: EngineSession, prompts: Sequence[Prompt], concurrency: int, answers: _Answers) -> None:
    waiting = iter(enumerate(prompts))

    async def caller() -> None:
        for index, prompt in waiting:
            answers[index] = await session.send(prompt)
            await answers[index].finished

    await asyncio.gather(*(caller() for _ in range(concurrency)))


async def _people(session: EngineSession, prompts: Sequence[Prompt], users: Users, answers: _Answers) -> None:
    """Returns when all have their answers, or when the time for answers is over."""
    begin_s = time.perf_counter()

    async def user(turns: Sequence[Turn]) -> None:
        for turn in turns:
            await asyncio.sleep(turn.think_s)
            if time.perf_counter() - begin_s > users.seconds:
                return
            answers[turn.index] = await session.send(prompts[turn.index])
            await answers[turn.index].finished

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(users.seconds + USERS_DRAIN_SECONDS):
            await asyncio.gather(*(user(turns) for turns in users.turns))


async def _send_all(session: EngineSession, workload: Workload, prompts: Sequence[Prompt], answers: _Answers) -> None:
    if workload.users is not None:
        await _people(session, prompts, workload.users, answers)
        return
    if workload.arrivals_s is not None:
        await _open_loop(session, prompts, workload.arrivals_s, answers)
    else:
        await _closed_loop(session, prompts, workload.concurrency or len(prompts), answers)
    await asyncio.gather(*(answer.finished for answer in answers.values()))


async def send(
    session: EngineSession, workload: Workload, salt: bytes, ending: Ending | None = None, max_drafts: int = -1
) -> Run:
    """Sends the workload and waits for its last token, or until the time of its users is over.

    Args:
        session: The engine.
        workload: What to send.
        salt: Sets this run apart in the prefix cache from runs of the same prompts.
        ending: What may cut it short; None: that is the caller's affair.
        max_drafts: Most drafts of a step of each request; -1: as many as the engine chooses.

    Raises:
        NotMeasured: An answer has not the length that was asked for.
        Unfinished: It was cut short.
    """
    prompts = [Prompt.of(ids, output, salt) for ids, output in workload.trace]
    prompts = [dataclasses.replace(prompt, max_drafts=max_drafts) for prompt in prompts]
    penalized = [dataclasses.replace(prompt, sampling=_PENALIZED) for prompt in prompts[: workload.penalized]]
    prompts[: workload.penalized] = penalized
    gc.collect()
    gc.freeze()
    begin_s = time.perf_counter()
    answers: _Answers = {}
    try:
        with ending.told_apart() if ending else contextlib.nullcontext():
            await _send_all(session, workload, prompts, answers)
    except CutShort as cut:
        whole = {index: answer for index, answer in answers.items() if answer.done}
        raise Unfinished(str(cut), _checked(workload, whole, begin_s, len(answers)) if whole else None) from None
    whole = {index: answer for index, answer in answers.items() if answer.done}
    run = _checked(workload, whole, begin_s, len(answers))
    await _give_up(session, [answer for answer in answers.values() if not answer.done])
    return run


async def _give_up(session: EngineSession, answers: Sequence[Answer]) -> None:
    """Has the engine end requests, so that the next workload finds it idle."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ABORT_S):
            await asyncio.gather(*(session.abort(answer, engine_pb2.ABORT_CAUSE_CANCELLED) for answer in answers))


def _checked(workload: Workload, answers: Mapping[int, Answer], begin_s: float, num_sent: int) -> Run:
    requests = []
    for index, answer in sorted(answers.items()):
        ids, output = workload.trace[index]
        times = answer.arrivals_array
        if len(times) != output:
            raise NotMeasured(f"{workload.name}: an answer of {output} tokens ended after {len(times)}")
        requests.append(Request(answer.start_s, len(ids), times))
    arrivals = workload.arrivals_s or ()
    if not requests:
        why = f"of {num_sent} requests none was answered in time" if num_sent else "nobody came to ask anything"
        raise NotMeasured(f"{workload.name}: {why}")
    late = [answer.start_s - begin_s - arrivals[index] for index, answer in answers.items()] if arrivals else []
    cached = sum(answer.done.cached_tokens for answer in answers.values() if answer.done)
    return Run(requests, begin_s, cached, max(late, default=0.0), num_sent - len(requests))


async def warm_up(
    session: EngineSession, workloads: Sequence[Workload], rows: int, most_tokens: int
) -> tuple[int, bool]:
    """Sends what resembles the workloads until a round compiles and captures nothing.

    Prompts are others than those measured. Without counters it sends two rounds.

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
