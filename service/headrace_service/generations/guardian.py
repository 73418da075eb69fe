"""The guardian of what was submitted to this process: it outlives the engine that computes it.

Owns the copies of submitted generations and their bound in memory, and the way of each to another
engine when its own is lost: running ones go on there from what was emitted, and logs of ended ones
are kept there, under the same ids and idempotency keys. Engines are asked in the order of the
request's place, in which readers of any service look for it. A lost engine that comes back is one
of them, so that a single engine's restart loses nothing either. What no engine takes for
`_PATIENCE_S` is given up, as is one that loses a third engine: what kills engines must not kill all
of them.

A generation has a second guardian in another service, where there is one, because its service and
its engine may be lost at once. That one leaves the generation to the first for a while, then looks
for it at all engines, and has one go on with it only where none knows it.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Coroutine
from typing import Any

import grpc
import structlog

from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors, logs
from headrace_service.engines import request_ids, takeover_order
from headrace_service.engines.served_model import ServedModel
from headrace_service.generations.guarded_generation import GuardedGeneration, Tally

_MAX_LOSSES = 2
_PATIENCE_S = 600.0
# What the first guardian takes for it, and far more.
_SECOND_WAITS_S = 2.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
# A refusal with one of these may be another answer later, or at another engine.
_PASSING = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})

_log = structlog.get_logger("headrace.service")


class Guardian:
    """The copies that this process keeps.

    Args:
        max_bytes: memory that copies may take; 0: none is kept.
        max_message_bytes: largest message to an engine.
    """

    def __init__(self, max_bytes: int, max_message_bytes: int) -> None:
        self._max_bytes = max_bytes
        # Prompt and tokens, which take less, cross in the same message.
        self._tally = Tally(max_message_bytes // 2)
        self._by_id: dict[str, GuardedGeneration] = {}
        self._by_key: dict[tuple[str, str], GuardedGeneration] = {}
        # Those that have ended, the oldest end first.
        self._ended: dict[str, GuardedGeneration] = {}
        # Whether it was said that there is no room.
        self._said_full = False
        self._tasks: set[asyncio.Task[bool]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_bytes(self) -> int:
        """About what the copies take."""
        return self._tally.num_bytes

    # -- what is guarded

    def take(self, add: engine_pb2.AddRequest, model: ServedModel, arrival_ns: int) -> GuardedGeneration | None:
        """Returns the copy of a request that is about to be sent, and has the request bring it.

        Copies of ended generations make room, the oldest first. None: there is no room all the
        same.
        """
        if not self._max_bytes:
            return None
        self._expire()
        copy = GuardedGeneration(add, model, arrival_ns, self._tally, self._heard)
        if not self._has_room_for(copy):
            return None
        add.handle = copy.handle
        self._hear_of_losses(model)
        self._tally.num_bytes += copy.num_bytes
        self._keep(copy)
        return copy

    def offered(self, model: ServedModel, unguarded: engine_pb2.Unguarded) -> None:
        """Guards what an engine has and lacks a guardian, as far as there is room."""
        if not self._closed:
            self._start(self._adopt_all(model, list(unguarded.requests)))

    def accepted(self, copy: GuardedGeneration) -> None:
        """Notes that the engine has taken it: from now on its loss is the guardian's to mend."""
        copy.accepted = True
        self._note_key(copy)
        if copy.done is None and copy.model.engine.streams.get(copy.handle) is not copy:
            # Lost right after its answer.
            self._move(copy)

    def forget(self, copy: GuardedGeneration | None) -> None:
        """Guards a generation no more; what its engine has stays."""
        if copy is None:
            return
        if copy.model.engine.streams.get(copy.handle) is copy:
            copy.model.engine.leave(copy)
        if self._by_id.pop(copy.request_id, None) is None:
            return
        copy.model.engines.holds.unguarded(copy.model.number)
        self._ended.pop(copy.request_id, None)
        self._tally.num_bytes -= copy.num_bytes
        self._said_full = False
        key = (copy.add.tenant, copy.add.idempotency_key)
        if self._by_key.get(key) is copy:
            del self._by_key[key]

    async def settled(self, request_id: str) -> None:
        """Returns once a generation that is on its way to another engine is there, or given up."""
        copy = self._by_id.get(request_id)
        if copy is not None and copy.moving is not None:
            await asyncio.wait({copy.moving})

    async def find_key(self, query: engine_pb2.KeyQuery) -> engine_pb2.Added | None:
        """Returns the request of a key that has left the engine to which the key belongs.

        None: there is none here, and that engine knows better.

        Raises:
            ServiceError: ALREADY_EXISTS, the key was used with another spec.
        """
        copy = self._by_key.get((query.tenant, query.idempotency_key))
        if copy is None or not copy.accepted:
            return None
        if not (copy.num_losses or copy.moving) and copy.model.is_reachable:
            return None
        if copy.add.spec_digest != query.spec_digest:
            text = "idempotency_key: in use for a request with another spec"
            raise errors.ServiceError(grpc.StatusCode.ALREADY_EXISTS, text)
        await self.settled(copy.request_id)
        if copy.request_id not in self._by_id:
            return None
        return engine_pb2.Added(request_id=copy.request_id, existing=True, prompt_tokens=copy.num_prompt_tokens)

    async def rescue(self, copy: GuardedGeneration) -> bool:
        """Has another engine take a request whose engine was lost before it answered."""
        copy.accepted = True
        self._move(copy)
        await self.settled(copy.request_id)
        return copy.request_id in self._by_id

    def close(self) -> None:
        """Goes on with nothing any more: this process ends, and its connections with it."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    async def _adopt_all(self, model: ServedModel, requests: list[engine_pb2.OwnedRequest]) -> bool:
        """Adopts one after the other, because each brings its prompt and its log."""
        for owned in requests:
            copy = self._by_id.get(owned.request_id)
            if copy is None:
                await self._adopt(model, owned)
            elif copy.model is model:
                # The other guardian is gone.
                copy.is_second = False
        return True

    async def _adopt(self, model: ServedModel, owned: engine_pb2.OwnedRequest) -> None:
        add = engine_pb2.AddRequest(request_id=owned.request_id, tenant=owned.tenant)
        copy = GuardedGeneration(add, model, time.monotonic_ns(), self._tally, self._heard)
        if not self._has_room_for(copy):
            return
        self._keep(copy)
        self._tally.num_bytes += copy.num_bytes
        self._hear_of_losses(model)
        try:
            await self._follow(copy, model)
        except errors.ServiceError as error:
            _log.info("generation.not_adopted", request_id=copy.request_id, code=error.code.name)
            self.forget(copy)
            return
        if not copy.add.request or not self._has_room_for(copy, taken=True):
            # It ended meanwhile, or is too large.
            self.forget(copy)
            return
        self.accepted(copy)

    def _keep(self, copy: GuardedGeneration) -> None:
        self._by_id[copy.request_id] = copy
        copy.model.engines.holds.guarded(copy.model.number)

    def _note_key(self, copy: GuardedGeneration) -> None:
        if copy.add.idempotency_key and self._by_id.get(copy.request_id) is copy:
            self._by_key[copy.add.tenant, copy.add.idempotency_key] = copy

    def _has_room_for(self, copy: GuardedGeneration, taken: bool = False) -> bool:
        """Whether a copy fits, once others made room; `taken`: it is counted already."""
        further = 0 if taken else copy.num_bytes
        while self._ended and self._tally.num_bytes + further > self._max_bytes:
            self.forget(next(iter(self._ended.values())))
        has_room = self._tally.num_bytes + further <= self._max_bytes
        if not has_room and not self._said_full:
            self._said_full = True
            _log.warning("guardian.full", guarded=len(self), bytes=self.num_bytes)
        return has_room

    def _expire(self) -> None:
        """Forgets what engines have forgotten too."""
        now_ns = time.monotonic_ns()
        for copy in list(self._ended.values()):
            if copy.ended_ns + copy.model.engine.log_ttl_ns > now_ns:
                return
            self.forget(copy)

    # -- what is heard of them

    def _heard(self, copy: GuardedGeneration) -> None:
        if copy.request_id not in self._by_id:
            return
        if copy.done is None and copy.accepted:
            self._move(copy)
        elif copy.done is not None:
            self._ended[copy.request_id] = copy

    def _hear_of_losses(self, model: ServedModel) -> None:
        model.engine.on_lost = functools.partial(self._engine_lost, model)

    def _engine_lost(self, model: ServedModel) -> None:
        """Has other engines keep the logs of what had ended at one that is lost."""
        self._expire()
        lost = [copy for copy in reversed(self._ended.values()) if copy.model is model]
        for copy in lost:
            copy.lost_s = time.monotonic()
        # Those whose first guardian has a head start come last, and wait for it together.
        lost.sort(key=lambda copy: copy.is_second)
        if lost and not self._closed:
            self._start(self._move_logs(lost))

    # -- their ways

    def _move(self, copy: GuardedGeneration) -> None:
        if copy.moving is None and not self._closed:
            copy.moving = self._start(self._moved(copy))

    def _start(self, way: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
        task = asyncio.create_task(way, name="guardian")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _move_logs(self, copies: list[GuardedGeneration]) -> bool:
        """Moves logs one after the other: they are many, and nobody waits for most of them."""
        for copy in copies:
            self._expire()
            if copy.request_id in self._by_id:
                self._move(copy)
                await self.settled(copy.request_id)
        return True

    async def _moved(self, copy: GuardedGeneration) -> bool:
        """Returns whether an engine has it; otherwise it is guarded no more."""
        has_engine = False
        try:
            has_engine = await self._find_engine(copy)
        except errors.ServiceError as error:
            if error.code is grpc.StatusCode.ALREADY_EXISTS:
                _log.info("generation.guarded_elsewhere", request_id=copy.request_id)
            else:
                _log.warning("generation.lost", request_id=copy.request_id, code=error.code.name, why=error.message)
        except Exception as error:
            kind = type(error).__name__
            _log.error("generation.lost", request_id=copy.request_id, exception_type=kind, places=logs.places(error))
        finally:
            copy.moving = None
            if not has_engine:
                self.forget(copy)
        return has_engine

    async def _find_engine(self, copy: GuardedGeneration) -> bool:
        """Returns True once an engine has it.

        Raises:
            ServiceError: what an engine refused it with for good; UNAVAILABLE, none took it.
        """
        pause_s, patience_s = _FIRST_PAUSE_S, _PATIENCE_S
        if copy.done is not None:
            patience_s = min(patience_s, 1e-9 * copy.model.engine.log_ttl_ns)
        ends_s = time.monotonic() + patience_s
        if copy.is_second:
            await asyncio.sleep(max(0.0, copy.lost_s + _SECOND_WAITS_S - time.monotonic()))
        while time.monotonic() < ends_s:
            if copy.is_second and await self._is_found(copy):
                return True
            for model in _able(copy):
                if await self._is_taken(copy, model):
                    return True
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise errors.unavailable(f"no engine took it within {patience_s:g} s")

    async def _is_found(self, copy: GuardedGeneration) -> bool:
        """Whether an engine has it by its first guardian's doing, and it is followed there.

        Raises ServiceError: ALREADY_EXISTS, two others guard it.
        """
        for model in _able(copy) if copy.done is None else ():
            try:
                await self._follow(copy, model)
            except errors.ServiceError as error:
                if error.code not in (grpc.StatusCode.NOT_FOUND, *_PASSING):
                    raise
            else:
                copy.num_losses += model is not copy.model or model.engine.life != copy.life
                self._note_engine(copy, model)
                return True
        return False

    def _note_engine(self, copy: GuardedGeneration, model: ServedModel) -> None:
        if self._by_id.get(copy.request_id) is copy:
            model.engines.holds.guarded(model.number)
            copy.model.engines.holds.unguarded(copy.model.number)
        copy.model, copy.life = model, model.engine.life
        self._hear_of_losses(model)

    async def _is_taken(self, copy: GuardedGeneration, model: ServedModel) -> bool:
        try:
            if not await self._still_has(copy, model):
                await self._hand_over(copy, model)
        except errors.ServiceError as error:
            if error.code not in _PASSING:
                raise
            _log.info("generation.refused", engine=model.address, code=error.code.name, why=error.message)
            return False
        return True

    async def _still_has(self, copy: GuardedGeneration, model: ServedModel) -> bool:
        """Whether only the connection to an engine was lost, and it is followed there again."""
        if model is not copy.model or model.engine.life != copy.life:
            return False
        try:
            await self._follow(copy, model)
        except errors.ServiceError as error:
            # The request was lost on its way.
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise
            return False
        return True

    async def _follow(self, copy: GuardedGeneration, model: ServedModel) -> None:
        """Reads on at an engine that has it.

        Raises ServiceError: NOT_FOUND; ALREADY_EXISTS, it has another guardian; UNAVAILABLE.
        """
        if copy.done is None:
            copy.handle = model.engine.new_handle()
            attach = engine_pb2.AttachRequest(request_id=copy.request_id, tenant=copy.add.tenant, guards=True)
            await model.engine.attach(attach, copy)
            _check_followed(copy, model)

    async def _hand_over(self, copy: GuardedGeneration, model: ServedModel) -> None:
        """Asks an engine to go on. Raises ServiceError: what it refused with, or UNAVAILABLE."""
        if copy.done is None and copy.num_losses == _MAX_LOSSES:
            raise errors.failed_precondition(f"{_MAX_LOSSES + 1} engines were lost with it")
        copy.handle = model.engine.new_handle()
        is_running = copy.done is None
        try:
            added = await model.engine.add(copy.continuation(), copy if is_running else None)
        except errors.ServiceError as error:
            if error.code is not grpc.StatusCode.ALREADY_EXISTS:
                raise
            # It came to this engine before, and goes on there.
            await self._follow(copy, model)
        else:
            if added.request_id != copy.request_id:
                raise errors.failed_precondition(f"its idempotency key is in use for {added.request_id}")
            if added.existing:
                model.engine.leave(copy)
                await self._follow(copy, model)
            else:
                copy.is_second = False
        _check_followed(copy, model)
        copy.num_losses += is_running
        self._note_engine(copy, model)
        _log.info("generation.continued", engine=model.address, tokens=copy.num_tokens)


def _able(copy: GuardedGeneration) -> list[ServedModel]:
    """Returns the engines that may go on with it, in the order of its place."""
    able = [engine for engine in copy.model.engines if engine.takes_over]
    fitting = [engine for engine in able if engine.text.engine.revision == copy.revision]
    return takeover_order.in_order(fitting, request_ids.place_of(copy.request_id))


def _check_followed(copy: GuardedGeneration, model: ServedModel) -> None:
    """Raises ServiceError: UNAVAILABLE; the engine was lost right after its answer."""
    if copy.done is None and model.engine.streams.get(copy.handle) is not copy:
        raise errors.unavailable("the connection to the engine was lost")
