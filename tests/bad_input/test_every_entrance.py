"""Each bad request at each entrance.

Refused by name, within 1 KiB, without a word about the server's inside, and the next request is
answered.
"""

from __future__ import annotations

import pathlib
import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tests.backend.backend_harness import (
    BackendProcess,
    EngineClient,
    add_message,
    connected,
    idle,
    settled,
    start_backend,
    write_model_folder,
)
from tests.backend.fake_worker import VOCABULARY, expected_tokens
from tests.bad_input.rows import ROWS, Facts, Row
from tests.kserve import wire as kserve
from tests.service import model_folder
from tests.service.harness import ANSWER, Running, events_of, running_service, text_of

from headrace.v1 import generation_pb2, inference_pb2
from headrace_service.text import chat_template

_INTERNALS = re.compile(r"Traceback|\.py\b|/work|/root|/home|/tmp|0x[0-9a-f]{6,}|object at|headrace_(service|backend)")
_PROMPT = [10, 20, 30]


def check(row: Row, code: grpc.StatusCode | None, text: str) -> None:
    """What any refusal must keep."""
    if code is not None:
        assert code == row.code, (code, text)
    assert row.field in text, text
    assert 0 < len(text) <= 1024
    assert not _INTERNALS.search(text), text


def ids_of_rows(rows: list[Row]) -> list[str]:
    return [row.name for row in rows]


# -- the own API, and KServe unary and streamed, of one service


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return model_folder.write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(model_path: pathlib.Path) -> AsyncIterator[Running]:
    """One for all rows: what a bad request leaves behind, the next one would find too."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="hr-") as sockets:
        patch.setattr(chat_template, "_START_ALLOWANCE_S", 60.0)
        async with running_service(model_path, pathlib.Path(sockets)) as running:
            yield running


@pytest_asyncio.fixture(loop_scope="module")
async def running(service: Running) -> AsyncIterator[Running]:
    service.engine.requests.clear()
    yield service
    assert not service.engine.requests, "nothing of this may reach the engine"
    request = inference_pb2.GenerateRequest(spec=generation_pb2.GenerationSpec(text="hi"))
    assert text_of(await events_of(service.stub.Generate(request))) == ANSWER
    await service.until(lambda: service.service.core.num_open == 0)


def facts_of(running: Running) -> Facts:
    model = running.engine.model
    return Facts(model.vocabulary_size, model.max_context_tokens, model.max_outputs)


OWN = [row for row in ROWS if row.spec is not None]


@pytest.mark.parametrize("row", OWN, ids=ids_of_rows(OWN))
@pytest.mark.asyncio(loop_scope="module")
async def test_own_api(running: Running, row: Row) -> None:
    assert row.spec is not None
    spec = row.spec(facts_of(running))
    calls = (
        lambda: events_of(running.stub.Generate(inference_pb2.GenerateRequest(spec=spec))),
        lambda: running.stub.Complete(inference_pb2.CompleteRequest(spec=spec)),
        lambda: running.stub.Submit(inference_pb2.SubmitRequest(spec=spec)),
    )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call()
        check(row, refused.value.code(), refused.value.details() or "")
    session = running.stub.Session()
    await session.write(inference_pb2.SessionRequest(stream_id=1, submit=inference_pb2.SessionSubmit(spec=spec)))
    event = (await session.read()).events[0]
    assert event.error.code == row.code.value[0]
    check(row, None, event.error.message)
    session.cancel()


KSERVE = [row for row in ROWS if row.sampling is not None or row.prompt is not None]


def infer(row: Row, facts: Facts, stream: bool) -> Any:
    sampling = row.sampling(facts) if row.sampling is not None else '{"max_tokens": 4}'
    prompt = row.prompt if row.prompt is not None else b"hello"
    return kserve.text(prompt, sampling=sampling, id="bad", stream=stream)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("row", KSERVE, ids=ids_of_rows(KSERVE))
@pytest.mark.asyncio(loop_scope="module")
async def test_kserve_unary(running: Running, row: Row) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await kserve.Wire(running.channel).ModelInfer(infer(row, facts_of(running), stream=False))
    check(row, refused.value.code(), refused.value.details() or "")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("row", KSERVE, ids=ids_of_rows(KSERVE))
@pytest.mark.asyncio(loop_scope="module")
async def test_kserve_stream_stays_open(running: Running, row: Row) -> None:
    wire = kserve.Wire(running.channel)
    call = wire.ModelStreamInfer()
    await call.write(infer(row, facts_of(running), stream=True))
    first = await call.read()
    assert first.infer_response.id == "bad"
    check(row, None, first.error_message)
    await call.write(kserve.text(id="good", stream=True))
    assert not (await call.read()).error_message
    call.cancel()
    await running.until(lambda: running.service.core.num_open == 0)
    running.engine.requests.clear()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("row", KSERVE, ids=ids_of_rows(KSERVE))
@pytest.mark.asyncio(loop_scope="module")
async def test_kserve_stream_that_asked_for_statuses_ends(running: Running, row: Row) -> None:
    call = kserve.Wire(running.channel).ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
    await call.write(infer(row, facts_of(running), stream=True))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        while await call.read() is not grpc.aio.EOF:
            pass
        raise grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await call.details())
    check(row, refused.value.code(), refused.value.details() or "")


# -- the engine's socket


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackendProcess]:
    model = write_model_folder(tmp_path_factory.mktemp("engine") / "model")
    started = start_backend(tmp_path_factory.mktemp("backend"), model, "--step-ms", "2")
    started.wait_listening()
    yield started
    started.process.terminate()
    assert started.process.wait(240) == 0, started.log
    assert "Traceback" not in started.log, started.log


@pytest_asyncio.fixture
async def engine(backend: BackendProcess) -> AsyncIterator[EngineClient]:
    async with connected(backend.address) as client:
        await client.wait_serving()
        yield client
        assert (await settled(await client.add(_PROMPT, 5))).tokens == expected_tokens(_PROMPT, 5)
        await idle(client)


ENGINE = [row for row in ROWS if row.engine is not None]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("row", ENGINE, ids=ids_of_rows(ENGINE))
async def test_engine_socket(engine: EngineClient, row: Row) -> None:
    assert row.engine is not None
    subscription = engine.subscription()
    message = add_message(_PROMPT, 5, handle=subscription.handle)
    row.engine(message, Facts(VOCABULARY, 2048, 16))
    await engine.send(add=message)
    await settled(subscription)
    assert subscription.refused is not None
    assert subscription.refused.code == row.code.value[0]
    check(row, None, subscription.refused.message)
