"""Lines that are logged in a call name its request and its trace."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import grpc
import pytest
import structlog
from tests.service.api.test_session import Collected, read_until, submit
from tests.service.tracing.conftest import SAMPLED, TRACE_ID, TracedService

from headrace.v1 import generation_pb2, inference_pb2
from headrace_service.generations import engine_request

REQUEST = inference_pb2.GenerateRequest(spec=generation_pb2.GenerationSpec(text="hello"))


@pytest.fixture
def lines() -> Iterator[list[MutableMapping[str, Any]]]:
    """What is logged, as the service's own processors see it."""
    caught: list[MutableMapping[str, Any]] = []

    def catch(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        caught.append(event)
        raise structlog.DropEvent

    known = structlog.get_config()
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, catch])
    yield caught
    structlog.configure(**known)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of ours in the middle of a call."""

    def fail(*arguments: Any, **fields: Any) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(engine_request, "set_times", fail)


def of(lines: list[MutableMapping[str, Any]], event: str) -> list[MutableMapping[str, Any]]:
    return [line for line in lines if line["event"] == event]


@pytest.mark.usefixtures("broken")
async def test_an_internal_error_names_request_and_trace(
    traced: TracedService, lines: list[MutableMapping[str, Any]]
) -> None:
    for metadata in (SAMPLED, ()):
        with pytest.raises(grpc.aio.AioRpcError):
            await traced.stub.Generate(REQUEST, metadata=metadata).read()
    with_trace, without_trace = of(lines, "rpc.internal_error")
    assert with_trace["trace_id"] == TRACE_ID and "trace_id" not in without_trace
    ids = {line["request_id"] for line in (with_trace, without_trace)}
    assert len(ids) == 2 and all(len(request_id) == 31 for request_id in ids)


@pytest.mark.usefixtures("broken")
async def test_generations_of_a_session_are_told_apart(
    traced: TracedService, lines: list[MutableMapping[str, Any]]
) -> None:
    call, collected = traced.stub.Session(metadata=SAMPLED), Collected()
    for stream_id in (1, 2):
        await call.write(submit(stream_id))
    await read_until(call, collected, lambda: collected.ended(1) and collected.ended(2))
    await call.done_writing()
    errors = of(lines, "rpc.internal_error")
    assert len({line["request_id"] for line in errors}) == 2 and {line["trace_id"] for line in errors} == {TRACE_ID}


async def test_the_next_call_on_a_connection_inherits_nothing(
    traced: TracedService, lines: list[MutableMapping[str, Any]]
) -> None:
    call = traced.stub.Generate(REQUEST, metadata=SAMPLED)
    while await call.read() is not grpc.aio.EOF:
        pass
    structlog.get_logger("headrace.service").info("between")
    assert set(of(lines, "between")[0]) == {"event"}
