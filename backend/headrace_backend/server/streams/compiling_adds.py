"""Requests whose structured output is being compiled: they are at the door, not in the engine yet.

Owns what such a request's service says of it meanwhile, which is said to the engine once the
request is there: that it is to end, or that its reader has gone. A service that goes takes along
what it still waits for. The wait is a part of the request's queue, which begins at its call. Does
not own compiling, nor what an answer looks like (`engine_service`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable

from headrace_backend.engine.engine import Engine
from headrace_backend.engine.errors import RequestRefused, Violation
from headrace_backend.engine.request import EngineRequest
from headrace_backend.structured_output.compiler import Compiled, GrammarCompiler
from headrace_request.structured_output import StructuredOutput

# Enters a request whose form was compiled, or refuses it by what that came to; says whether the
# engine has it.
Enter = Callable[[Compiled], bool]


@dataclasses.dataclass(slots=True, eq=False)
class _CompilingAdd:
    stream_id: int
    handle: int
    request: EngineRequest
    began_ns: int
    # What is to be done once the engine has the request, and whether that ends it.
    later: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    is_ending: bool = False


class CompilingAdds:
    """The requests that wait for the compiler, over all streams."""

    def __init__(self, engine: Engine, grammars: GrammarCompiler | None, clock: Callable[[], int]) -> None:
        """None waits.

        Args:
            engine: Is to have the requests.
            grammars: Compiles; None: the model can't have structured output.
            clock: The engine's.
        """
        self._engine = engine
        self._grammars = grammars
        self._clock = clock
        self._adds: list[_CompilingAdd] = []

    def start(self, stream_id: int, handle: int, request: EngineRequest, enter: Enter) -> None:
        """Compiles a request's structured output, then has `enter` called if its stream is there.

        Args:
            stream_id: The stream that asks.
            handle: The handle that the service has chosen for its subscription; 0: none.
            request: What is to be entered.
            enter: Called in a later turn of the event loop.

        Raises:
            RequestRefused: INVALID_ARGUMENT, by a rule of the request; RESOURCE_EXHAUSTED, too many
                wait.
        """
        self._engine.check(request)
        asked = request.asked.structured_output
        assert asked is not None, "others need no compiler"
        compiled = self._compiled(asked)
        add = _CompilingAdd(stream_id, handle, request, self._clock())
        self._adds.append(add)
        loop = asyncio.get_running_loop()

        def on_compiled(compiled: Compiled) -> None:
            # The loop is closed when the process ends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._finish, add, compiled, enter)

        compiled.add_done_callback(on_compiled)

    def delay_abort(self, request_id: str, tenant: str, act: Callable[[], object]) -> bool:
        """Has a request ended once the engine has it; False if it does not wait here."""
        return self._delay(lambda add: (add.request.request_id, add.request.tenant) == (request_id, tenant), act, True)

    def delay_detach(self, stream_id: int, handle: int, act: Callable[[], object]) -> bool:
        """Has something done once the engine has the request that a handle was chosen for.

        It ends the request unless that outlives its readers.
        """
        return self._delay(lambda add: (add.stream_id, add.handle) == (stream_id, handle), act, False)

    def claims(self, stream_id: int, handle: int) -> bool:
        """Whether a request that waits here was given this handle."""
        return any((add.stream_id, add.handle) == (stream_id, handle) for add in self._adds)

    def stream_lost(self, stream_id: int) -> None:
        """Forgets what a stream waited for: nobody heard that it was taken."""
        lost = [add for add in self._adds if add.stream_id == stream_id]
        self._adds = [add for add in self._adds if add.stream_id != stream_id]
        for add in lost:
            self._give_up(add)

    def close(self) -> None:
        """Ends the compiler's threads and processes."""
        if self._grammars is not None:
            self._grammars.close()

    def _compiled(self, asked: StructuredOutput) -> Compiled:
        if self._grammars is None:
            rule = "can't be used: the model has no tokenizer, or no end-of-text token"
            raise RequestRefused.invalid([Violation("spec.structured_output", rule)])
        return self._grammars.compile(asked)

    def _delay(self, matches: Callable[[_CompilingAdd], bool], act: Callable[[], object], ends: bool) -> bool:
        found = next(filter(matches, self._adds), None)
        if found is None:
            return False
        found.later.append(act)
        found.is_ending |= ends or not found.request.detached
        self._give_up(found)
        return True

    def _give_up(self, ended: _CompilingAdd) -> None:
        """Takes a form from the compiler's queue if nobody waits for it who does not end."""
        asked = ended.request.asked.structured_output
        waiting = (add for add in self._adds if add.request.asked.structured_output == asked)
        if self._grammars is not None and asked is not None and all(add.is_ending for add in waiting):
            self._grammars.give_up(asked)

    def _finish(self, add: _CompilingAdd, compiled: Compiled, enter: Enter) -> None:
        if self._grammars is not None:
            self._grammars.make_room()
        # What does not end needs its form: it was not compiled, as the process ends.
        if add not in self._adds or (compiled.cancelled() and not add.is_ending):
            return
        self._adds.remove(add)
        # The engine's account of it begins when it is entered.
        add.request.service_ns += self._clock() - add.began_ns
        if enter(compiled):
            for act in add.later:
                act()
