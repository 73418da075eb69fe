"""Statuses become exceptions with code, violations, retry hint and request id.

What cannot be sent is refused in the same way.
"""

from __future__ import annotations

import datetime
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from hypothesis import given
from hypothesis import strategies as st
from tests.clients.canned_service import CannedServer

import headrace
from headrace import AsyncClient, Client, HeadraceError, Violation
from headrace.errors import from_rpc_error, from_status
from headrace.grpc_words import DEADLINE_PASSED
from headrace.spec import chat_spec, generation_spec

CLASSES = {
    grpc.StatusCode.INVALID_ARGUMENT: headrace.InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: headrace.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: headrace.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: headrace.AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: headrace.Overloaded,
    grpc.StatusCode.UNAVAILABLE: headrace.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: headrace.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: headrace.Cancelled,
    grpc.StatusCode.PERMISSION_DENIED: headrace.PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: headrace.Unauthenticated,
    grpc.StatusCode.UNIMPLEMENTED: headrace.Unimplemented,
    grpc.StatusCode.INTERNAL: headrace.Internal,
    grpc.StatusCode.FAILED_PRECONDITION: HeadraceError,
}


class FailedCall(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, trailers: Any = (), details: str = "what happened") -> None:
        self._code, self._trailers, self._details = code, trailers, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailers


def test_a_status_that_grpc_lost_while_a_message_was_sent_is_no_error_of_the_server() -> None:
    error = from_rpc_error(FailedCall(grpc.StatusCode.INTERNAL, details="Internal error from Core"), "request-1")
    assert type(error) is headrace.Unavailable
    assert (error.code, error.request_id) == (grpc.StatusCode.UNAVAILABLE, "request-1")


@pytest.mark.parametrize(("code", "expected"), CLASSES.items())
def test_each_status_has_its_class_and_keeps_its_code(code: grpc.StatusCode, expected: type[HeadraceError]) -> None:
    for error in (
        from_rpc_error(FailedCall(code)),
        from_status(status_pb2.Status(code=code.value[0], message="what happened")),
    ):
        assert type(error) is expected
        assert (error.code, error.message, error.violations, error.retry_after) == (code, "what happened", (), None)


def test_damaged_details_do_not_hide_the_status() -> None:
    error = from_rpc_error(FailedCall(grpc.StatusCode.NOT_FOUND, (("grpc-status-details-bin", b"\xff\xff"),)))
    assert isinstance(error, headrace.NotFound)
    assert isinstance(from_rpc_error(FailedCall(grpc.StatusCode.NOT_FOUND, None)), headrace.NotFound)


def test_violations_name_field_and_rule(client: Client) -> None:
    with pytest.raises(headrace.InvalidRequest) as caught:
        client.generate("invalid", top_p=7).result()
    expected = Violation("spec.sampling.top_p", "must be above 0 and at most 1 (given: 7)")
    assert caught.value.violations == (expected,)
    assert str(caught.value) == "invalid request (spec.sampling.top_p: must be above 0 and at most 1 (given: 7))"


def test_overloaded_says_when_to_come_back(client: Client, server: CannedServer) -> None:
    with pytest.raises(headrace.Overloaded) as caught:
        client.generate("overloaded").result()
    assert caught.value.retry_after == 1.5
    assert server.seen.attempts["Generate"] == 1


def test_a_stream_that_breaks_names_its_request(client: Client) -> None:
    stream = client.generate("broken")
    pieces: list[str] = []
    with pytest.raises(headrace.Unavailable) as caught:
        pieces.extend(stream.text())
    assert (caught.value.request_id, caught.value.retry_after) == ("req-from-details", 2)


@pytest.mark.parametrize(
    ("code", "text", "message", "problem"),
    [
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", DEADLINE_PASSED, None),
        ("DEADLINE_EXCEEDED", "Stream removed (Deadline Exceeded)", DEADLINE_PASSED, None),
        ("DEADLINE_EXCEEDED", "the server's own words", "the server's own words", None),
        ("UNAVAILABLE", "Stream removed (Socket closed)", "the connection to the server broke (Socket closed)", "LOST"),
        (
            "UNAVAILABLE",
            "recvmsg:Connection reset by peer",
            "the connection to the server broke (recvmsg:Connection reset by peer)",
            "LOST",
        ),
        ("UNAVAILABLE", "the engine died", "the engine died", None),
        ("INTERNAL", "Socket closed", "Socket closed", None),
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.1.2.3:5: Failed to connect to remote"
            " host: No route to host",
            "10.1.2.3:5 cannot be reached: Failed to connect to remote host: No route to host",
            "UNREACHABLE",
        ),
        (
            "UNAVAILABLE",
            "errors resolving llm.example:5: [field:hostname lookup error:address lookup failed for llm.example:5:"
            " Domain name not found]",
            "no name server knows the host of llm.example:5",
            "UNKNOWN_HOST",
        ),
    ],
)
def test_what_grpcs_core_says_is_a_sentence(code: str, text: str, message: str, problem: str | None) -> None:
    error = from_rpc_error(FailedCall(grpc.StatusCode[code], details=text))
    assert (error.message, error.problem and error.problem.name) == (message, problem)


