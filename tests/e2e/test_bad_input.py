"""Bad input at a real server's public API gets a status that names the field.

The server goes on as if nothing had been asked.
"""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from tests.support.rpc import CALL_TIMEOUT_S, connected, details, generate, greedy
from tests.support.running_server import RunningServer

from headrace.v1 import generation_pb2, inference_pb2

PROMPT = [50, 60, 70]


def changed(part: str, **fields: Any) -> generation_pb2.GenerationSpec:
    """A valid spec with some fields of `sampling`, `stop` or the spec itself replaced."""
    spec = greedy(PROMPT, 8)
    target = getattr(spec, part) if part else spec
    target.MergeFrom(type(target)(**fields))
    return spec


BAD = {
    "spec.sampling.temperature": changed("sampling", temperature=math.nan),
    "spec.sampling.top_p": changed("sampling", top_p=1.5),
    "spec.sampling.top_k": changed("sampling", top_k=-2),
    "spec.sampling.logit_bias": changed("sampling", logit_bias={99_999: 1.0}),
    "spec.stop.max_tokens": changed("stop", max_tokens=100_000),
    "spec.stop.strings": changed("stop", strings=[""]),
    "spec.stop.token_ids": changed("stop", token_ids=[4096]),
    "spec.n": changed("", n=1000),
    "spec.logprobs": changed("", logprobs=21),
    "spec.priority": changed("", priority=101),
    "spec.token_ids": greedy([4096], 8),
    "spec.text": greedy("", 8),
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_field_is_named_and_the_next_request_works(server: RunningServer, field: str) -> None:
    with connected(server.address) as stub:
        with pytest.raises(grpc.RpcError) as error:
            list(stub.Generate(inference_pb2.GenerateRequest(spec=BAD[field]), timeout=CALL_TIMEOUT_S))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    violation = details(error.value.trailing_metadata())["BadRequest"]
    assert isinstance(violation, error_details_pb2.BadRequest)
    assert any(found.field.startswith(field) for found in violation.field_violations)
    assert "Traceback" not in (error.value.details() or "")
    assert len(generate(server.address, greedy(PROMPT, 4)).tokens[0]) == 4


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xff\xff\xff",  # no message at all
        b"\x0a\x04\x0a\x02\xff\xfe",  # spec.text is not UTF-8
        # field 1007 of the spec, which this server does not know
        b"\x0a\x07\x0a\x02hi\xf8\x3e\x01",
    ],
)
def test_bytes_that_are_no_request_are_refused(server: RunningServer, raw: bytes) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_stream("/headrace.v1.InferenceService/Generate")
        with pytest.raises(grpc.RpcError) as error:
            list(call(raw, timeout=CALL_TIMEOUT_S))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len(generate(server.address, greedy(PROMPT, 4)).tokens[0]) == 4


def test_an_unknown_request_or_model_is_not_found(server: RunningServer) -> None:
    with connected(server.address) as stub:
        calls = [
            lambda: stub.Cancel(inference_pb2.CancelRequest(request_id="nobody")),
            lambda: list(stub.Subscribe(inference_pb2.SubscribeRequest(request_id="nobody"))),
            lambda: list(stub.Generate(inference_pb2.GenerateRequest(spec=greedy(PROMPT, 4, model="nobody")))),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError) as error:
                call()
            assert error.value.code() == grpc.StatusCode.NOT_FOUND
