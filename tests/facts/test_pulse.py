"""A process's sign of life: it never holds the process up, and nobody else inherits it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from headrace_facts import pulse


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A reader that does not wait, and a writer as it is inherited."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_inheritable(writer, True)
    yield reader, writer
    os.close(writer)
    os.close(reader)


def beat(writer: int | None, turns: int = 1) -> None:
    """A loop that begins to beat and goes on for some turns."""

    async def run() -> None:
        pulse.start(writer)
        for _ in range(turns):
            await asyncio.sleep(0)

    asyncio.run(run())


def test_a_loop_beats_as_long_as_it_runs(pipe: tuple[int, int]) -> None:
    reader, writer = pipe

    async def run() -> None:
        pulse.start(writer)
        for _ in range(3):
            while True:
                try:
                    assert set(os.read(reader, 100)) == set(b".")
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 120))
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)


def test_what_the_process_starts_does_not_inherit_the_pipe(pipe: tuple[int, int]) -> None:
    beat(pipe[1])
    assert not os.get_inheritable(pipe[1])


def test_a_pipe_that_nobody_empties_holds_nobody_up(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 16))
    os.set_blocking(writer, True)
    beat(writer)


def test_a_listener_that_has_left_ends_nobody() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    beat(writer)
    os.close(writer)


def test_without_a_pipe_nothing_is_written() -> None:
    beat(None)
