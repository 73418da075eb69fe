"""The service's end of the feed: what is reported, and what the telemetry process asks for.

Owns the feed, the policy that came over it, and how many calls are open. Made only where there is a
telemetry socket; whoever holds None instead has telemetry off. What facts hold is made elsewhere
(`generation_fact`, `interceptor`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping

from headrace_facts import facts, log_output
from headrace_facts.clocks import unix_offset_ns
from headrace_facts.facts import Detail
from headrace_facts.feed import Feed
from headrace_facts.version import server_version
from headrace_service import errors
from headrace_service.tracing.call_trace import CallTrace, Policy
from headrace_service.tracing.context import CallerContext, RootSampler
from headrace_service.tracing.generation_trace import GenerationTrace
from headrace_service.tracing.trace_queries import TraceQueries

_LOAD_EVERY_S = 1.0
_SETTINGS_WITHIN_S = 5.0
_LOOK_EVERY_S = 0.02
# Until the telemetry process has said what it wants; a generation without a detail of its own then
# gets the one that holds there.
_UNREPORTED = Policy(RootSampler(0.0), record_all=False, detail=Detail.DEFAULT, sample_ratio=0.0)


class Tracer:
    """What one service process tells.

    Args:
        address: the telemetry process's socket.
        service_name: names this process.

    Attributes:
        policy: what is to be recorded, as it is now.
        open_calls: how many calls are open.
        unix_offset_ns: what takes this process's times to UNIX time.
    """

    def __init__(self, address: str, service_name: str) -> None:
        self.policy = _UNREPORTED
        self.open_calls = 0
        self.unix_offset_ns = unix_offset_ns()
        hello = facts.Hello(
            kind="service",
            name=service_name,
            instance=secrets.token_hex(8),
            version=server_version(),
            pid=os.getpid(),
            unix_offset_ns=self.unix_offset_ns,
        )
        self._feed = Feed(address, hello, self._answered)
        self._queries = TraceQueries(self._feed.tell)
        self.tell = self._feed.tell

    @property
    def connected(self) -> bool:
        """Whether the telemetry process can be reached."""
        return self._feed.connected

    async def run(self, load: Callable[[], tuple[int, int]]) -> None:
        """Tells every second how busy this service is, until cancelled.

        Args:
            load: returns the generations that are open, and the bytes that wait for readers.
        """
        self._feed.start()
        while True:
            open_generations, pending_bytes = load()
            self.tell(facts.ServiceLoad(self.open_calls, open_generations, pending_bytes))
            lost_lines = log_output.take_lost_lines()
            if lost_lines:
                self.tell(facts.LinesLost(lost_lines))
            await asyncio.sleep(_LOAD_EVERY_S)

    async def stop(self) -> None:
        """Sends what waits, if somebody takes it, and ends the connection."""
        await self._feed.stop()

    # -- what is reported

    def call_began(self) -> None:
        """Counts a call as open."""
        self.open_calls += 1

    def call_ended(self, call: CallTrace, status: str, start_ns: int, system: str = "grpc") -> None:
        """Reports a call, once all its generations are.

        Args:
            call: the call.
            status: name of the gRPC code that it ended with, whatever wire it came by.
            start_ns: CLOCK_MONOTONIC of its arrival.
            system: the wire, as rpc.system.name has it.
        """
        self.open_calls -= 1
        ended = facts.CallEnded(
            method=call.method,
            status=status,
            unix_offset_ns=self.unix_offset_ns,
            start_ns=start_ns,
            end_ns=time.monotonic_ns(),
            request_id=call.request_id,
            span=call.span,
            links=call.links,
            system=system,
        )
        call.when_reported(lambda: self.tell(ended))

    def generation(
        self,
        model: str,
        model_revision: str,
        operation: str,
        parameters: Mapping[str, int | float],
        num_outputs: int,
        prompt_tokens: int,
        asked_detail: int,
        call: CallTrace | None,
        own: CallerContext | None,
    ) -> GenerationTrace:
        """Returns what is kept of a new generation.

        Args:
            model: its name.
            model_revision: the folder's.
            operation: "chat" or "text_completion".
            parameters: what the caller asked for, by their names in gen_ai.request.
            num_outputs: how many outputs it has.
            prompt_tokens: length of its prompt.
            asked_detail: the level of detail that the request asks for, 0 if it asks for none.
            call: brought it; None where nobody asked in a call.
            own: the context that the request itself brought, if it did.
        """
        policy = self.policy
        return GenerationTrace(
            model=model,
            model_revision=model_revision,
            operation=operation,
            wire=call.wire if call is not None else "",
            parameters=parameters,
            num_outputs=num_outputs,
            prompt_tokens=prompt_tokens,
            span=call.generation_span(policy, own) if call is not None else None,
            detail=Detail(asked_detail) or policy.detail,
            call=call,
        )

    # -- what the telemetry process is asked for

    async def set_detail(self, detail: Detail) -> None:
        """Has all processes trace so much from now on; returns when this one does.

        Raises:
            ServiceError: UNAVAILABLE, the telemetry process cannot be reached now, or did not
                answer.
        """
        self._check_connected()
        self.tell(facts.SetDetail(detail))
        try:
            async with asyncio.timeout(_SETTINGS_WITHIN_S):
                while self.policy.detail is not detail:
                    await asyncio.sleep(_LOOK_EVERY_S)
        except TimeoutError:
            raise errors.unavailable("the telemetry process took the request, but did not say so") from None

    @property
    def queries(self) -> TraceQueries:
        """Questions about recent traces.

        Raises ServiceError: UNAVAILABLE, the telemetry process cannot be reached now.
        """
        self._check_connected()
        return self._queries

    def _check_connected(self) -> None:
        if not self.connected:
            # It starts after the others, and again when it dies: both pass.
            raise errors.unavailable("the telemetry process cannot be reached yet")

    def _answered(self, answer: facts.Answer) -> None:
        if isinstance(answer, facts.TraceFound):
            self._queries.answered(answer)
        else:
            detail = answer.detail or Detail.ARRAY
            self.policy = Policy(RootSampler(answer.sample_ratio), answer.record_all, detail, answer.sample_ratio)
