"""Guardians at a real backend's socket: who is offered what, and what the next engine needs."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Iterator

import grpc
import pytest
from tests.backend.backend_harness import BackendProcess, Subscription, connected, idle, settled, start_backend, until
from tests.backend.fake_worker import expected_tokens
from tests.support.engine_requests import asked, ids

from headrace_backend.engine.errors import Violation
from headrace_backend.engine.events import EndReason, OutputEnd
from headrace_backend.server.streams.outgoing import write_end
from headrace_protos.engine.v1 import engine_pb2

PROMPT = [10, 20, 30]
KEY = {"idempotency_key": "key", "spec_digest": bytes(32), "tenant": "t"}
NOT_FOUND, ALREADY_EXISTS = grpc.StatusCode.NOT_FOUND.value[0], grpc.StatusCode.ALREADY_EXISTS.value[0]
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]


@pytest.fixture(scope="module")
def backend(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackendProcess]:
    started = start_backend(tmp_path_factory.mktemp("backend"), model, "--step-ms", "2", "--blocks", "64")
    started.wait_listening()
    yield started
    started.process.terminate()
    assert started.process.wait(240) == 0, started.log
    assert "Traceback" not in started.log, started.log


async def test_what_a_lost_service_guarded_is_offered_to_one_that_guards(backend: BackendProcess) -> None:
    async with connected(backend.address) as reader, connected(backend.address, guards=True) as next_guardian:
        async with connected(backend.address, guards=True) as guardian:
            await guardian.wait_serving()
            limits = engine_pb2.TenantLimits(concurrent_streams=1, kv_cache_share=1.0)
            request = await guardian.add(PROMPT, 900, detached=True, service_state=b"state", limits=limits, **KEY)
            await until(lambda: request.outputs)
            # One reader has the request's own stream beside the guardian.
            first = await reader.attach(request.request_id, tenant="t", limits=limits)
            await until(lambda: first.attached)
            # Nobody has taken the second copy when the first is lost.
            await until(lambda: next_guardian.unguarded)
            assert not guardian.unguarded
        await until(lambda: len(next_guardian.unguarded) == 2)
        [owned] = {each.request_id: each for each in next_guardian.unguarded}.values()
        assert (owned.request_id, owned.tenant) == (request.request_id, "t")
        copy = await next_guardian.attach(owned.request_id, tenant=owned.tenant, guards=True)
        await until(lambda: copy.attached)
        assert copy.attached is not None
        handed = copy.attached.request
        assert (handed.request_id, handed.tenant, handed.idempotency_key) == (request.request_id, "t", "key")
        assert (handed.service_state, handed.detached, handed.limits) == (b"state", True, limits)
        assert asked(handed).prompt_token_ids == ids(*PROMPT) and asked(handed).stop.max_tokens == 900
        assert handed.service_ns > 0 and handed.remaining_ns > 0 and not handed.emitted
        assert not copy.attached.second_guardian
        again = await next_guardian.attach(owned.request_id, tenant="t", guards=True)
        assert (await settled(again)).refused.code == ALREADY_EXISTS
        await settled(copy)
        await settled(first)
        assert copy.outputs[0] == first.outputs[0] == expected_tokens(PROMPT, 900)
        assert not reader.unguarded
        await idle(reader)


async def test_a_key_is_asked_for_without_a_request(backend: BackendProcess) -> None:
    async with connected(backend.address) as service:
        await service.wait_serving()

        async def find(**fields: object) -> object:
            return await service.ask("find_key", engine_pb2.KeyQuery(**{**KEY, "idempotency_key": "k2", **fields}))

        unknown = await find()
        assert isinstance(unknown, engine_pb2.Refused) and unknown.status.code == NOT_FOUND
        request = await settled(await service.add(PROMPT, 5, detached=True, **{**KEY, "idempotency_key": "k2"}))
        found = await find()
        assert isinstance(found, engine_pb2.Added)
        assert (found.request_id, found.existing, found.prompt_tokens) == (request.request_id, True, len(PROMPT))
        other = await find(tenant="another")
        assert isinstance(other, engine_pb2.Refused) and other.status.code == NOT_FOUND
        changed = await find(spec_digest=b"\x01" * 32)
        assert isinstance(changed, engine_pb2.Refused) and changed.status.code == ALREADY_EXISTS
        for fields, field in (
            ({"idempotency_key": ""}, "idempotency_key"),
            ({"spec_digest": b"short"}, "spec_digest"),
            ({"tenant": "t" * 5000}, "tenant"),
        ):
            refused = await find(**fields)
            assert isinstance(refused, engine_pb2.Refused) and field in refused.status.message


async def test_a_key_of_another_engine_is_taken_once_no_service_holds_that(backend: BackendProcess) -> None:
    async with connected(backend.address) as asker, connected(backend.address) as other:
        await asker.wait_serving()
        await other.send(held_engines=engine_pb2.HeldEngines(reached=[7]))
        await idle(other)

        async def add(key: str, **fields: object) -> Subscription:
            named = {**KEY, "idempotency_key": key}
            asked = await asker.add(PROMPT, 5, detached=True, unasked_engines=[7], **named, **fields)
            await until(lambda: asked.added or asked.refused)
            return asked

        for fields in ({}, {"stands_in": True}):
            refused = (await add("k3", **fields)).refused
            assert refused is not None and refused.code == UNAVAILABLE and "idempotency_key" in refused.message
        await other.send(held_engines=engine_pb2.HeldEngines(guarded=[7]))
        await idle(other)
        assert (await add("k4", stands_in=True)).refused and (await add("k5")).added
        await other.send(held_engines=engine_pb2.HeldEngines())
        while (asked := await add("k4", stands_in=True)).refused:
            await asyncio.sleep(0.2)
        await other.send(held_engines=engine_pb2.HeldEngines(reached=[7]))
        await idle(other)
        # What is known is no new request.
        again = await add("k4", stands_in=True)
        assert again.added and again.added.existing and again.added.request_id == asked.request_id
        await idle(asker)


@pytest.mark.parametrize(
    "end",
    [
        OutputEnd(0, EndReason.LENGTH),
        OutputEnd(0, EndReason.ERROR, error="it broke"),
        OutputEnd(0, EndReason.ERROR, broken=Violation("spec.stop.bad_words", "ban all")),
        OutputEnd(0, EndReason.ERROR, unfit="spec.stop.max_tokens: too many"),
    ],
    ids=lambda end: end.error or (end.unfit and "unfit") or end.reason.name,
)
async def test_a_log_that_is_handed_over_is_read_like_any_other(backend: BackendProcess, end: OutputEnd) -> None:
    async with connected(backend.address) as service:
        await service.wait_serving()
        emitted = [engine_pb2.EmittedTokens(token_ids=ids(5, 6, 7), end=write_end(end))]
        earlier = engine_pb2.RequestDone(prompt_tokens=3, output_tokens=3, decode_ns=12, ended_ago_ns=7_000_000)
        added = await service.add(PROMPT, 3, detached=True, emitted=emitted, earlier=earlier)
        await until(lambda: added.added)
        log = await settled(await service.attach(added.request_id))
        assert log.outputs[0] == [5, 6, 7] and log.ends[0] == write_end(end)
        assert log.done is not None and log.done.decode_ns == 12 and log.done.ended_ago_ns >= 7_000_000
        # Another guardian of the same request may bring it once more.
        again = await service.add(PROMPT, 3, detached=True, emitted=emitted, earlier=earlier)
        await until(lambda: again.added)
        await idle(service)
