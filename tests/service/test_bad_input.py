"""What callers may not send.

Refused with the field's path and its limit, by every RPC that generates, and the next request
works.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from tests.service.harness import ANSWER, Running, events_of, status_of, text_of, violations_of

from headrace.v1 import generation_pb2, inference_pb2

Spec = generation_pb2.GenerationSpec
Sampling = generation_pb2.SamplingParameters
Stop = generation_pb2.StopConditions
Ids = generation_pb2.TokenIds


def hello(**fields: Any) -> Callable[[int], Spec]:
    return lambda vocabulary: Spec(text="hello", **fields)


def ids(*token_ids: int) -> Callable[[int], Spec]:
    return lambda vocabulary: Spec(token_ids=Ids(ids=[vocabulary if token < 0 else token for token in token_ids]))


def sampling(**fields: Any) -> Callable[[int], Spec]:
    return hello(sampling=Sampling(**fields))


def stop(**fields: Any) -> Callable[[int], Spec]:
    return hello(stop=Stop(**fields))


# Per case: the spec for a vocabulary size, the field that breaks a rule, and a part of the rule.
CASES: dict[str, tuple[Callable[[int], Spec], str, str]] = {
    "no prompt": (lambda _: Spec(), "spec.prompt", "must be set"),
    "empty text": (lambda _: Spec(text=""), "spec.text", "not be empty"),
    "no ids": (lambda _: Spec(token_ids=Ids()), "spec.token_ids.ids", "at least 1"),
    "id = V": (ids(5, -1), "spec.token_ids.ids[1]", "below the vocabulary size"),
    "id 2^31": (ids(2**31), "spec.token_ids.ids[0]", "below the vocabulary size"),
    "id 2^32-1": (ids(2**32 - 1), "spec.token_ids.ids[0]", "below the vocabulary size"),
    "prompt of context tokens": (ids(*[5] * 512), "spec.token_ids.ids", "at most 511"),
    "text of context tokens": (lambda _: Spec(text="q~" * 256), "spec.text", "at most 511"),
    "text that can never fit": (lambda _: Spec(text="a" * (4 << 20)), "spec.text", "must have at most"),
    "prompt and max_tokens": (
        lambda _: Spec(token_ids=Ids(ids=[5] * 500), stop=Stop(max_tokens=13)), "spec.stop.max_tokens", "at most 12",
    ),
    "max_tokens 0": (stop(max_tokens=0), "spec.stop.max_tokens", "at least 1"),
    "max_tokens 2^31": (stop(max_tokens=2**31), "spec.stop.max_tokens", "at most 511"),
    "min_tokens > max_tokens": (stop(max_tokens=4, min_tokens=5), "spec.stop.min_tokens", "at most 4"),
    "min_tokens 2^31": (stop(min_tokens=2**31), "spec.stop.min_tokens", "at most 511"),
    "temperature -1": (sampling(temperature=-1), "spec.sampling.temperature", "at least 0.01"),
    "temperature nan": (sampling(temperature=math.nan), "spec.sampling.temperature", "at most 100"),
    "temperature inf": (sampling(temperature=math.inf), "spec.sampling.temperature", "at most 100"),
    "temperature -inf": (sampling(temperature=-math.inf), "spec.sampling.temperature", "at most 100"),
    "temperature 1e-40": (sampling(temperature=1e-40), "spec.sampling.temperature", "at least 0.01"),
    "top_p 0": (sampling(top_p=0), "spec.sampling.top_p", "above 0"),
    "top_p 1.1": (sampling(top_p=1.1), "spec.sampling.top_p", "at most 1"),
    "top_p nan": (sampling(top_p=math.nan), "spec.sampling.top_p", "at most 1"),
    "top_k -2": (sampling(top_k=-2), "spec.sampling.top_k", "at least -1"),
    "top_k 2^31-1": (sampling(top_k=2**31 - 1), "spec.sampling.top_k", "at most"),
    "min_p 2": (sampling(min_p=2), "spec.sampling.min_p", "at most 1"),
    "top_n_sigma 101": (sampling(top_n_sigma=101), "spec.sampling.top_n_sigma", "at least 0 and at most 100"),
    "presence nan": (sampling(presence_penalty=math.nan), "spec.sampling.presence_penalty", "at most 2"),
    "frequency 1e39": (sampling(frequency_penalty=1e39), "spec.sampling.frequency_penalty", "at most 2"),
    "repetition 0": (sampling(repetition_penalty=0), "spec.sampling.repetition_penalty", "at least 0.01"),
    "repetition 1e-40": (sampling(repetition_penalty=1e-40), "spec.sampling.repetition_penalty", "at least 0.01"),
    "repetition 1e39": (sampling(repetition_penalty=1e39), "spec.sampling.repetition_penalty", "at most 10"),
    "bias key": (lambda v: Spec(text="a", sampling=Sampling(logit_bias={v: 1.0})), "spec.sampling.logit_bias[",
        "vocabulary"),
    "bias nan": (sampling(logit_bias={5: math.nan}), "spec.sampling.logit_bias[5]", "at most 100"),
    "too many biases": (sampling(logit_bias={key: 0.5 for key in range(1025)}), "spec.sampling.logit_bias",
        "at most 1024"),
    "stop empty": (stop(strings=["ok", ""]), "spec.stop.strings[1]", "at least 1"),
    "1,000 stops": (stop(strings=["x"] * 1000), "spec.stop.strings", "at most 16"),
    "1 MiB stop": (stop(strings=["x" * (1 << 20)]), "spec.stop.strings[0]", "at most 256 bytes"),
    "stop id = V": (lambda v: Spec(text="a", stop=Stop(token_ids=[v])), "spec.stop.token_ids[0]", "vocabulary"),
    "65 stop ids": (stop(token_ids=[5] * 65), "spec.stop.token_ids", "at most 64"),
    "bad word empty": (stop(bad_words=[""]), "spec.stop.bad_words[0]", "at least 1"),
    "65 bad words": (stop(bad_words=["x"] * 65), "spec.stop.bad_words", "at most 64"),
    "n 0": (hello(n=0), "spec.n", "at least 1"),
    "n 17": (hello(n=17), "spec.n", "at most 16"),
    "n 10^9": (hello(n=10**9), "spec.n", "at most 16"),
    "logprobs 21": (hello(logprobs=21), "spec.logprobs", "at most 20"),
    "logprobs 10^9": (hello(logprobs=10**9), "spec.logprobs", "at most 20"),
    "priority 101": (hello(priority=101), "spec.priority", "at most 100"),
    "priority -2^31": (hello(priority=-(2**31)), "spec.priority", "at least -100"),
    "time limit 0": (hello(time_limit=duration_pb2.Duration()), "spec.time_limit", "above 0"),
    "time limit < 0": (hello(time_limit=duration_pb2.Duration(seconds=-1)), "spec.time_limit", "above 0"),
    "time limit 25 h": (hello(time_limit=duration_pb2.Duration(seconds=90_000)), "spec.time_limit", "at most 24 hours"),
    "time limit odd": (hello(time_limit=duration_pb2.Duration(seconds=1, nanos=2**31 - 1)), "spec.time_limit",
        "24 hours"),
    "salt": (hello(cache_salt="s" * 257), "spec.cache_salt", "at most 256"),
}  # fmt: skip

ENTRANCES: dict[str, Callable[[Running, Spec], Any]] = {
    "Generate": lambda running, spec: events_of(running.stub.Generate(inference_pb2.GenerateRequest(spec=spec))),
    "Complete": lambda running, spec: running.stub.Complete(inference_pb2.CompleteRequest(spec=spec)),
    "Submit": lambda running, spec: running.stub.Submit(inference_pb2.SubmitRequest(spec=spec)),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
async def test_every_broken_rule_is_named_with_its_field_and_limit(running: Running, entrance: str) -> None:
    vocabulary = running.engine.model.vocabulary_size
    for case, (make_spec, field, rule) in CASES.items():
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ENTRANCES[entrance](running, make_spec(vocabulary))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, case
        violations = violations_of(refused.value)
        assert any(found.startswith(field) and rule in text for found, text in violations.items()), (case, violations)
        assert field.split("[")[0] in (refused.value.details() or ""), case
        assert len(refused.value.details() or "") <= 1024
        assert len(status_of(refused.value).SerializeToString()) <= 1024
    assert not running.engine.requests, "nothing of this may reach the engine"
    assert (
        text_of(await events_of(running.stub.Generate(inference_pb2.GenerateRequest(spec=Spec(text="hi"))))) == ANSWER
    )


@pytest.mark.parametrize(
    "spec",
    [
        Spec(text="a\0b"),
        Spec(text="hi", sampling=Sampling(temperature=0)),
        Spec(text="hi", sampling=Sampling(temperature=0.01, top_p=1, top_k=-1, min_p=1, repetition_penalty=10)),
        Spec(text="hi", sampling=Sampling(temperature=100, top_k=400, repetition_penalty=0.01, seed=2**64 - 1)),
        Spec(text="hi", stop=Stop(max_tokens=1, min_tokens=1)),
        Spec(text="hi", n=16, priority=-100, logprobs=20),
        Spec(token_ids=Ids(ids=[5] * 511)),
    ],
)
async def test_values_at_the_limits_are_taken(running: Running, spec: Spec) -> None:
    events = await events_of(running.stub.Generate(inference_pb2.GenerateRequest(spec=spec)))
    assert events[-1].HasField("done")


async def test_all_violations_of_a_request_are_reported_together(running: Running) -> None:
    spec = Spec(text="x", n=0, priority=500, sampling=Sampling(top_p=2, min_p=-1))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ENTRANCES["Complete"](running, spec)
    assert set(violations_of(refused.value)) == {
        "spec.n",
        "spec.priority",
        "spec.sampling.top_p",
        "spec.sampling.min_p",
    }


async def test_an_unknown_model_is_not_found_and_not_echoed_whole(running: Running) -> None:
    for name in ("other", "../etc", "/etc/passwd", "m" * (1 << 20)):
        for call in (
            ENTRANCES["Generate"](running, Spec(text="x", model=name)),
            running.stub.GetModel(inference_pb2.GetModelRequest(model=name)),
            running.stub.Tokenize(inference_pb2.TokenizeRequest(text="x", model=name)),
            running.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[5], model=name)),
            running.stub.GetLoad(inference_pb2.GetLoadRequest(model=name)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() == grpc.StatusCode.NOT_FOUND
            assert len(refused.value.details() or "") <= 300
    events = await events_of(running.stub.Generate(inference_pb2.GenerateRequest(spec=Spec(text="x", model="tiny"))))
    assert text_of(events) == ANSWER


# Raw bytes of requests: field 99 (varint) in the request, in its spec, and three levels down in a
# repeated field.
UNKNOWN = {
    "request": (b"\x98\x06\x01", "99"),
    "spec": (b"\x0a\x06\x0a\x01x\x98\x06\x01", "spec.99"),
    "sampling": (b"\x0a\x08\x0a\x01x\x22\x03\x98\x06\x01", "spec.sampling.99"),
}


@pytest.mark.parametrize("where", UNKNOWN)
@pytest.mark.parametrize("method", ["Generate", "Complete", "Submit"])
async def test_fields_that_this_server_does_not_know_are_refused_by_number(
    running: Running, where: str, method: str
) -> None:
    data, field = UNKNOWN[where]
    error = await raw_error(running, method, data)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "field number 99" in violations_of(error)[field]


# A message may hold millions of two-byte mistakes; looking at each of them would stop the event
# loop for minutes.
MASSES = {
    "unknown fields": ("Generate", b"\x98\x06\x01" * 16_000, "99", "field number 99"),
    "megabytes of unknown fields": ("Generate", b"\x98\x06\x01" * 1_000_000, "request", "must have none"),
    "parts without text": ("Chat", inference_pb2.ChatMessage(role=2, parts=[inference_pb2.Part()] * 16_000),
        "messages[0].parts[0]", "must have text"),
    "parts": ("Chat", inference_pb2.ChatMessage(role=2, parts=[inference_pb2.Part()] * 500_000),
        "messages[0].parts[16382]", "16384 protobuf messages: each message, part"),
}  # fmt: skip


@pytest.mark.parametrize("case", MASSES)
async def test_masses_of_mistakes_cost_no_time(running: Running, case: str) -> None:
    method, content, field, rule = MASSES[case]
    data = content if isinstance(content, bytes) else inference_pb2.ChatRequest(messages=[content]).SerializeToString()
    began_s = time.process_time()
    error = await raw_error(running, method, data)
    # Of the processor's time, which no other process takes: tens of milliseconds. It was quadratic,
    # 1.3 s for 10,000 mistakes.
    assert time.process_time() - began_s < 1.0
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    found = violations_of(error)
    assert next(iter(found)) == field and rule in found[field]
    assert len(status_of(error).SerializeToString()) <= 1024


async def test_unknown_fields_inside_repeated_messages_are_found(running: Running) -> None:
    message = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, parts=[inference_pb2.Part(text="a")])
    part = b"\x12\x06\x0a\x01a\x98\x06\x01"
    data = (
        inference_pb2.ChatRequest(messages=[message]).SerializeToString()
        + b"\x0a"
        + bytes([2 + len(part)])
        + b"\x08\x02"
        + part
    )
    error = await raw_error(running, "Chat", data)
    assert list(violations_of(error)) == ["messages[1].parts[0].99"]


@pytest.mark.parametrize("data", [b"\x0a\xff", b"\x0a\x04\x0a\x02\xff\xfe", b"\xff" * 64, b"\x07"])
async def test_bytes_that_are_no_message_are_invalid_argument_everywhere(running: Running, data: bytes) -> None:
    for method in inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name:
        error = await raw_error(running, method, data)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, method
        assert "Error" not in (error.details() or "")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (inference_pb2.ChatRequest(), "messages"),
        (inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage()] * 1025), "messages"),
        (inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role=1)]), "messages[0].parts"),
        (
            inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(parts=[inference_pb2.Part(text="a")])]),
            "messages[0].role",
        ),
        (
            inference_pb2.ChatRequest(
                messages=[inference_pb2.ChatMessage(role=7, parts=[inference_pb2.Part(text="a")])]
            ),
            "messages[0].role",
        ),
        (
            inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role=2, parts=[inference_pb2.Part()])]),
            "messages[0].parts[0]",
        ),
        (
            inference_pb2.ChatRequest(
                messages=[inference_pb2.ChatMessage(role=2, parts=[inference_pb2.Part(text="a")])],
                continue_last_message=True,
            ),
            "messages[0].role",
        ),
        (
            inference_pb2.ChatRequest(
                messages=[inference_pb2.ChatMessage(role=2, parts=[inference_pb2.Part(text="a")])], spec=Spec(text="x")
            ),
            "spec.text",
        ),
        (
            inference_pb2.ChatRequest(
                messages=[inference_pb2.ChatMessage(role=role, parts=[inference_pb2.Part(text="a")]) for role in (2, 1)]
            ),
            "messages",
        ),
        (
            inference_pb2.ChatRequest(
                messages=[inference_pb2.ChatMessage(role=2, parts=[inference_pb2.Part(text="~" * 600)])]
            ),
            "messages",
        ),
    ],
)
async def test_bad_conversations_are_refused_by_field(
    running: Running, request_: inference_pb2.ChatRequest, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await events_of(running.stub.Chat(request_))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert field in violations_of(refused.value)


async def test_a_text_to_tokenize_has_a_limit(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await running.stub.Tokenize(inference_pb2.TokenizeRequest(text="é" * ((2 << 20) + 1)))
    assert violations_of(refused.value) == {"text": "has 4194306 bytes; must have at most 4194304"}


async def test_token_ids_by_the_million_are_checked_and_joined_without_stopping_other_calls(running: Running) -> None:
    longest = max(
        enumerate(running.service.core.models.default.text.pieces.columns(True)[0]), key=lambda entry: len(entry[1])
    )[0]
    rows = {
        grpc.StatusCode.INVALID_ARGUMENT: [5] * 1_000_000 + [2**32 - 1],
        grpc.StatusCode.RESOURCE_EXHAUSTED: [longest]
        * (1 + (16 << 20) // running.service.core.models.default.text.pieces.max_piece_bytes),
    }
    for code, token_ids in rows.items():
        call = running.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=token_ids))
        sent_s = began_s = time.process_time()
        gap_s = 0.0
        while not call.done():
            await asyncio.sleep(0.001)
            gap_s, began_s = max(gap_s, time.process_time() - began_s), time.process_time()
        assert await call.code() is code
        # The service runs on this loop. What other processes take of the processor does not count;
        # a slow one is slow at everything.
        assert gap_s < max(0.3, 0.75 * (began_s - sent_s))
        message = await call.details()
        assert message.startswith("token_ids[1000000]" if code is grpc.StatusCode.INVALID_ARGUMENT else "token_ids")


async def test_an_idempotency_key_has_a_limit(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await running.stub.Submit(inference_pb2.SubmitRequest(spec=Spec(text="x"), idempotency_key="k" * 257))
    assert violations_of(refused.value) == {"idempotency_key": "must have at most 256 bytes"}


async def test_messages_above_the_limit_are_resource_exhausted(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await running.stub.Tokenize(inference_pb2.TokenizeRequest(text="a" * ((16 << 20) + 1)))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_bug_ends_internal_with_an_id_and_says_nothing_of_itself(
    running: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken(text: str, add_special_tokens: bool) -> None:
        raise KeyError(f"secret {text}")

    monkeypatch.setattr(running.service.core.models.default.text.tokenizer, "encode", broken)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await ENTRANCES["Generate"](running, Spec(text="prompt-marker"))
    details = ended.value.details() or ""
    assert ended.value.code() == grpc.StatusCode.INTERNAL
    assert details.startswith("internal error ") and "marker" not in details and "KeyError" not in details
    monkeypatch.undo()
    captured = capsys.readouterr()
    assert "marker" not in captured.out + captured.err
    assert text_of(await ENTRANCES["Generate"](running, Spec(text="hi"))) == ANSWER


async def raw_error(running: Running, method: str, data: bytes) -> grpc.aio.AioRpcError:
    """Sends bytes as a request and returns the error."""
    path = f"/headrace.v1.InferenceService/{method}"
    streams = method in ("Generate", "Chat", "Subscribe")
    call = (running.channel.unary_stream if streams else running.channel.unary_unary)(path)(data)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (call.read() if streams else call)  # type: ignore[union-attr]
    return refused.value


@pytest.mark.parametrize(
    "metadata",
    [(("x-large", "v" * 15_000),), tuple((f"key-{number}", "value") for number in range(500))],
    ids=["15 KB", "500 keys"],
)
async def test_metadata_above_the_limit_is_resource_exhausted(
    running: Running, metadata: tuple[tuple[str, str], ...]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await running.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_gzip_bomb_is_resource_exhausted(running: Running) -> None:
    call = running.channel.unary_unary("/headrace.v1.InferenceService/Tokenize")
    data = inference_pb2.TokenizeRequest(text="a" * (64 << 20)).SerializeToString()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(data, compression=grpc.Compression.Gzip)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_unknown_method_is_unimplemented(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await running.channel.unary_unary("/headrace.v1.InferenceService/Dream")(b"")
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
