"""One generation that ends with its call, on whichever engine computes it.

Owns where it is computed, and its way to another engine when that one is lost: the other engine is
asked to go on from what was emitted, under the same request id, with the same seed and the time
that is left. Tokens go on in the same stream, so that none is lost or doubled: what the lost engine
computed and did not send is computed again. Only an engine of the same model and revision that
serves is asked. How often is bounded, because what kills engines must not kill all of them.
"""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import structlog

from headrace_protos.engine.v1 import engine_pb2
from headrace_request.request import Request
from headrace_service import errors
from headrace_service.calls.call import Call
from headrace_service.engines.routing.router import RoutingKey
from headrace_service.engines.served_model import ServedModel
from headrace_service.generations import continuation
from headrace_service.streams.generation_stream import GenerationStream

# Engines that one generation may lose and still go on, and engines that are asked for each.
_MAX_LOSSES = 2
_MAX_ASKED = 3

_log = structlog.get_logger("headrace.service")


class RunningGeneration:
    """One generation, from the moment at which an engine is asked for it.

    Attributes:
        stream: what its reader gets.
        model: the engine that computes it, or was asked last.
    """

    def __init__(self, stream: GenerationStream, model: ServedModel, add: engine_pb2.AddRequest, call: Call) -> None:
        self.stream = stream
        self.model = model
        self._add = add
        self._call = call
        self._revision = model.text.engine.revision
        self._ends_ns = continuation.ends_ns(add)
        self._num_losses = 0
        # Whether an engine is being asked.
        self._asking = False
        self._moving: asyncio.Task[None] | None = None
        stream.rescue = self._rescue

    async def begin(self) -> None:
        """Asks the engine, and others if it is lost before it answers.

        Raises:
            ServiceError: what an engine refused it with, or UNAVAILABLE.
        """
        self._asking = True
        try:
            await self._ask(self.model, self._add)
        except errors.ServiceError as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE or not await self._move():
                raise
        finally:
            self._asking = False

    def abandon(self) -> None:
        """Gives the generation up because its call ends; one that has ended stays as it is."""
        self.stream.rescue = None
        if self._moving is not None:
            self._moving.cancel()
        self.model.engine.abandon(self.stream, self._call)

    def cancel(self) -> None:
        """Has the engine end the generation as cancelled; the stream brings the end."""
        self.model.engine.abort(self.stream.request_id, self._call.tenant, engine_pb2.ABORT_CAUSE_CANCELLED)

    # -- inside

    def _rescue(self, failure: errors.ServiceError) -> bool:
        """Has another engine go on, if there may be one."""
        if self._asking:
            # Whoever asks finds out.
            return True
        if self._num_losses == _MAX_LOSSES or not self._able({self.model}):
            return False
        self._num_losses += 1
        self._asking = True
        self._moving = asyncio.create_task(self._move_or_fail(failure), name="continuation")
        return True

    async def _move_or_fail(self, failure: errors.ServiceError) -> None:
        try:
            if not await self._move():
                self.stream.fail(failure)
        except Exception as error:
            _log.error("generation.not_continued", exception_type=type(error).__name__)
            self.stream.fail(failure)
        finally:
            self._asking, self._moving = False, None

    async def _move(self) -> bool:
        """Returns whether another engine goes on."""
        asked = {self.model}
        for _ in range(_MAX_ASKED):
            able = self._able(asked)
            if not able:
                return False
            model = self.model.engines.choose_among(able, self._routing_key())
            asked.add(model)
            self.model, self.stream.handle = model, model.engine.new_handle()
            try:
                await self._ask(model, self._continuation())
            except errors.ServiceError as error:
                _log.warning("generation.refused", engine=model.address, code=error.code.name, why=error.message)
            else:
                _log.info("generation.continued", engine=model.address, tokens=self.stream.num_tokens)
                return True
        return False

    async def _ask(self, model: ServedModel, add: engine_pb2.AddRequest) -> None:
        """Asks one engine. Raises ServiceError: UNAVAILABLE; or what it refused with."""
        stream = self.stream
        await model.engine.add(add, stream)
        if stream.done is None and model.engine.streams.get(stream.handle) is not stream:
            raise errors.unavailable("the connection to the engine was lost")

    def _able(self, asked: set[ServedModel]) -> list[ServedModel]:
        """Returns the engines that may go on with it and were not asked yet."""
        return [
            engine
            for engine in self.model.engines
            if engine not in asked and engine.takes_over and engine.text.engine.revision == self._revision
        ]

    def _continuation(self) -> engine_pb2.AddRequest:
        """Returns the request that goes on from what was emitted, to be sent at once."""
        emitted = self.stream.emitted(Request.decode(self._add.request).n)
        add = continuation.make(self._add, emitted, self._call.arrival_ns, self._ends_ns)
        # Whoever answered had charged it to its tenant's quotas.
        add.admitted = self._num_losses > 0
        return add

    def _routing_key(self) -> RoutingKey:
        asked = Request.decode(self._add.request)
        return RoutingKey(np.frombuffer(asked.prompt_token_ids, "<u4"), asked.cache_salt, self._call.tenant)
