"""Calls that no gRPC client makes, at a real server over a plain socket.

Each gets one status at once, and the next call is answered.

Where grpc itself answers, before any code of the server's own, the status is grpc's and not what
one would choose; `docs/api.md` says which.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import grpc
import pytest
from tests.support.http2 import CANCEL, RST_STREAM, Answer, RawCall, frame, message
from tests.support.processes import wait_until
from tests.support.rpc import generate, greedy, idle_load
from tests.support.running_server import RunningServer

from headrace.v1 import inference_pb2
from headrace_protos.orca.orca_load_report_pb2 import OrcaLoadReport

_INTERNALS = re.compile(r"Traceback|\.py\b|/work|/root|/home|/tmp|0x[0-9a-f]{6,}|object at|headrace_(service|backend)")
PROMPT = [50, 60, 70]
GENERATE = "/headrace.v1.InferenceService/Generate"
REQUEST = inference_pb2.GenerateRequest(spec=greedy(PROMPT, 4)).SerializeToString()
# One answer, many answers, and services whose handlers are not ours. All take this message.
METHODS = {
    "/headrace.v1.InferenceService/GetModel": b"",
    GENERATE: REQUEST,
    "/headrace.v1.AdminService/GetMemoryPlan": b"",
    "/inference.GRPCInferenceService/ServerReady": b"",
    "/grpc.health.v1.Health/Check": b"",
}
STREAMS = [
    "/headrace.v1.InferenceService/Session",
    "/inference.GRPCInferenceService/ModelStreamInfer",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]
OK, INVALID_ARGUMENT, DEADLINE_EXCEEDED, INTERNAL = (
    code.value[0]
    for code in (
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
    )
)


@pytest.fixture(autouse=True)
def _goes_on(server: RunningServer) -> Iterator[None]:
    """After each test the server answers as before, and its log knows of no mistake of its own."""
    num_lines = len(server.lines)
    yield
    assert len(generate(server.address, greedy(PROMPT, 4)).tokens[0]) == 4
    wait_until(lambda: idle_load(server.address), what="no request is left")
    log = "".join(server.lines[num_lines:])
    assert "Traceback" not in log and "internal_error" not in log, log


def called(server: RunningServer, path: str, body: bytes, *extra: tuple[str, str]) -> Answer:
    """A call whose whole body, framing included, comes at once."""
    with RawCall(server.address, path, extra) as call:
        call.send_data(body, ends=True)
        return call.answer()


def check_refused(answer: Answer, status: int, named: str) -> None:
    assert (answer.status, answer.messages) == (status, [])
    assert named in answer.text and not _INTERNALS.search(answer.text), answer.text


@pytest.mark.parametrize("method", METHODS)
def test_a_valid_call_is_answered(server: RunningServer, method: str) -> None:
    answer = called(server, method, message(METHODS[method]))
    assert answer.status == OK and answer.messages


@pytest.mark.one_in(5)
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_encoding_ends_the_call(server: RunningServer, method: str, compressed: bool) -> None:
    # grpc's own: a client should get UNIMPLEMENTED.
    answer = called(server, method, message(METHODS[method], compressed=compressed), ("grpc-encoding", "snappy"))
    check_refused(answer, INTERNAL, "grpc-encoding")


@pytest.mark.parametrize("method", METHODS)
def test_compression_without_an_encoding_ends_the_call(server: RunningServer, method: str) -> None:
    check_refused(called(server, method, message(METHODS[method], compressed=True)), INTERNAL, "ompression")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", METHODS)
def test_of_two_requests_the_first_is_answered(server: RunningServer, method: str) -> None:
    one = called(server, method, message(METHODS[method]))
    two = called(server, method, message(METHODS[method]) + message(b"\xff\xff"))
    assert two.status == OK and len(two.messages) == len(one.messages)


def test_the_second_of_two_generations_is_not_begun(server: RunningServer) -> None:
    longer = inference_pb2.GenerateRequest(spec=greedy(PROMPT, 8)).SerializeToString()
    answer = called(server, GENERATE, message(REQUEST) + message(longer))
    events = [inference_pb2.GenerateResponse.FromString(data).event for data in answer.messages]
    assert sum(len(event.delta.token_ids) for event in events) == 4
    assert len([event for event in events if event.HasField("done")]) == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_call_without_a_request_is_refused_as_such(server: RunningServer, method: str) -> None:
    check_refused(called(server, method, b""), INVALID_ARGUMENT, "request: is missing")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", METHODS)
def test_a_call_that_ends_within_a_request_ends(server: RunningServer, method: str) -> None:
    with RawCall(server.address, method) as call:
        call.send_data(message(b"0123456789")[:8], ends=True)
        assert call.answer().status not in (OK, grpc.StatusCode.UNKNOWN.value[0])


@pytest.mark.parametrize("method", STREAMS)
def test_a_stream_without_a_request_ends(server: RunningServer, method: str) -> None:
    assert called(server, method, b"").status == OK


@pytest.mark.one_in(4)
@pytest.mark.parametrize("method", [*METHODS, *STREAMS])
def test_a_call_that_is_reset_before_its_request_leaves_nothing(server: RunningServer, method: str) -> None:
    with RawCall(server.address, method) as call:
        call.send(frame(RST_STREAM, 0, 1, CANCEL.to_bytes(4, "big")))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("value", ["!!!!", "a", "Y Q="])
@pytest.mark.parametrize("method", METHODS)
def test_bad_base64_ends_the_call(server: RunningServer, method: str, value: str) -> None:
    # grpc's own: a client should get INVALID_ARGUMENT.
    check_refused(called(server, method, message(METHODS[method]), ("x-trace-bin", value)), INTERNAL, "x-trace-bin")


@pytest.mark.parametrize("value", ["", "YQ==", "YQ"])
def test_valid_base64_is_of_no_concern(server: RunningServer, value: str) -> None:
    assert called(server, GENERATE, message(REQUEST), ("x-trace-bin", value)).status == OK


def test_a_request_that_comes_byte_by_byte_is_answered(server: RunningServer) -> None:
    with RawCall(server.address, GENERATE) as call:
        body = message(REQUEST)
        for place in range(len(body)):
            call.send_data(body[place : place + 1], ends=place + 1 == len(body))
            if place % 20 == 0:
                assert len(generate(server.address, greedy(PROMPT, 4)).tokens[0]) == 4
        answer = call.answer()
    assert answer.status == OK and answer.messages


@pytest.mark.parametrize("method", METHODS)
def test_a_request_that_never_ends_is_given_up_at_its_deadline(server: RunningServer, method: str) -> None:
    with RawCall(server.address, method, [("grpc-timeout", "2S")]) as call:
        for byte in message(b"0123456789")[:8]:
            call.send_data(bytes([byte]), ends=False)
            time.sleep(0.1)
        check_refused(call.answer(), DEADLINE_EXCEEDED, "")


def test_load_reports_are_of_the_engine_whichever_service_took_its_requests(server: RunningServer) -> None:
    """Calls go to either of two services, the stream of reports to one."""
    method = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"
    with grpc.insecure_channel(server.address) as channel:
        stream = channel.unary_stream(method, response_deserializer=OrcaLoadReport.FromString)(b"", timeout=240)
        report = next(stream)
        rows = report.utilization["batch_rows"]
        assert report.application_utilization == rows == 0
        while not report.rps_fractional:
            for _ in range(4):
                generate(server.address, greedy(PROMPT, 4))
            report = next(stream)
        stream.cancel()
    assert report.eps == 0 and report.named_metrics["num_requests_waiting"] == 0
