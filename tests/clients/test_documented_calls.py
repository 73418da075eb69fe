"""The calls that the documentation shows for grpcurl, sent as they stand there to a real server."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest
from google.protobuf import json_format, message_factory
from google.protobuf.message import Message
from tests.support.rpc import CALL_TIMEOUT_S
from tests.support.running_server import RunningServer

from headrace.v1 import inference_pb2

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]


@dataclass(frozen=True)
class DocumentedCall:
    """One line of grpcurl."""

    page: str
    method: str
    bodies: tuple[dict[str, object], ...]


def _bodies(text: str) -> Iterator[dict[str, object]]:
    """The JSON objects of a `-d` argument, which may be several with space between them."""
    while text.strip():
        body, end = json.JSONDecoder().raw_decode(text.strip())
        yield body
        text = text.strip()[end:]


def documented_calls() -> list[DocumentedCall]:
    found = []
    for page in ("README.md", "docs/api.md"):
        for line in re.findall(r"^    (grpcurl .*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE):
            words = shlex.split(line, comments=True)
            method = re.fullmatch(r"(?:\$S|headrace\.v1\.InferenceService)/(\w+)", words[-1])
            if method:
                data = words[words.index("-d") + 1] if "-d" in words else "{}"
                found.append(DocumentedCall(page, method[1], tuple(_bodies(data))))
    return found


CALLS = documented_calls()


def requests_of(call: DocumentedCall) -> list[Message]:
    """The call's requests; raises if the protocol has no such field."""
    request_type = message_factory.GetMessageClass(SERVICE.methods_by_name[call.method].input_type)
    return [json_format.ParseDict(body, request_type()) for body in call.bodies]


def send(channel: grpc.Channel, call: DocumentedCall) -> list[Message]:
    """Every message that the server answers; an error of the call is raised."""
    method = SERVICE.methods_by_name[call.method]
    request_type, response_type = (
        message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type)
    )
    requests = requests_of(call)
    kind = {True: "stream", False: "unary"}
    shape = f"{kind[method.client_streaming]}_{kind[method.server_streaming]}"
    caller = getattr(channel, shape)(
        f"/{SERVICE.full_name}/{call.method}",
        request_serializer=request_type.SerializeToString,
        response_deserializer=response_type.FromString,
    )
    answer = caller(iter(requests) if method.client_streaming else requests[0], timeout=CALL_TIMEOUT_S)
    return list(answer) if method.server_streaming else [answer]


@pytest.fixture
def channel(shared_server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(shared_server.address) as opened:
        yield opened


def test_the_pages_show_every_way_to_generate_in_words_of_the_protocol() -> None:
    assert {call.method for call in CALLS} >= {"Generate", "Complete", "Chat", "Submit", "Subscribe", "Session"}
    assert {call.page for call in CALLS} == {"README.md", "docs/api.md"}
    assert all(requests_of(call) for call in CALLS)


@pytest.mark.slow  # The test above reads the requests.
def test_documented_calls_are_answered(channel: grpc.Channel) -> None:
    """In the pages' order, one after the other: `ID` stands for the request that was submitted."""
    submitted = ""
    for call in CALLS:
        bodies = tuple(
            {name: submitted if value == "ID" else value for name, value in body.items()} for body in call.bodies
        )
        answers = send(channel, DocumentedCall(call.page, call.method, bodies))
        assert answers, call
        if isinstance(answers[0], inference_pb2.SubmitResponse):
            submitted = answers[0].request_id
            # A person's next call comes later: here the whole log is read first.
            send(channel, DocumentedCall(call.page, "Subscribe", ({"requestId": submitted},)))
