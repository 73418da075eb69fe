"""What was submitted outlives its engine: other engines go on with it, and any service finds it.

The services and their connections are real; the engines are fakes that a test can hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import structlog
from google.rpc import status_pb2
from tests.service.fake_engine import FakeEngine, asked, prompt_parts
from tests.service.harness import events_of, ids_of, kinds_of
from tests.service.many_engines import Joined, fake, joined, replace, running

from headrace.v1 import generation_pb2, inference_pb2

ANSWER = list(range(10, 30))


@dataclasses.dataclass
class Group:
    """Three engines, and two services that know all of them."""

    engines: list[FakeEngine]
    one: Joined
    other: Joined

    def at(self, request_id: str) -> FakeEngine:
        """The engine, of those that are there, that has a request."""
        [found] = [engine for engine in self.engines if request_id in engine.requests]
        return found

    def hold(self) -> None:
        """From now on tokens come by `step` alone."""
        for engine in self.engines:
            engine.running.clear()

    def step(self, number: int) -> None:
        for engine in self.engines:
            for _ in range(number):
                engine.step()

    async def heard(self, request_id: str, number: int) -> None:
        """Waits until the guardian of the first service has so many tokens."""
        await self.one.until(lambda: copy_of(self.one, request_id).num_tokens == number)

    async def lose(self, engine: FakeEngine) -> None:
        self.engines.remove(engine)
        await engine.stop()


@contextlib.asynccontextmanager
async def group(folder: pathlib.Path, sockets: pathlib.Path, **config: Any) -> AsyncIterator[Group]:
    engines = [fake(folder) for _ in range(3)]
    for index, engine in enumerate(engines):
        engine.script = lambda add, index: ANSWER
        engine.life = f"life {index}"
    async with (
        running(*engines, sockets=sockets) as addresses,
        joined(addresses, service_name="one", **config) as one,
        joined(addresses, service_name="other", **config) as other,
    ):
        await one.until_used(3)
        await other.until_used(3)
        yield Group(list(engines), one, other)


def reading(service: Joined, request_id: str, from_token: int = 0) -> Any:
    return service.stub.Subscribe(inference_pb2.SubscribeRequest(request_id=request_id, from_token=from_token))


async def until_tokens(call: Any, number: int) -> list[generation_pb2.GenerationEvent]:
    """Reads until so many tokens came."""
    events: list[generation_pb2.GenerationEvent] = []
    while len(ids_of(events)) < number:
        events.append((await call.read()).event)
    return events


async def test_readers_at_any_service_go_on_at_the_next_token(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with group(model_path, sockets) as three:
        three.hold()
        request_id = await three.one.submit(7)
        first = three.at(request_id)
        three.step(3)
        calls = [reading(three.one, request_id), reading(three.other, request_id), reading(three.other, request_id, 3)]
        await three.one.until(lambda: len(first.requests[request_id].readers) == 4)
        three.step(2)
        begun = [await until_tokens(call, number) for call, number in zip(calls, (5, 5, 2), strict=True)]
        await three.heard(request_id, 5)
        await three.lose(first)
        await three.one.until(lambda: any(request_id in engine.requests for engine in three.engines))
        # It goes on under the same id, from what came, and readers follow it.
        second = three.at(request_id)
        await three.one.until(lambda: len(second.requests[request_id].readers) == 4)
        assert [len(part.token_ids) // 4 for part in second.requests[request_id].add.emitted] == [5]
        assert second.requests[request_id].add.earlier.ttft_ns > 0
        # The lost engine had charged it: quotas neither refuse it nor charge it again.
        assert not first.requests[request_id].add.admitted and second.requests[request_id].add.admitted
        late = reading(three.other, request_id)
        three.step(20)
        for call, events, skipped in zip((*calls, late), (*begun, []), (0, 0, 3, 0), strict=True):
            rest = await events_of(call)
            assert ids_of([*events, *rest]) == ANSWER[skipped:]
            assert ("resumed" in kinds_of(rest)) == bool(events)
            assert kinds_of(rest)[-1] == "done"


async def test_a_reader_whose_engine_is_lost_while_it_is_asked_reads_at_the_next_one(
    model_path: pathlib.Path, sockets: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with group(model_path, sockets) as three:
        three.hold()
        request_id = await three.one.submit(7)
        first, unanswered = three.at(request_id), []
        three.step(3)
        await three.heard(request_id, 3)
        monkeypatch.setattr(first, "_on_attach", lambda connection, attach: unanswered.append(attach))
        calls = [asyncio.create_task(events_of(reading(service, request_id))) for service in (three.one, three.other)]
        await three.one.until(lambda: len(unanswered) == 2)
        await three.lose(first)
        await three.one.until(lambda: any(request_id in engine.requests for engine in three.engines))
        await three.one.until(lambda: len(three.at(request_id).requests[request_id].readers) == 3)
        three.step(20)
        for call in calls:
            assert ids_of(await call) == ANSWER


@pytest.mark.parametrize(("num_tokens", "ended"), [(0, False), (5, False), (len(ANSWER), True)])
async def test_log_probabilities_move_with_what_they_belong_to(
    model_path: pathlib.Path, sockets: pathlib.Path, num_tokens: int, ended: bool
) -> None:
    async with group(model_path, sockets) as three:
        three.hold()
        for engine in three.engines:
            engine.logprobs = 2
        spec = generation_pb2.GenerationSpec(
            token_ids=generation_pb2.TokenIds(ids=[7, 8, 9, 10, 11]), logprobs=2, prompt_logprobs=1
        )
        request_id = (await three.one.stub.Submit(inference_pb2.SubmitRequest(spec=spec))).request_id
        first = three.at(request_id)
        three.step(num_tokens)
        await three.heard(request_id, num_tokens)
        await three.one.until(lambda: (copy_of(three.one, request_id).done is not None) == ended)
        assert guardian_of(three.one).num_bytes == copy_of(three.one, request_id).num_bytes
        await three.lose(first)
        await three.one.until(lambda: any(request_id in engine.requests for engine in three.engines))
        moved = three.at(request_id).requests[request_id].add
        if not num_tokens:
            # Nothing came yet, so the other engine begins anew.
            assert not moved.emitted and not moved.prompt_logprobs and asked(moved).num_prompt_logprobs == 1
            return
        assert moved.emitted[0].logprobs == first._logprobs_of(ANSWER[:num_tokens])
        assert list(moved.prompt_logprobs) == prompt_parts(moved) and asked(moved).num_prompt_logprobs == 1


async def test_log_probabilities_that_fit_no_message_stay_behind(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with group(model_path, sockets) as three:
        guardian_of(three.one)._tally.most_logprob_bytes = 100
        three.hold()
        spec = generation_pb2.GenerationSpec(
            token_ids=generation_pb2.TokenIds(ids=[7, 8, 9]), logprobs=0, prompt_logprobs=0
        )
        request_id = (await three.one.stub.Submit(inference_pb2.SubmitRequest(spec=spec))).request_id
        three.step(10)
        await three.heard(request_id, 10)
        await three.lose(three.at(request_id))
        await three.one.until(lambda: any(request_id in engine.requests for engine in three.engines))
        moved = three.at(request_id).requests[request_id].add
        assert len(moved.emitted[0].token_ids) == 40 and not moved.emitted[0].HasField("logprobs")
        assert not moved.prompt_logprobs and asked(moved).num_prompt_logprobs == -1


async def test_what_ended_is_read_again_after_its_engine_was_lost(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with group(model_path, sockets) as three:
        submitted = [await three.one.submit(first) for first in range(3, 15)]
        for request_id in submitted:
            assert await three.one.read(request_id) == ANSWER
        first = three.at(submitted[0])
        theirs = [request_id for request_id in submitted if request_id in first.requests]
        before = [await events_of(reading(three.one, request_id)) for request_id in theirs]
        await three.lose(first)
        await three.one.until(lambda: all(any(name in e.requests for e in three.engines) for name in theirs))
        for request_id, events in zip(theirs, before, strict=True):
            again = await events_of(reading(three.other, request_id))
            assert (ids_of(again), kinds_of(again)) == (ids_of(events), kinds_of(events))
            kept = three.at(request_id).requests[request_id]
            # Nothing is computed for it, and its account is what it was.
            assert kept.add.handle == 0 and kept.add.earlier.step_count == len(ANSWER)


async def test_a_key_that_moved_is_never_computed_again(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    def submit(service: Joined, key: str, first: int = 7) -> Any:
        spec = generation_pb2.GenerationSpec(token_ids=generation_pb2.TokenIds(ids=[first] * 64))
        return service.stub.Submit(inference_pb2.SubmitRequest(spec=spec, idempotency_key=key))

    async with group(model_path, sockets) as three:
        three.hold()
        made = {key: (await submit(three.one, key)).request_id for key in (f"key {index}" for index in range(9))}
        three.step(4)
        first = three.at(made["key 0"])
        theirs = [key for key, request_id in made.items() if request_id in first.requests]
        await three.lose(first)
        await three.one.until(lambda: all(any(made[key] in e.requests for e in three.engines) for key in theirs))
        for service in (three.one, three.other):
            for key, request_id in made.items():
                again = await submit(service, key)
                assert (again.existing, again.request_id) == (True, request_id)
        # The lost engine comes back and knows nothing: its keys are not new for that.
        back = await replace(first, fake(model_path))
        back.script, back.life = first.script, "another life"
        three.engines.append(back)
        await three.other.until_used(3)
        for key in theirs:
            assert (await submit(three.other, key)).request_id == made[key]
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await submit(three.other, key, first=8)
            assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert not back.requests
        assert sum(len(engine.requests) for engine in three.engines) == len(made)
        await back.stop()


async def test_a_moved_request_is_cancelled_by_its_id(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with group(model_path, sockets) as three:
        three.hold()
        request_id = await three.one.submit(7)
        three.step(2)
        await three.heard(request_id, 2)
        await three.lose(three.at(request_id))
        await three.other.until(lambda: any(request_id in engine.requests for engine in three.engines))
        answer = await three.other.stub.Cancel(inference_pb2.CancelRequest(request_id=request_id))
        assert answer.cancelled
        events = await events_of(reading(three.one, request_id))
        assert events[-2].output_finished.reason == generation_pb2.FINISH_REASON_CANCELLED
        assert ids_of(events) == ANSWER[:2]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await three.other.stub.Cancel(inference_pb2.CancelRequest(request_id="0" * 22 + request_id[22:]))
        assert error.value.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE)


async def test_two_engines_may_be_lost_one_after_the_other(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with group(model_path, sockets) as three:
        three.hold()
        request_id = await three.one.submit(7)
        call = reading(three.other, request_id)
        events: list[generation_pb2.GenerationEvent] = []
        for number in (3, 4):
            await three.one.until(
                lambda: any(len(e.requests[request_id].readers) == 2 for e in three.engines if request_id in e.requests)
            )
            three.step(number)
            events += await until_tokens(call, number)
            await three.heard(request_id, len(ids_of(events)))
            await three.lose(three.at(request_id))
        await three.one.until(lambda: request_id in three.engines[0].requests)
        three.step(20)
        events += await events_of(call)
        assert ids_of(events) == ANSWER
        assert sum(event.HasField("resumed") for event in events) == 2


async def test_a_request_goes_on_while_its_service_is_gone(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with group(model_path, sockets) as three:
        three.hold()
        request_id = await three.one.submit(7)
        call = reading(three.other, request_id)
        engine = three.at(request_id)
        await three.one.until(lambda: len(engine.requests[request_id].readers) == 2)
        await three.one.service.stop(0)
        three.step(20)
        assert ids_of(await events_of(call)) == ANSWER
        assert not engine.aborts


async def test_another_service_guards_what_a_lost_service_guarded(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with group(model_path, sockets) as three:
        three.hold()
        submitted = [await three.one.submit(first) for first in range(3, 15)]
        three.step(4)
        calls = [reading(three.other, request_id, 2) for request_id in submitted]
        begun = [await until_tokens(call, 2) for call in calls]
        await three.one.service.stop(0)
        await three.other.until(lambda: len(guardian_of(three.other)) == len(submitted))
        await three.other.until(lambda: all(copy_of(three.other, each).num_tokens == 4 for each in submitted))
        lost = three.at(submitted[0])
        theirs = [request_id for request_id in submitted if request_id in lost.requests]
        await three.lose(lost)
        await three.other.until(lambda: all(any(name in e.requests for e in three.engines) for name in theirs))
        moved = three.at(submitted[0]).requests[submitted[0]].add
        assert [len(part.token_ids) // 4 for part in moved.emitted] == [4]
        assert moved.request == lost.requests[submitted[0]].add.request
        for call, events in zip(calls, begun, strict=True):
            while call.done() is False and not all(r.done for e in three.engines for r in e.requests.values()):
                three.step(1)
                await asyncio.sleep(0.01)
            assert ids_of([*events, *await events_of(call)]) == ANSWER[2:]


def guardian_of(service: Joined) -> Any:
    return service.service.core.generations._guardian


@contextlib.asynccontextmanager
async def doubly_guarded(folder: pathlib.Path, sockets: pathlib.Path) -> AsyncIterator[tuple[Group, str]]:
    """Engines that want two guardians, and a request of which both services have four tokens."""
    async with group(folder, sockets) as three:
        for engine in three.engines:
            engine.wants_seconds = True
        three.hold()
        request_id = await three.one.submit(7)
        await three.other.until(lambda: len(three.at(request_id).requests[request_id].readers) == 2)
        three.step(4)
        for service in (three.one, three.other):
            await service.until(lambda service=service: copy_of(service, request_id).num_tokens == 4)
        assert [copy_of(each, request_id).is_second for each in (three.one, three.other)] == [False, True]
        yield three, request_id


async def test_an_answer_outlives_its_service_and_its_engine_at_once(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with doubly_guarded(model_path, sockets) as (three, request_id):
        # Nothing of the service acts any more when its engine is lost.
        guardian_of(three.one).close()
        await three.lose(three.at(request_id))
        await three.one.service.stop(0)
        call = reading(three.other, request_id)
        await three.other.until(lambda: any(request_id in engine.requests for engine in three.engines))
        next_engine = three.at(request_id)
        assert [len(part.token_ids) // 4 for part in next_engine.requests[request_id].add.emitted] == [4]
        # The engine has the request a moment before the service hears that it took it.
        await three.other.until(lambda: not copy_of(three.other, request_id).is_second)
        three.step(20)
        assert ids_of(await events_of(call)) == ANSWER


async def test_the_second_guardian_follows_where_the_first_went(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with doubly_guarded(model_path, sockets) as (three, request_id):
        await three.lose(three.at(request_id))
        await three.other.until(lambda: len([e for e in three.engines if request_id in e.requests]) == 1)
        second = three.at(request_id).requests[request_id]
        await three.other.until(lambda: len(second.readers) == 2)
        # It goes on at one engine, and both have what comes.
        assert sum(request_id in engine.requests for engine in three.engines) == 1
        three.step(3)
        for service in (three.one, three.other):
            await service.until(lambda service=service: copy_of(service, request_id).num_tokens == 7)
        assert [copy_of(each, request_id).is_second for each in (three.one, three.other)] == [False, True]


async def test_the_second_guardian_of_a_lost_service_is_the_first(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with doubly_guarded(model_path, sockets) as (three, request_id):
        await three.one.service.stop(0)
        await three.other.until(lambda: not copy_of(three.other, request_id).is_second)


async def test_the_log_of_an_ended_answer_outlives_its_service_and_its_engine_at_once(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with doubly_guarded(model_path, sockets) as (three, request_id):
        three.step(20)
        for service in (three.one, three.other):
            await service.until(lambda service=service: copy_of(service, request_id).done is not None)
        guardian_of(three.one).close()
        await three.lose(three.at(request_id))
        await three.one.service.stop(0)
        await three.other.until(lambda: any(request_id in engine.requests for engine in three.engines))
        assert await three.other.read(request_id) == ANSWER


async def test_second_guardians_wait_once_for_all_logs_of_a_lost_engine(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with group(model_path, sockets) as three:
        for engine in three.engines:
            engine.wants_seconds = True
        three.hold()
        # So many of one engine that one wait for each took longer than this test does.
        submitted = [await three.one.submit(first) for first in range(3, 213)]
        lost = max(three.engines, key=lambda engine: len(engine.requests))
        theirs = [request_id for request_id in submitted if request_id in lost.requests]
        await three.other.until(lambda: all(name in guardian_of(three.other)._by_id for name in theirs))
        three.step(20)
        await three.other.until(lambda: all(copy_of(three.other, name).done is not None for name in theirs))
        guardian_of(three.one).close()
        await three.lose(lost)
        await three.one.service.stop(0)
        await three.other.until(lambda: all(any(name in e.requests for e in three.engines) for name in theirs))


async def test_a_key_that_is_sent_again_is_still_its_guardians(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with group(model_path, sockets) as three:
        spec = generation_pb2.GenerationSpec(token_ids=generation_pb2.TokenIds(ids=[7]))
        sent = [inference_pb2.SubmitRequest(spec=spec, idempotency_key="key")] * 3
        [made] = {(await three.one.stub.Submit(request)).request_id for request in sent}
        [guarded] = guardian_of(three.one)._by_key.values()
        assert guarded is copy_of(three.one, made)


async def test_a_connection_that_breaks_is_no_lost_engine(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    only = fake(model_path)
    only.script, only.life = (lambda add, index: ANSWER), "the life"
    async with running(only, sockets=sockets) as addresses, joined(addresses) as service:
        await service.until_used(1)
        only.running.clear()
        request_id = await service.submit(7)
        only.step()
        for _ in range(3):
            only.disconnect()
            await service.until(lambda: not only.requests[request_id].readers)
            await service.until(lambda: len(only.requests[request_id].readers) == 1)
        only.step()
        assert [len(only.requests), only.attaches[-1].guards] == [1, True]
        # The copy has all that came meanwhile: the engine's next life goes on behind it.
        await service.until(lambda: copy_of(service, request_id).num_tokens == 2)
        back = await replace(only, fake(model_path))
        back.script, back.life = only.script, "the next life"
        back.running.clear()
        await service.until(lambda: request_id in back.requests)
        back.running.set()
        assert await service.read(request_id) == ANSWER
        assert [len(part.token_ids) // 4 for part in back.requests[request_id].add.emitted] == [2]
        await back.stop()


def copy_of(service: Joined, request_id: str) -> Any:
    return service.service.core.generations._guardian._by_id[request_id]


async def test_copies_stay_within_their_memory(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    with structlog.testing.capture_logs() as logged:
        async with group(model_path, sockets, guarded_bytes=10_000) as three:
            guardian = three.one.service.core.generations._guardian
            for first in range(3, 15):
                await three.one.read(await three.one.submit(first))
                assert guardian.num_bytes <= 10_000
            # The oldest went first; without ended ones, what comes has no copy.
            assert 2 <= len(guardian) <= 4
            three.hold()
            running_ones = [await three.one.submit(first) for first in range(3, 9)]
            assert 2 <= len(guardian) <= 4 and guardian.num_bytes <= 10_000
            assert [line["event"] for line in logged].count("guardian.full") == 1
            # What has no copy is lost with its engine.
            lost = running_ones[-1]
            await three.lose(three.at(lost))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await events_of(reading(three.one, lost))
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            three.step(30)
            await three.one.until(lambda: all(copy.done is not None for copy in guardian._by_id.values()))
    assert guardian.num_bytes == sum(copy.num_bytes for copy in guardian._by_id.values())


async def test_what_no_engine_takes_is_given_up_by_name(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    with structlog.testing.capture_logs() as logged:
        async with group(model_path, sockets) as three:
            three.hold()
            request_id = await three.one.submit(7)
            three.step(2)
            await three.heard(request_id, 2)
            for engine in three.engines:
                engine.refusal = engine_status(grpc.StatusCode.INVALID_ARGUMENT)
            await three.lose(three.at(request_id))
            await three.one.until(lambda: any(line["event"] == "generation.lost" for line in logged))
            assert len(three.one.service.core.generations._guardian) == 0
            # Others are not harmed.
            for engine in three.engines:
                engine.refusal = None
            three.engines[0].running.set()
            three.engines[1].running.set()
            assert await three.one.read(await three.one.submit(9)) == ANSWER


def engine_status(code: grpc.StatusCode) -> Any:
    return status_pb2.Status(code=code.value[0], message="no")


async def test_a_full_engine_is_asked_again(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with group(model_path, sockets) as three:
        three.hold()
        request_id = await three.one.submit(7)
        three.step(2)
        for engine in three.engines:
            engine.refusal = engine_status(grpc.StatusCode.RESOURCE_EXHAUSTED)
        call = reading(three.other, request_id)
        await until_tokens(call, 2)
        await three.lose(three.at(request_id))
        await asyncio.sleep(0.3)
        for engine in three.engines:
            engine.refusal = None
        await three.one.until(lambda: any(request_id in engine.requests for engine in three.engines))
        three.step(20)
        assert ids_of(await events_of(call)) == ANSWER[2:]
