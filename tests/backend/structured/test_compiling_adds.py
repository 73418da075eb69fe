"""Requests at the compiler's door: forms that nobody waits for any more leave its queue."""

from __future__ import annotations

import asyncio
import concurrent.futures
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_backend.engine.request import EngineRequest
from headrace_backend.server.streams.compiling_adds import CompilingAdds
from headrace_request.request import Request
from headrace_request.stop import Stop
from headrace_request.structured_output import StructuredOutput, choice

FORM = choice(["x"])


class Compiler:
    """Compiles nothing: a test sets what comes of a form."""

    def __init__(self) -> None:
        self.waiting: dict[StructuredOutput, concurrent.futures.Future[Any]] = {}
        self.given_up: list[StructuredOutput] = []

    def compile(self, asked: StructuredOutput) -> concurrent.futures.Future[Any]:
        return self.waiting.setdefault(asked, concurrent.futures.Future())

    def give_up(self, asked: StructuredOutput) -> None:
        if self.waiting[asked].cancel():
            self.given_up.append(asked)

    def make_room(self) -> None:
        pass


class Door:
    """The adds of one engine, and which requests it was given, with what came of their form."""

    def __init__(self) -> None:
        self.compiler = Compiler()
        self.now_ns = 1_000
        engine: Any = SimpleNamespace(check=lambda request: None)
        self.adds = CompilingAdds(engine, self.compiler, lambda: self.now_ns)  # type: ignore[arg-type]
        self.entered: list[tuple[str, bool]] = []
        self.service_ns: list[int] = []
        self.ended: list[str] = []

    def start(self, name: str, stream: int, detached: bool = False) -> None:
        asked = Request(b"\0\0\0\0", Stop(4), structured_output=FORM)
        request = EngineRequest(name, asked, detached=detached, service_ns=7)

        def enter(compiled: concurrent.futures.Future[Any]) -> bool:
            self.entered.append((name, compiled.cancelled()))
            self.service_ns.append(request.service_ns)
            return True

        self.adds.start(stream, 1, request, enter)

    def abort(self, name: str) -> bool:
        return self.adds.delay_abort(name, "", lambda: self.ended.append(name))

    def detach(self, stream: int) -> bool:
        return self.adds.delay_detach(stream, 1, lambda: self.ended.append(f"reader {stream}"))


@pytest.mark.parametrize("leaves", ["abort", "detach"])
async def test_a_form_is_given_up_when_the_last_request_that_waits_for_it_ends(leaves: str) -> None:
    door = Door()
    door.start("a", 1)
    door.start("b", 2)
    act = {"abort": lambda name, stream: door.abort(name), "detach": lambda name, stream: door.detach(stream)}[leaves]
    assert act("a", 1) and not door.compiler.given_up
    assert act("b", 2) and door.compiler.given_up == [FORM]
    await asyncio.sleep(0.01)
    # The engine has them, to say how they ended.
    assert door.entered == [("a", True), ("b", True)] and len(door.ended) == 2
    assert not act("a", 1)


async def test_the_wait_for_a_form_counts_as_time_before_the_engine() -> None:
    door = Door()
    door.start("a", 1)
    door.now_ns += 300
    door.start("b", 2)
    door.now_ns += 50
    door.compiler.waiting[FORM].set_result(None)
    await asyncio.sleep(0.01)
    assert door.service_ns == [357, 57]


async def test_a_request_that_outlives_its_readers_keeps_its_form() -> None:
    door = Door()
    door.start("a", 1, detached=True)
    assert door.detach(1) and not door.compiler.given_up
    door.compiler.waiting[FORM].set_result(None)
    await asyncio.sleep(0.01)
    assert (door.entered, door.ended) == ([("a", False)], ["reader 1"])


async def test_a_lost_stream_takes_its_forms_along_and_leaves_those_of_others() -> None:
    door = Door()
    door.start("a", 1)
    door.start("b", 2)
    door.adds.stream_lost(1)
    assert not door.compiler.given_up
    door.adds.stream_lost(2)
    assert door.compiler.given_up == [FORM]
    await asyncio.sleep(0.01)
    assert not door.entered


async def test_no_request_enters_without_its_form_when_the_process_ends() -> None:
    door = Door()
    door.start("a", 1)
    door.compiler.waiting[FORM].cancel()
    await asyncio.sleep(0.01)
    assert not door.entered
