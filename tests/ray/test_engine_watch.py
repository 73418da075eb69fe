"""What a backend says of itself reaches its actor, also after its connection has ended."""

from __future__ import annotations

import asyncio
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import pytest
from tests.service.fake_engine import FakeEngine

from headrace_protos.engine.v1 import engine_pb2
from headrace_ray import engine_watch
from headrace_ray.engine_watch import EngineWatch


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(engine_watch, "LOOK_S", 0.02)
    monkeypatch.setattr(engine_watch, "_SILENCE_S", 0.5)
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield f"unix:{pathlib.Path(folder)}/engine.sock"


class Silent(FakeEngine):
    """A backend that answers no question about its load, until it is allowed to."""

    answers = False
    num_questions = 0

    def _on_load(self, connection: object, query: engine_pb2.LoadQuery) -> None:
        self.num_questions += 1
        if self.answers:
            super()._on_load(connection, query)  # type: ignore[arg-type]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_backend_that_comes_and_goes_is_seen_again_and_again(address: str) -> None:
    watch = EngineWatch(address, None)
    task = asyncio.create_task(watch.run())
    for _ in range(4):
        engine = FakeEngine(engine_pb2.EngineModel(name="a"), lambda add, index: [10])
        await engine.start(address)
        await until(lambda: watch.seen)
        assert watch.seen is not None and watch.seen.serving
        await engine.stop()
        await until(lambda: watch.seen is None)
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_a_backend_that_leaves_a_question_open_is_asked_again(address: str) -> None:
    engine = Silent(engine_pb2.EngineModel(name="a"), lambda add, index: [10])
    await engine.start(address)
    watch = EngineWatch(address, None)
    task = asyncio.create_task(watch.run())
    await until(lambda: engine.num_questions >= 2)
    assert watch.seen is None
    engine.answers = True
    await until(lambda: watch.seen)
    task.cancel()
    await engine.stop()
