"""One reader of a submitted generation, at whichever engine has it.

Owns the search for that engine, at the beginning and when it is lost while the reader reads: its
guardian, in this process or another, has another engine go on, and the reader's stream goes on at
the token where it was. How long is searched is bounded.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import grpc
import structlog

from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors, logs
from headrace_service.engines.served_model import ServedModel
from headrace_service.engines.served_models import ServedModels
from headrace_service.generations.guardian import Guardian
from headrace_service.streams.catching_up import CatchingUp
from headrace_service.streams.generation_stream import GenerationStream

_PATIENCE_S = 15.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
# What an engine says that does not have the generation, or no place for a reader yet.
_ELSEWHERE = frozenset({grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})

_log = structlog.get_logger("headrace.service")


class Subscription:
    """A reader's stream, and the engine that it reads from.

    Args:
        stream: what the reader gets.
        attach: request id, output, first token, tenant and limits.
        models: all engines.
        guardian: this process's.

    Attributes:
        stream: what the reader gets.
        model: the engine that has the generation.
    """

    def __init__(
        self, stream: GenerationStream, attach: engine_pb2.AttachRequest, models: ServedModels, guardian: Guardian
    ) -> None:
        self.stream = stream
        self.model: ServedModel | None = None
        self._attach = attach
        self._models = models
        self._guardian = guardian
        # Whether an engine is being asked for the first time.
        self._beginning = False
        # How often the engine that is asked was lost before.
        self._num_losses = 0
        self._search: asyncio.Task[None] | None = None

    async def begin(self) -> engine_pb2.Attached:
        """Finds the engine and attaches the stream.

        Raises:
            ServiceError: NOT_FOUND; OUT_OF_RANGE; UNAVAILABLE; RESOURCE_EXHAUSTED.
        """
        await self._guardian.settled(self._attach.request_id)
        self.stream.rescue, self._beginning = self._rescue, True
        try:
            return await self._first_attached()
        except errors.ServiceError as error:
            if not self._was_lost_meanwhile():
                raise
            return await self._attached_elsewhere(error)
        finally:
            self._beginning = False

    def leave(self) -> None:
        """Gives the subscription up; the generation goes on."""
        self.stream.rescue = None
        if self._search is not None:
            self._search.cancel()
        if self.model is not None:
            self.model.engine.leave(self.stream)

    def cancel(self) -> None:
        """Has the engine end the generation as cancelled; the stream brings the end."""
        if self.model is not None:
            cause = engine_pb2.ABORT_CAUSE_CANCELLED
            self.model.engine.abort(self._attach.request_id, self._attach.tenant, cause)

    # -- inside

    async def _first_attached(self) -> engine_pb2.Attached:
        """Asks all engines that may have it."""
        for model in self._models.holders(self._attach.request_id):
            self.model, self.stream.handle = model, model.engine.new_handle()
            self._num_losses = model.engine.num_losses
            try:
                return await model.engine.attach(self._attach, self.stream)
            except errors.ServiceError as error:
                if error.code is not grpc.StatusCode.NOT_FOUND:
                    raise
        raise self._models.not_held(self._attach.request_id)

    def _was_lost_meanwhile(self) -> bool:
        """Whether the engine that was asked last is lost since, and another one may go on."""
        model = self.model
        return model is not None and model.engine.num_losses != self._num_losses and self._has_others(model)

    def _has_others(self, model: ServedModel) -> bool:
        return any(engine is not model for engine in model.engines)

    async def _attached_elsewhere(self, failure: errors.ServiceError) -> engine_pb2.Attached:
        """Asks again and again, as the guardian has another engine go on."""
        async for _ in _attempts():
            await self._guardian.settled(self._attach.request_id)
            try:
                return await self._first_attached()
            except errors.ServiceError as error:
                _check_elsewhere(error)
        raise failure

    def _rescue(self, failure: errors.ServiceError) -> bool:
        """Searches for the engine that goes on, if there may be one."""
        if self._beginning or self._search is not None:
            # Whoever asks finds out.
            return True
        if self.model is None or not self._has_others(self.model):
            return False
        self._search = asyncio.create_task(self._find_again(failure), name="subscription")
        return True

    async def _find_again(self, failure: errors.ServiceError) -> None:
        try:
            if not await self._is_found(time.monotonic_ns()):
                self.stream.fail(failure)
        except errors.ServiceError as error:
            self.stream.fail(error)
        except Exception as error:
            _log.error("subscription.lost", exception_type=type(error).__name__, places=logs.places(error))
            self.stream.fail(failure)
        finally:
            self._search = None

    async def _is_found(self, lost_ns: int) -> bool:
        # The other engine is read from its first token, and compared.
        self._attach.from_token = 0
        async for _ in _attempts():
            await self._guardian.settled(self._attach.request_id)
            if await self._is_attached(lost_ns):
                return True
        return False

    async def _is_attached(self, lost_ns: int) -> bool:
        """Whether an engine has the generation, and the stream goes on there."""
        try:
            holders = self._models.holders(self._attach.request_id)
        except errors.ServiceError as error:
            _check_elsewhere(error)
            return False
        for model in holders:
            self.model, self.stream.handle = model, model.engine.new_handle()
            reader = CatchingUp(self.stream, model.engine.streams, lost_ns)
            try:
                await model.engine.attach(self._attach, reader)
            except errors.ServiceError as error:
                _check_elsewhere(error)
            else:
                # Not where it was lost right after its answer.
                return self.stream.done is not None or reader.handle in model.engine.streams
        return False


async def _attempts() -> AsyncIterator[None]:
    """Comes once for each attempt, with pauses that grow, until patience ends."""
    pause_s, ends_s = _FIRST_PAUSE_S, time.monotonic() + _PATIENCE_S
    while time.monotonic() < ends_s:
        yield
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _check_elsewhere(error: errors.ServiceError) -> None:
    """Raises what is no reason to look elsewhere, or again."""
    if error.code not in _ELSEWHERE:
        raise error