async def test_both_clients_say_which_server_is_missing() -> None:
    once = headrace.RetryPolicy(max_attempts=1)
    with Client("127.0.0.1:9", retry=once) as client, pytest.raises(headrace.Unavailable) as caught:
        client.generate("hello").result()
    async with AsyncClient("127.0.0.1:9", retry=once) as asking:
        with pytest.raises(headrace.Unavailable) as caught_too:
            await asking.generate("hello").result()
    for error in (caught.value, caught_too.value):
        assert str(error) == "no server listens on 127.0.0.1:9"
        assert error.problem is headrace.ConnectionProblem.NO_SERVER


def test_an_unknown_model_or_request_is_not_found(client: Client) -> None:
    with pytest.raises(headrace.NotFound, match="no model other"):
        client.get_model("other")
    with pytest.raises(headrace.NotFound, match="no request other"):
        client.cancel("other")
    with pytest.raises(headrace.NotFound, match="no request other"):
        client.subscribe("other").result()


async def test_async_errors_are_the_same(server: CannedServer) -> None:
    async with AsyncClient(server.address) as client:
        with pytest.raises(headrace.InvalidRequest) as caught:
            await client.generate("invalid").result()
        assert caught.value.violations[0].field == "spec.sampling.top_p"
        with pytest.raises(headrace.NotFound):
            await client.get_model("other")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "spec.stop.max_tokens"),
        ({"max_tokens": 2**32}, "spec.stop.max_tokens"),
        ({"max_tokens": 1.5}, "spec.stop.max_tokens"),
        ({"seed": -1}, "spec.sampling.seed"),
        ({"temperature": "hot"}, "spec.sampling.temperature"),
        ({"logit_bias": {-1: 0.5}}, "spec.sampling.logit_bias"),
        ({"stop": "\ud800"}, "spec.stop.strings"),
        ({"stop": 5}, "spec.stop.strings"),
        ({"stop_token_ids": [-1]}, "spec.stop.token_ids"),
        ({"time_limit": float("nan")}, "spec.time_limit"),
        ({"time_limit": float("inf")}, "spec.time_limit"),
        ({"time_limit": "soon"}, "spec.time_limit"),
        ({"n": "two"}, "spec.n"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(headrace.InvalidRequest) as caught:
        generation_spec(options, "hello")  # type: ignore[arg-type]
    assert [violation.field for violation in caught.value.violations] == [field]


def test_prompts_that_cannot_be_sent_are_refused(client: Client) -> None:
    for prompt, ids in ((None, None), ("text", [1])):
        with pytest.raises(headrace.InvalidRequest, match="exactly one"):
            client.generate(prompt, token_ids=ids)
    with pytest.raises(headrace.InvalidRequest, match="token_ids"):
        client.generate(token_ids=[-1])
    with pytest.raises(headrace.InvalidRequest, match="spec.text"):
        client.generate("\ud800")
    with pytest.raises(headrace.InvalidRequest, match=r"messages\[0\].role"):
        client.chat([("robot", "hi")])  # type: ignore[list-item]


def test_a_misspelt_option_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        chat_spec({"temprature": 1})  # type: ignore[typeddict-unknown-key]


def test_options_reach_their_fields_and_absent_ones_stay_absent() -> None:
    spec = generation_spec(
        {
            "temperature": 0,
            "top_k": -1,
            "seed": 2**64 - 1,
            "logit_bias": {5: -1.5},
            "stop": "end",
            "stop_token_ids": [1, 2],
            "ignore_eos": False,
            "bad_words": ["x"],
            "time_limit": datetime.timedelta(seconds=1.5),
            "priority": -3,
            "n": None,
            "skip_special_tokens": False,
            "cache_salt": "tenant",
            "max_drafts": 0,
        },
        "hello",
    )
    assert spec.sampling.HasField("temperature") and spec.sampling.temperature == 0
    assert (spec.sampling.top_k, spec.sampling.seed, dict(spec.sampling.logit_bias)) == (-1, 2**64 - 1, {5: -1.5})
    assert (list(spec.stop.strings), list(spec.stop.token_ids), list(spec.stop.bad_words)) == (["end"], [1, 2], ["x"])
    assert spec.stop.HasField("ignore_eos") and spec.HasField("skip_special_tokens")
    assert spec.time_limit.ToMilliseconds() == 1500 and spec.priority == -3 and spec.cache_salt == "tenant"
    assert spec.speculation.off and chat_spec({"max_drafts": 3}).speculation.max_drafts == 3
    assert not spec.HasField("n") and not spec.sampling.HasField("top_p") and not spec.stop.HasField("max_tokens")


@given(st.floats(min_value=0, max_value=86_400, allow_nan=False))
def test_time_limits_keep_their_length(seconds: float) -> None:
    spec = chat_spec({"time_limit": seconds})
    assert spec.time_limit.ToNanoseconds() == pytest.approx(seconds * 1e9, abs=1)
