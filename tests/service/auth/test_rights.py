"""What a caller who is known may use: models, quotas, and for how long."""

from __future__ import annotations

import asyncio
import datetime
import pathlib
from typing import Any

import grpc
import pytest
from tests.service.auth.credentials_case import bearer, entry, write_keys
from tests.service.harness import Running, events_of, running_service

from headrace.v1 import generation_pb2, inference_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service.auth import api_keys
from headrace_service.auth.api_keys import Limits
from headrace_service.auth.refusals import UNAUTHENTICATED_TEXT

KEY, BOUND = (api_keys.new_key() for _ in range(2))
Spec = generation_pb2.GenerationSpec
LIMITS = Limits(requests_per_minute=60, concurrent_streams=4, tokens_per_minute=10_000, kv_cache_share=0.25)


@pytest.fixture
def keys_file(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_keys(
        tmp_path / "keys.json", entry(KEY, "team", limits=LIMITS), entry(BOUND, "bound", models=("other", "more"))
    )


def calls(running: Running, metadata: Any, model: str) -> dict[str, Any]:
    """A call of every RPC that names a model."""
    stub, spec = running.stub, Spec(text="x", model=model)
    message = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, parts=[inference_pb2.Part(text="hello")])
    chat = inference_pb2.ChatRequest(spec=Spec(model=model), messages=[message])
    session = inference_pb2.SessionRequest(stream_id=1, submit=inference_pb2.SessionSubmit(spec=spec))
    return {
        "Generate": stub.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=metadata).read(),
        "Complete": stub.Complete(inference_pb2.CompleteRequest(spec=spec), metadata=metadata),
        "Chat": stub.Chat(chat, metadata=metadata).read(),
        "Submit": stub.Submit(inference_pb2.SubmitRequest(spec=spec), metadata=metadata),
        "Tokenize": stub.Tokenize(inference_pb2.TokenizeRequest(text="x", model=model), metadata=metadata),
        "Detokenize": stub.Detokenize(inference_pb2.DetokenizeRequest(model=model), metadata=metadata),
        "GetModel": stub.GetModel(inference_pb2.GetModelRequest(model=model), metadata=metadata),
        "GetLoad": stub.GetLoad(inference_pb2.GetLoadRequest(model=model), metadata=metadata),
        "Session": stub.Session(iter([session]), metadata=metadata).read(),
    }


