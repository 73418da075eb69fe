"""Whatever a caller sends to whatever method.

One status that is neither UNKNOWN nor INTERNAL, that shows nothing of the server, and a server that
goes on.
"""

from __future__ import annotations

import asyncio
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf import message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.service.harness import ANSWER, Running, events_of, running_service, text_of
from tests.support.any_message import any_message
from tests.support.examples import examples

from headrace.v1 import admin_pb2, generation_pb2, inference_pb2
from headrace_protos.inference import grpc_service_pb2

# What no status may show: where the code is, what it is made of, where things lie in memory.
_INTERNALS = re.compile(
    r"Traceback|File \"|\.py\b|/work|/root|/home|/tmp|0x[0-9a-f]{6,}|object at|headrace_(service|backend)"
)
_FORBIDDEN = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)
_CALL_S = 20.0


class Method(NamedTuple):
    path: str
    request: Any
    client_streaming: bool
    server_streaming: bool


def methods() -> list[Method]:
    """Every method of the public services."""
    found = []
    for file in (inference_pb2, admin_pb2, grpc_service_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                request = getattr(file, method.input_type.name)
                found.append(
                    Method(
                        f"/{service.full_name}/{method.name}", request, method.client_streaming, method.server_streaming
                    )
                )
    return found


class Host:
    """A service on a loop of its own, which synchronous tests can use."""

    def __init__(self, model_path: pathlib.Path, sockets: pathlib.Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._context = running_service(model_path, sockets, default_time_limit_s=30.0, kserve_shared_memory=True)
        self.running: Running = self.loop.run_until_complete(self._context.__aenter__())

    def close(self) -> None:
        self.loop.run_until_complete(self._context.__aexit__(None, None, None))
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    def call(self, method: Method, requests: list[bytes]) -> grpc.aio.AioRpcError | None:
        """Sends requests and reads the answer to its end; returns the status unless it is OK."""
        return self.loop.run_until_complete(_call(self.running.channel, method, requests))

    def canary(self) -> str:
        """The text of a valid request, after whatever drained the server."""
        resume = Method("/headrace.v1.AdminService/Drain", admin_pb2.DrainRequest, False, False)
        assert self.call(resume, [admin_pb2.DrainRequest(resume=True).SerializeToString()]) is None
        request = inference_pb2.GenerateRequest(spec=generation_pb2.GenerationSpec(text="hi"))

        async def answer() -> str:
            # Calls are made on the loop: outside, grpc.aio asks for the thread's, which another
            # test may have taken away.
            return text_of(await events_of(self.running.stub.Generate(request)))

        return self.loop.run_until_complete(answer())


async def _call(channel: grpc.aio.Channel, method: Method, requests: list[bytes]) -> grpc.aio.AioRpcError | None:
    try:
        if method.client_streaming:
            call: Any = channel.stream_stream(method.path)(timeout=_CALL_S)
            for request in requests:
                await call.write(request)
            await call.done_writing()
        elif method.server_streaming:
            call = channel.unary_stream(method.path)(requests[0], timeout=_CALL_S)
        else:
            await channel.unary_unary(method.path)(requests[0], timeout=_CALL_S)
            return None
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    except asyncio.InvalidStateError:
        # A write after the server had ended the call.
        return grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await call.details())
    return None


@pytest.fixture(scope="module")
def host(model_path: pathlib.Path) -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        started = Host(model_path, pathlib.Path(folder))
        yield started
        started.close()


def check(error: grpc.aio.AioRpcError | None) -> None:
    if error is not None:
        assert error.code() not in _FORBIDDEN, error
        assert len(error.details() or "") <= 1024
        assert not _INTERNALS.search(error.details() or ""), error.details()


_PATIENT = settings(
    max_examples=examples(36, least=7),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("method", methods(), ids=lambda method: method.path)
def test_any_message_gets_a_status_that_callers_may_see(host: Host, method: Method) -> None:
    requests = st.lists(any_message(method.request), min_size=1, max_size=3 if method.client_streaming else 1)

    @_PATIENT
    @given(requests)
    def sends(drawn: list[message.Message]) -> None:
        check(host.call(method, [request.SerializeToString() for request in drawn]))

    sends()
    assert host.canary() == ANSWER
    assert host.running.service.core.num_open == 0


@pytest.mark.parametrize("method", methods(), ids=lambda method: method.path)
def test_any_bytes_get_a_status_that_callers_may_see(host: Host, method: Method) -> None:
    @_PATIENT
    @given(any_message(method.request), st.integers(0, 400), st.binary(max_size=8))
    def sends(request: message.Message, place: int, garbage: bytes) -> None:
        data = request.SerializeToString()
        cut = min(place, len(data))
        check(host.call(method, [data[:cut] + garbage + data[cut + len(garbage) :]]))

    sends()
    assert host.canary() == ANSWER
    assert host.running.service.core.num_open == 0
