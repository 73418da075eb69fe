"""Whether a request may begin here although other engines did not say whether they know its key.

An idempotency key names one request, wherever that is. A service that cannot ask an engine for a
key does not know whether the key's request is there, has been moved, or never was. Another service
may know: one that reaches the engine would find the key there, and one that guards requests of a
lost engine is about to have them go on elsewhere. Services report which engines they hold so, and a
request is taken only where none of the engines in question is held now, or was within a time that
covers what nobody reports: services that are gone or not yet here, and questions on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import grpc

from headrace_backend.engine.errors import RefusalCode, RequestRefused
from headrace_backend.server.streams import incoming
from headrace_backend.server.streams.service_stream import ServiceStream
from headrace_backend.server.streams.statuses import ended
from headrace_protos.engine.v1 import engine_pb2

# Longer than a second guardian waits for the first (2 s), and than passes between a service's
# question for a key to other engines and its request here (2 s for their answers, 2 s for quotas).
QUIET_NS = 5 * 10**9
# Longer than a request waits here for its form to be compiled before it is taken.
_KEPT_NS = 600 * 10**9


class _Held(NamedTuple):
    """What one service holds."""

    reached: frozenset[int]
    # Of lost engines.
    guarded: frozenset[int]


_NOTHING = _Held(frozenset(), frozenset())


class HeldEngines:
    """Which engines of the model services hold, and until when others were held.

    Args:
        clock: Nanoseconds.
        quiet_ns: How long nobody must have held an engine before another one stands in for it.
    """

    def __init__(self, clock: Callable[[], int], quiet_ns: int = QUIET_NS) -> None:
        self._clock = clock
        self._quiet_ns = quiet_ns
        # Before its first moment this engine knows of no service.
        self._began_ns = clock()
        self._by_stream: dict[int, _Held] = {}
        # When each engine was held last that no service, or not each, holds any more.
        self._released_ns: dict[int, int] = {}

    def read(self, stream: ServiceStream, held: engine_pb2.HeldEngines) -> None:
        """Takes the complete lists of what a service holds from now on.

        Raises StreamEnded: the message breaks a rule of the wire.
        """
        _require(incoming.unknown_field(held) is None, "held_engines has fields that protocol version 4 does not know")
        for field, numbers in (("reached", held.reached), ("guarded", held.guarded)):
            most = incoming.MAX_ENGINES
            _require(len(numbers) <= most, f"held_engines.{field}: at most {most} are allowed")
        self.report(stream.stream_id, held.reached, held.guarded)

    def report(self, stream_id: int, reached: Collection[int], guarded: Collection[int]) -> None:
        """Takes what the service of a stream holds from now on."""
        before = self._by_stream.get(stream_id, _NOTHING)
        now = self._by_stream[stream_id] = _Held(frozenset(reached), frozenset(guarded))
        self._release((before.reached | before.guarded) - (now.reached | now.guarded))

    def stream_lost(self, stream_id: int) -> None:
        """Notes that a service is gone, which may hold on elsewhere what it held."""
        before = self._by_stream.pop(stream_id, _NOTHING)
        self._release(before.reached | before.guarded)

    def check_unheld(self, numbers: Collection[int], stands_in: bool, asked_ns: int) -> None:
        """Refuses a request whose key may be known to engines that were not asked.

        Args:
            numbers: The engines that were not asked.
            stands_in: Whether the key's own engine is one of them.
            asked_ns: When the request came here, on the clock; the other engines were asked before.

        Raises:
            RequestRefused: UNAVAILABLE; a service reaches one of them. Where this engine stands in,
                also if one of them is guarded, or was held within the quiet time.
        """
        left_ns = 0
        if any(not held.reached.isdisjoint(numbers) for held in self._by_stream.values()):
            left_ns = self._quiet_ns
        elif stands_in:
            left_ns = self._left_ns(numbers, asked_ns)
        if left_ns > 0:
            raise RequestRefused(
                RefusalCode.UNAVAILABLE,
                "idempotency_key: may be in use at an engine that cannot be reached; try again",
                retry_after_ns=left_ns,
            )

    def _left_ns(self, numbers: Collection[int], asked_ns: int) -> int:
        """Returns the rest of the quiet time; 0 or less: it is over."""
        if any(not held.guarded.isdisjoint(numbers) for held in self._by_stream.values()):
            return self._quiet_ns
        last_ns = max(self._released_ns.get(number, self._began_ns) for number in numbers)
        return max(last_ns, self._began_ns) + self._quiet_ns - asked_ns

    def _release(self, numbers: Collection[int]) -> None:
        now_ns = self._clock()
        recent = {number: ns for number, ns in self._released_ns.items() if ns + _KEPT_NS > now_ns}
        self._released_ns = recent | dict.fromkeys(numbers, now_ns)


def _require(holds: bool, rule: str) -> None:
    """Raises StreamEnded unless a rule holds: these messages have no answer that could refuse."""
    if not holds:
        raise ended(grpc.StatusCode.INVALID_ARGUMENT, rule)
