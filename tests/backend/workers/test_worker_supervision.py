"""Supervision of workers: when they are given up, and how long they may be silent.

Lives that can't begin because descriptors are short leave nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import types
from collections.abc import Iterator

import psutil
import pytest
from tests.support.descriptors import open_descriptors, settled_descriptors, stay_open

from headrace_backend.config import EngineConfig
from headrace_backend.engine.answers import LossOutcome
from headrace_backend.server.workers import worker_losses, worker_supervision
from headrace_backend.server.workers.host_ranks import WorkerLaunch
from headrace_backend.server.workers.worker_group import WorkerGroup, WorkersLost
from headrace_backend.server.workers.worker_losses import WorkerLosses
from headrace_backend.server.workers.worker_process import RankDescriptors
from headrace_backend.server.workers.worker_supervision import WorkersGivenUp, WorkerSupervision, _Watchdog
from headrace_backend.step.ring import create_ring

# Does nothing with a worker's arguments.
SLEEPS = ("/bin/sh", "-c", "exec sleep 60")
# Above what the library itself may open and close in between.
SPARE = 64


def launch_of(tp: int) -> WorkerLaunch:
    config = EngineConfig(model=pathlib.Path("m"), device="cpu", tp=tp, max_worker_restarts=2)
    return WorkerLaunch(config, 256, SLEEPS)


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """No more than so many can be opened inside."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, open_descriptors())) + SPARE, limits[1]))
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("count", range(6))
def test_what_ranks_share_is_made_whole_or_not_at_all(count: int) -> None:
    before = settled_descriptors()
    for make, needed in ((lambda: create_ring(1, 3), 5), (lambda: RankDescriptors.create(2), 2)):
        with (
            descriptors_left(count),
            pytest.raises(OSError, match="open files") if count < needed else contextlib.nullcontext(),
        ):
            make().close()
        assert not stay_open(before)


async def test_workers_that_can_not_be_started_are_given_up() -> None:
    engine_loop = types.SimpleNamespace(on_results=lambda payloads: None, num_settled_steps=0)
    supervision = WorkerSupervision(launch_of(2), engine_loop, None, lambda ready: None)  # type: ignore[arg-type]  # neither is reached
    said = "2 worker deaths within 60 s; the last: workers could not be started: Too many open files"
    with descriptors_left(0), pytest.raises(WorkersGivenUp, match=said):
        await supervision.run()


async def test_however_many_descriptors_are_short_no_process_is_left() -> None:
    before = set(psutil.Process().children(recursive=True))
    refused, lost, made = 0, 0, 0
    for count in range(0, 48, 3):
        with descriptors_left(count):
            try:
                group = WorkerGroup(launch_of(2), lambda payloads, drafts: None)
            except OSError:
                refused += 1
                group = None
        if group is not None:
            error = group.lost.exception() if group.lost.done() else None
            assert error is None or (isinstance(error, WorkersLost) and "could not be started" in str(error))
            lost, made = lost + (error is not None), made + (error is None)
            await group.close(0)
        # Those of earlier tests may end.
        assert set(psutil.Process().children(recursive=True)) <= before
    assert refused and lost and made


async def test_starts_that_never_come_to_anything_are_given_up_however_long_each_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if each took longer than the time within which deaths are counted.
    monkeypatch.setattr(worker_losses, "WINDOW_S", 0.0)
    config = EngineConfig(model=pathlib.Path("m"), device="cpu", max_worker_restarts=2, start_timeout_s=0.2)
    engine_loop = types.SimpleNamespace(
        on_results=lambda payloads: None, num_settled_steps=0, workers_lost=lambda step_id: LossOutcome()
    )
    health = types.SimpleNamespace(set_not_serving=lambda reason: None)
    launch = WorkerLaunch(config, 256, SLEEPS)
    supervision = WorkerSupervision(launch, engine_loop, health, lambda ready: None)  # type: ignore[arg-type]  # all that is reached
    said = "2 worker deaths in a row without a step in between; the last: no start-up progress for 0.2 s"
    with pytest.raises(WorkersGivenUp, match=said):
        await supervision.run()


def test_deaths_count_for_a_minute_and_those_of_fruitless_lives_in_a_row() -> None:
    losses = WorkerLosses()
    for now_s in (0, 30, 59):
        losses.note_death(now_s, fruitful=True)
    assert str(losses) == "3 worker deaths within 60 s"
    losses.note_death(100, fruitful=True)
    assert losses.count == 2
    for now_s in (1000, 2000, 3000):
        losses.note_death(now_s, fruitful=False)
    assert str(losses) == "3 worker deaths in a row without a step in between"
    losses.note_death(4000, fruitful=True)
    assert losses.count == 1
    losses.explained()
    assert losses.count == 0


def test_a_worker_is_kept_after_a_failure_unless_there_was_trouble_a_moment_ago() -> None:
    losses = WorkerLosses()
    assert losses.note_failure(0.0)
    assert not losses.note_failure(59.0)
    assert losses.note_failure(61.0)
    losses.explained()
    assert losses.note_failure(62.0)
    losses.explained()
    losses.note_death(63.0, fruitful=True)
    assert not losses.note_failure(64.0)


class Clock:
    """Time, and a group whose progress is what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, expected_s: float, marks_per_step: int) -> None:
        self.now_s, self.marks = 0.0, 0
        monkeypatch.setattr(worker_supervision.time, "monotonic", lambda: self.now_s)
        engine_loop = types.SimpleNamespace(num_plans=1, has_work=True, expected_step_s=expected_s)
        group = types.SimpleNamespace(progress=lambda: (self.marks,))
        self.watchdog = _Watchdog(engine_loop, group, 10.0, marks_per_step)  # type: ignore[arg-type]  # all that it reads

    def found_after_s(self, marks_until_s: float = 0.0) -> float:
        """When a worker is found that sets its last mark at a time."""
        while True:
            self.now_s += 0.5
            self.marks += self.now_s <= marks_until_s
            if self.watchdog.is_too_long():
                return self.now_s
            assert self.now_s < 10_000


@pytest.mark.parametrize(
    ("expected_s", "marks_per_step", "marks_until_s", "found_s"),
    # Nothing is expected to take long; a step that is, of which nothing is seen; one that shows its
    # layers; one that did.
    [(0.0, 1, 0.0, 10.0), (60.0, 1, 0.0, 250.0), (60.0, 60, 0.0, 14.0), (60.0, 60, 100.0, 114.0)],
)
def test_a_worker_may_be_silent_for_as_long_as_what_it_computes_may_take(
    monkeypatch: pytest.MonkeyPatch, expected_s: float, marks_per_step: int, marks_until_s: float, found_s: float
) -> None:
    assert Clock(monkeypatch, expected_s, marks_per_step).found_after_s(marks_until_s) == found_s
