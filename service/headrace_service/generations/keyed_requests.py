"""Finds the request of an idempotency key, and waits where nobody can say whether it has one.

Owns the questions to engines and the patience of a Submit. Other engines are asked before the one
where the request would begin, because a guardian may have moved the key's request; so nothing is
computed twice while any engine knows the key. Who is asked, and where a request begins, is
`engines.key_places`'s.
"""

from __future__ import annotations

import asyncio
import enum
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import grpc

from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.calls.call import Call
from headrace_service.engines import request_ids
from headrace_service.engines.served_model import ServedModel

# One that does not answer so long is as one that is out of reach.
_ANSWER_S = 2.0
# How long a call waits for an engine that can take its request; more than engines want to be sure
# that nobody knows of another request under its key.
_PATIENCE_S = 15.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
# An engine that was lost, or not reached yet, for so long is not connected soon, and what it had
# has been moved by guardians, the second ones too.
_SETTLED_S = 3.0


class Key(NamedTuple):
    """An idempotency key of a tenant."""

    tenant: str
    idempotency_key: str

    @property
    def place(self) -> str:
        """Its place in the order of engines, which is that of its request's id."""
        return request_ids.key_place(self.tenant, self.idempotency_key)


class _Other(enum.Enum):
    """An answer that names no request."""

    UNKNOWN = enum.auto()
    SILENT = enum.auto()


class Answers(NamedTuple):
    """What engines said of a key.

    Attributes:
        found: The key's request; None: nobody knows the key.
        silent: Engines that did not answer.
    """

    found: engine_pb2.Added | None
    silent: list[ServedModel]


async def ask(query: engine_pb2.KeyQuery, engines: Sequence[ServedModel]) -> Answers:
    """Asks engines for a key.

    Raises:
        ServiceError: ALREADY_EXISTS, the key was used with another spec.
    """
    answers = await asyncio.gather(*(_ask(query, engine) for engine in engines))
    found = next((answer for answer in answers if isinstance(answer, engine_pb2.Added)), None)
    silent = [engine for engine, answer in zip(engines, answers, strict=True) if answer is _Other.SILENT]
    return Answers(found, silent)


async def _ask(query: engine_pb2.KeyQuery, engine: ServedModel) -> engine_pb2.Added | _Other:
    own = engine_pb2.KeyQuery()
    own.CopyFrom(query)
    try:
        return await asyncio.wait_for(engine.engine.find_key(own), _ANSWER_S)
    except TimeoutError:
        return _Other.SILENT
    except errors.ServiceError as error:
        if error.code is grpc.StatusCode.NOT_FOUND:
            return _Other.UNKNOWN
        if error.code is grpc.StatusCode.UNAVAILABLE:
            return _Other.SILENT
        raise


def may_have_left(home: ServedModel) -> bool:
    """Whether requests of the keys of an engine may be at other engines.

    They are where it was away when they were sent, or since. An engine that has been connected for
    longer than logs are kept was not.
    """
    return time.monotonic() - home.engine.since_s < 1e-9 * home.engine.log_ttl_ns


def check_settled(unasked: Sequence[ServedModel]) -> None:
    """Raises UNAVAILABLE while requests may be on their way from one of the engines.

    Args:
        unasked: Engines that could not be asked for a key.
    """
    now_s = time.monotonic()
    if any(now_s - engine.engine.since_s < _SETTLED_S for engine in unasked):
        raise errors.unavailable("idempotency_key: may be in use at an engine that cannot be reached; try again")


class Attempts:
    """The attempts of one call to have its request begin, as long as its patience goes."""

    def __init__(self, call: Call) -> None:
        """Starts with the whole patience of the call, which ends with its deadline."""
        ends_s = time.monotonic() + _PATIENCE_S
        self._ends_s = ends_s if call.deadline_ns is None else min(ends_s, 1e-9 * call.deadline_ns)
        self._pause_s = _FIRST_PAUSE_S

    async def pause_after(self, error: errors.ServiceError, home: ServedModel) -> None:
        """Returns when the next attempt is due.

        A model of a single engine is not waited for: no other one can take its requests.

        Raises:
            ServiceError: the error, where another attempt can't help or would come too late.
        """
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        is_late = time.monotonic() + pause_s >= self._ends_s
        if error.code is not grpc.StatusCode.UNAVAILABLE or len(home.engines) < 2 or is_late:
            raise error
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        await asyncio.sleep(pause_s)
