"""Which services are asked to guard which requests.

A detached request has two guardians where two services guard: the service that brought it, and
another one, so that what was emitted outlives the loss of the first together with the engine's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from headrace_backend.engine.engine import Engine
from headrace_backend.engine.request import EngineRequest
from headrace_backend.server.streams.service_stream import ServiceStream
from headrace_protos.engine.v1 import engine_pb2


class GuardOffers:
    """Offers requests to the services that are connected, which take turns.

    Args:
        engine: The engine that has the requests.
        streams: The services' streams by their ids, as they come and go.
    """

    def __init__(self, engine: Engine, streams: Mapping[int, ServiceStream]) -> None:
        self._engine = engine
        self._streams = streams
        self._turns = itertools.count()

    def offer_all(self) -> None:
        """Shares requests that lack a guardian out among the services that guard.

        Who has the only copy of one hears of it too, because it may have been the second until now.
        """
        offers: dict[int, list[EngineRequest]] = {}
        for request, guardian in self._engine.unguarded():
            if guardian is not None:
                offers.setdefault(guardian, []).append(request)
            if (other := self._next(guardian)) is not None:
                offers.setdefault(other.stream_id, []).append(request)
        for stream_id, requests in offers.items():
            _offer(self._streams[stream_id], requests)

    def offer_second(self, request: EngineRequest, guardian: int) -> None:
        """Offers a request to another service than its first guardian, whose stream is given."""
        if (other := self._next(guardian)) is not None:
            _offer(other, [request])

    def _next(self, but: int | None) -> ServiceStream | None:
        streams = [stream for stream in self._streams.values() if stream.guards and stream.stream_id != but]
        return streams[next(self._turns) % len(streams)] if streams else None


def _offer(stream: ServiceStream, requests: Sequence[EngineRequest]) -> None:
    owned = [engine_pb2.OwnedRequest(request_id=each.request_id, tenant=each.tenant) for each in requests]
    stream.send(engine_pb2.FromEngine(unguarded=engine_pb2.Unguarded(requests=owned)))
