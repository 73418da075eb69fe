"""Benchmarks end by their own clock and by signals, and write what was measured."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import psutil
import pytest
from benchmarks import bench_engine, figures, measured_engine, sending
from benchmarks.ending import CutShort, Ending
from benchmarks.engine_session import Prompt
from benchmarks.workloads import Workload, users
from tests.benchmarks.test_commands import QUICK
from tests.support.processes import alive, wait_until

from headrace_protos.engine.v1 import engine_pb2

NUM_TOKENS = 4


class FakeAnswer:
    """An answer that comes at once, or never."""

    def __init__(self, prompt: Prompt) -> None:
        self.start_s = 0.0
        self.done: engine_pb2.RequestDone | None = None
        self.arrivals_array = np.empty(0)
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._prompt = prompt

    def come(self) -> None:
        self.arrivals_array = 1.0 + np.arange(self._prompt.max_tokens, dtype=np.float64)
        self.done = engine_pb2.RequestDone(prompt_tokens=self._prompt.num_tokens)
        self.finished.set_result(None)


class FakeSession:
    """An engine that answers the first `count` requests; `then` is called with the next one."""

    def __init__(self, count: int, then: Callable[[], object] = lambda: None) -> None:
        self._left, self._then = count, then
        self.answers: list[FakeAnswer] = []
        self.aborted: list[FakeAnswer] = []

    async def send(self, prompt: Prompt) -> FakeAnswer:
        self.answers.append(FakeAnswer(prompt))
        if len(self.answers) <= self._left:
            self.answers[-1].come()
        else:
            self._then()
        return self.answers[-1]

    async def abort(self, answer: FakeAnswer, _: int) -> None:
        self.aborted.append(answer)

    async def load(self) -> engine_pb2.Load:
        return engine_pb2.Load()


def closed_loop(count: int) -> Workload:
    return Workload("closed", [([11, 12, 13], NUM_TOKENS)] * count, concurrency=1)


def within(work: Callable[[Ending], Awaitable[Any]], limit_s: float = 600.0) -> Any:
    """What work returns under an end."""

    async def awaited(ending: Ending) -> Any:
        return await work(ending)

    with Ending(limit_s) as ending:
        return asyncio.run(ending.during(awaited))


def signalled(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGALRM])
def test_a_workload_that_is_cut_short_keeps_what_was_answered(number: signal.Signals) -> None:
    session = FakeSession(5, signalled(number))
    with pytest.raises(sending.Unfinished, match=number.name if number is not signal.SIGALRM else "limit-s") as cut:
        within(lambda ending: sending.send(session, closed_loop(9), b"", ending))  # type: ignore[arg-type]
    assert cut.value.run is not None
    assert (len(cut.value.run.requests), cut.value.run.unanswered) == (5, 1)


def test_the_clock_ends_a_workload() -> None:
    with pytest.raises(sending.Unfinished, match="limit-s") as cut:
        within(lambda ending: sending.send(FakeSession(0), closed_loop(1), b"", ending), 0.2)  # type: ignore[arg-type]
    assert cut.value.run is None


def test_what_comes_after_a_cut_is_marked_and_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "results.json"
    session = FakeSession(12, signalled(signal.SIGTERM))
    workloads = [closed_loop(9), closed_loop(9), closed_loop(9)]

    async def measured(ending: Ending) -> bool:
        async def measure(workload: Workload) -> dict[str, Any]:
            found = await bench_engine._measure(session, workload, 1, ending)  # type: ignore[arg-type]
            return {"name": workload.name, "warm": True, **found, **found.pop("more")}

        return await measured_engine.measure_all(workloads, measure, lambda _: [], path, ending)

    assert within(measured) is False
    whole, part, none = json.loads(path.read_text())
    assert (whole["requests"], whole["unanswered"]) == (9, 0) and "incomplete" not in whole
    assert (part["requests"], part["unanswered"]) == (3, 1) and "SIGTERM" in part["incomplete"]
    assert "requests" not in none and "SIGTERM" in none["incomplete"]


def test_another_cancellation_is_none_of_it() -> None:
    async def cancelled(ending: Ending) -> None:
        with ending.told_apart():
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        within(cancelled)


def test_a_second_signal_does_not_disturb_the_end() -> None:
    async def ends(_: Ending) -> None:
        try:
            signalled(signal.SIGTERM)()
            await asyncio.sleep(600)
        finally:
            signalled(signal.SIGTERM)()
            await asyncio.sleep(0.1)

    with pytest.raises(CutShort, match="SIGTERM"):
        within(ends)


async def test_users_whose_answers_do_not_come_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "USERS_DRAIN_SECONDS", 0.2)
    session = FakeSession(3)
    run = await sending.send(session, users(5, 0.5, 0, 0.01), b"")  # type: ignore[arg-type]
    assert len(run.requests) == 3 and run.unanswered == len(session.aborted) == len(session.answers) - 3 > 0


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "benchmarks.bench_engine", *arguments, *QUICK]
    return subprocess.Popen(command, cwd=figures.ROOT, env=figures.environment(), stdout=subprocess.PIPE, text=True)


# What a signal does is tried above, and a process that ends by its clock below.
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_benchmark_with_its_result(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    path = tmp_path / "engine.json"
    people = ("--workloads", "users1000,single", "--requests", "3", "--seconds", "300", "--think-s", "300")
    process = started(*people, "--json", str(path))
    assert process.stdout is not None
    try:
        while not process.stdout.readline().startswith("start-up"):
            assert process.poll() is None
        below = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(number)
        assert process.wait(240) == 1
    finally:
        process.kill()
        process.stdout.close()
    assert [(record["name"], number.name in record["incomplete"]) for record in json.loads(path.read_text())] == [
        ("users1000", True),
        ("single", True),
    ]
    assert below
    wait_until(lambda: not alive(below), 60, "the backend and its worker are gone")


def test_the_clock_ends_the_benchmark_before_anything_is_measured(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "engine.json"
    process = started("--workloads", "single", "--limit-s", "0.5", "--json", str(path))
    assert process.wait(240) == 1
    (record,) = json.loads(path.read_text())
    assert record["name"] == "single" and "--limit-s" in record["incomplete"] and record["git"] == "abc1234"
