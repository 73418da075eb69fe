"""A life of workers that can't begin because descriptors are short: a death like any other, after which nothing is left."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import types
from collections.abc import Iterator

import psutil
import pytest
from tests.support.descriptors import open_descriptors, settled_descriptors

from headrace_backend.config import EngineConfig
from headrace_backend.ring import create_ring
from headrace_backend.server.worker_group import WorkerGroup, WorkerLaunch, WorkersLost
from headrace_backend.server.worker_process import RankDescriptors
from headrace_backend.server.worker_supervision import WorkersGivenUp, WorkerSupervision

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
        assert open_descriptors() <= before


async def test_workers_that_can_not_be_started_are_given_up() -> None:
    engine_loop = types.SimpleNamespace(on_results=lambda payloads: None)
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
                group = WorkerGroup(launch_of(2), lambda payloads: None)
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
