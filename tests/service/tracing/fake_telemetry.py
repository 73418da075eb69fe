"""A telemetry process that only listens.

It keeps the facts that come over its socket, and says what a test has it say.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from typing import TypeVar

from headrace_facts import facts

T = TypeVar("T")


class FakeTelemetry:
    """One socket.

    `reported` is everything that came; hung, it takes connections and reads nothing.
    """

    def __init__(self, path: pathlib.Path, settings: facts.TraceSettings | None = None, *, hung: bool = False) -> None:
        self.path = path
        self.settings = settings or facts.TraceSettings(0.0, facts.Detail.ARRAY, False)
        self.hung = hung
        self.reported: list[facts.Fact] = []
        # What a TraceQuery is answered with; None: nothing ever.
        self.parts: list[bytes] | None = []
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._listens = False

    async def start(self) -> None:
        self._listens = True
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def stop(self) -> None:
        assert self._server is not None
        self._listens = False
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    def say(self, answer: facts.Answer) -> None:
        data = facts.encode(answer)
        for writer in self._writers:
            writer.write(len(data).to_bytes(4, "little") + data)

    def set(self, **changes: object) -> None:
        """Tells all services other settings."""
        self.settings = facts.TraceSettings(
            **{**{name: getattr(self.settings, name) for name in self.settings.__struct_fields__}, **changes}  # type: ignore[arg-type]
        )
        self.say(self.settings)

    def of(self, kind: type[T]) -> list[T]:
        """The facts of a kind so far."""
        return [fact for fact in self.reported if isinstance(fact, kind)]

    async def until(self, kind: type[T], count: int = 1, timeout_s: float = 120.0) -> list[T]:
        """Waits for so many facts of a kind, and a little longer for one too many."""
        async with asyncio.timeout(timeout_s):
            while len(self.of(kind)) < count:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.15)
        return self.of(kind)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._listens:
            # It was taken, and came to nobody before the end.
            writer.transport.abort()
            return
        self._writers.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            if self.hung:
                await asyncio.sleep(3600)
            self.say(self.settings)
            while True:
                length = int.from_bytes(await reader.readexactly(4), "little")
                self._take(facts.decode_fact(await reader.readexactly(length)))
        self._writers.discard(writer)
        writer.close()

    def _take(self, fact: facts.Fact) -> None:
        self.reported.append(fact)
        if isinstance(fact, facts.SetDetail):
            self.set(detail=fact.detail)
        elif isinstance(fact, facts.TraceQuery) and self.parts is not None:
            for part in self.parts:
                self.say(facts.TraceFound(fact.query_id, part, last=False))
            self.say(facts.TraceFound(fact.query_id, b"", last=True))