# The default model, its name, one that does not exist: a key learns the same of all that are not
# its own.
@pytest.mark.parametrize("model", ["", "tiny", "nothing"])
async def test_a_model_that_is_not_the_keys_is_denied_by_name(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path, model: str
) -> None:
    async with running_service(model_path, sockets, keys_file=keys_file) as running:
        for method, call in calls(running, bearer(BOUND), model).items():
            if method == "Session":
                (event,) = (await call).events
                assert event.error.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
                assert (model or "tiny") in event.error.message
                continue
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED, method
            assert f"'{model or 'tiny'}'" in (refused.value.details() or "")
        assert running.engine.requests == {}
        # What it may not use is not shown either.
        assert not (await running.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer(BOUND))).models
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await running.stub.GetModel(inference_pb2.GetModelRequest(model="more"), metadata=bearer(BOUND))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_quotas_go_to_the_engine_with_every_request_and_subscription(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    limits = engine_pb2.TenantLimits(
        requests_per_minute=60, concurrent_streams=4, tokens_per_minute=10_000, kv_cache_share=0.25
    )
    async with running_service(model_path, sockets, keys_file=keys_file, credentials_reload_s=0.05) as running:
        submit = inference_pb2.SubmitRequest(spec=Spec(text="x"))
        first = await running.stub.Submit(submit, metadata=bearer(KEY))
        assert running.engine.requests[first.request_id].add.limits == limits
        subscribe = inference_pb2.SubscribeRequest(request_id=first.request_id)
        await events_of(running.stub.Subscribe(subscribe, metadata=bearer(KEY)))
        assert running.engine.attaches[-1].limits == limits
        # Limits that are lifted are said to be: the engine goes by the newest.
        write_keys(keys_file, entry(KEY, "team"))
        lifted = engine_pb2.TenantLimits()

        async def is_lifted() -> bool:
            newest = await running.stub.Submit(submit, metadata=bearer(KEY))
            add = running.engine.requests[newest.request_id].add
            return bool(add.HasField("limits") and add.limits == lifted)

        for _ in range(1000):
            if await is_lifted():
                return
        raise AssertionError("the new limits never came")


async def test_a_server_without_keys_limits_nobody(running: Running) -> None:
    submitted = await running.stub.Submit(inference_pb2.SubmitRequest(spec=Spec(text="x")))
    assert not running.engine.requests[submitted.request_id].add.HasField("limits")


async def test_a_session_starts_nothing_on_a_model_that_its_key_has_lost(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    async with running_service(model_path, sockets, keys_file=keys_file, credentials_reload_s=0.05) as running:
        session = running.stub.Session(metadata=bearer(KEY))
        errors = []
        async with asyncio.timeout(120):
            for stream_id in range(1, 100_000):
                submit = inference_pb2.SessionSubmit(spec=Spec(text="x"))
                await session.write(inference_pb2.SessionRequest(stream_id=stream_id, submit=submit))
                if stream_id == 3:
                    write_keys(keys_file, entry(KEY, "team", models=("other",)))
                errors.append(await _error_of(session, stream_id))
                if errors[-1] is not None:
                    break
        assert errors[:2] == [None, None]
        assert errors[-1].code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        # Its other generations may go on, and so may it.
        session.cancel()


async def _error_of(session: Any, stream_id: int) -> Any:
    """How a session's generation ended: None, or its error."""
    while True:
        for event in (await session.read()).events:
            if event.stream_id == stream_id and event.HasField("error"):
                return event.error
            if event.stream_id == stream_id and event.event.HasField("done"):
                return None


async def ended_with(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a stream ends."""
    async with asyncio.timeout(120):
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await events_of(call)
    return ended.value.code(), ended.value.details() or ""


@pytest.mark.parametrize("how", ["revoked", "expired", "replaced", "gone"])
async def test_open_calls_end_with_their_key_and_those_of_others_go_on(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path, how: str
) -> None:
    other = api_keys.new_key()
    others = entry(other, "other")
    write_keys(keys_file, entry(KEY, "team"), others)
    async with running_service(model_path, sockets, keys_file=keys_file, credentials_reload_s=0.05) as running:
        running.engine.running.clear()
        request = inference_pb2.GenerateRequest(spec=Spec(text="x"))
        call = running.stub.Generate(request, metadata=bearer(KEY))
        going_on = running.stub.Generate(request, metadata=bearer(other))
        whole = asyncio.ensure_future(
            running.stub.Complete(inference_pb2.CompleteRequest(spec=Spec(text="x")), metadata=bearer(KEY))
        )
        session = running.stub.Session(metadata=bearer(KEY))
        submit = inference_pb2.SessionSubmit(spec=Spec(text="x"))
        await session.write(inference_pb2.SessionRequest(stream_id=1, submit=submit))
        for stream in (call, going_on, session):
            await stream.read()
        await running.until(lambda: len(running.engine.requests) == 4)
        soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(milliseconds=300)
        kept = {
            "revoked": [entry(KEY, "team", disabled=True)],
            "expired": [entry(KEY, "team", expires=soon)],
            "replaced": [entry(BOUND, "team")],
            "gone": [],
        }[how]
        write_keys(keys_file, *kept, others)
        assert await ended_with(call) == (grpc.StatusCode.UNAUTHENTICATED, UNAUTHENTICATED_TEXT)
        assert await ended_with(session) == (grpc.StatusCode.UNAUTHENTICATED, UNAUTHENTICATED_TEXT)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asyncio.wait_for(whole, 60)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        # The engine computes nothing more for it.
        await running.until(lambda: len(running.engine.aborts) + len(running.engine.detached) >= 3)
        running.engine.running.set()
        assert await events_of(going_on)


async def test_a_call_that_nobody_reads_ends_with_its_key_too(
    model_path: pathlib.Path, sockets: pathlib.Path, keys_file: pathlib.Path
) -> None:
    write_keys(keys_file, entry(KEY, "team"))
    endless = [200] * 2_000_000
    async with running_service(
        model_path, sockets, lambda add, index: endless, keys_file=keys_file, credentials_reload_s=0.05
    ) as running:
        call = running.stub.Generate(inference_pb2.GenerateRequest(spec=Spec(text="x")), metadata=bearer(KEY))
        await call.read()
        await running.until(lambda: running.service.core.delivering)
        await asyncio.sleep(0.5)
        write_keys(keys_file)
        await running.until(lambda: not running.service.core.delivering)
        await running.until(lambda: running.service.core.num_open == 0)
        call.cancel()
