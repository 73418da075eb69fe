"""Finds the request of an idempotency key that moved to another engine when the key's own was lost.

Owns the question to the other engines. They are asked before the key's own engine is, because that
may have come back without what it knew; so nothing is computed twice while any engine knows the
key. In which order guardians move requests, and so who is asked, is the place's (`takeover_order`).
"""

from __future__ import annotations

import asyncio

import grpc

from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.engines import request_ids, takeover_order
from headrace_service.engines.served_model import ServedModel

# One that does not answer so long is as one that is out of reach.
_PATIENCE_S = 2.0


async def find(query: engine_pb2.KeyQuery, home: ServedModel) -> engine_pb2.Added | None:
    """Asks the engines other than the key's own; returns None where none of them knows the key.

    Raises:
        ServiceError: ALREADY_EXISTS, the key was used with another spec.
    """
    others = [engine for engine in home.engines if engine is not home and engine.is_reachable]
    place = request_ids.key_place(query.tenant, query.idempotency_key)
    answers = await asyncio.gather(*(_ask(query, engine) for engine in takeover_order.in_order(others, place)))
    return next((found for found in answers if found is not None), None)


async def _ask(query: engine_pb2.KeyQuery, engine: ServedModel) -> engine_pb2.Added | None:
    own = engine_pb2.KeyQuery()
    own.CopyFrom(query)
    try:
        return await asyncio.wait_for(engine.engine.find_key(own), _PATIENCE_S)
    except TimeoutError:
        return None
    except errors.ServiceError as error:
        if error.code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE):
            return None
        raise
