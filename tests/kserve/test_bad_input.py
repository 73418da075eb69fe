"""What a caller may get wrong, at both entrances.

One row each, refused by name, and the server as before.
"""

from __future__ import annotations

import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kserve.conformance_models import all_models
from tests.kserve.wire import Wire, add, numbers_of, raw_strings, request, stream, strings_of, text
from tests.service.harness import ANSWER, Running, running_service

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service.kserve.language_models import strict_json

ONE = [1, 1]


def with_parameter(key: str, **value: Any) -> pb.ModelInferRequest:
    message = text()
    message.parameters[key].CopyFrom(pb.InferParameter(**value))
    return message


def ensemble(**inputs: Any) -> pb.ModelInferRequest:
    """A request in TensorRT-LLM's tensors; each value is bytes, a bool, or a numpy number."""
    message = request("ensemble")
    for name, value in {"text_input": b"hello", "max_tokens": np.int32(4), **inputs}.items():
        if isinstance(value, bytes):
            add(message, name, "BYTES", ONE, raw_strings(value))
        elif isinstance(value, bool):
            add(message, name, "BOOL", ONE, bytes([value]))
        else:
            add(message, name, {"i": "INT32", "f": "FP32", "u": "UINT64"}[value.dtype.kind], ONE, value.tobytes())
    return message


def sampling(json: str) -> pb.ModelInferRequest:
    return text(sampling=json)


def digits(number: str) -> pb.ModelInferRequest:
    """A request to add numbers that are given as text."""
    message = request("simple_string")
    for name in ("INPUT0", "INPUT1"):
        add(message, name, "BYTES", [1, 16], raw_strings(*[number.encode()] * 16))
    return message


def ended_sequence(sequence_id: str) -> pb.ModelInferRequest:
    """A sequence of one request, whose id the model adds."""
    message = request("simple_dyna_sequence")
    add(message, "INPUT", "INT32", ONE, np.int32(5).tobytes())
    message.parameters["sequence_id"].string_param = sequence_id
    message.parameters["sequence_start"].bool_param = message.parameters["sequence_end"].bool_param = True
    return message


IA, UNIMPL, NF = "INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND"
ROWS: dict[str, tuple[pb.ModelInferRequest, str, str]] = {
    "1 unknown model": (request("nope"), NF, "Request for unknown model: 'nope' is not found"),
    "2 unknown version": (request("simple", model_version="99"), NF, "version '99' is not found"),
    "3 no version": (request("simple", model_version="1.5"), IA, "version should be an integer value > 0"),
    "4 no name": (request(""), IA, "model_name: must be set"),
    "5 path": (request("../etc"), NF, "Request for unknown model"),
    "6 long name": (request("x" * (1 << 20)), NF, "Request for unknown model: 'xxxx"),
    "long id": (text(id="x" * 1025), IA, "id: must have at most 1024 characters"),
    "10 empty message": (pb.ModelInferRequest(), IA, "model_name: must be set"),
    "17 no inputs": (request("vllm_model"), IA, "missing required input(s) ['text_input']"),
    "45 empty prompt": (text(""), IA, "text_input: must not be empty"),
    "47 no UTF-8": (text(b"\xff\xfe"), IA, "text_input: must be UTF-8"),
    "50 priority of a wrong type": (with_parameter("priority", string_param="1"), IA,
        "invalid value type for 'priority'"),
    "priority out of range": (with_parameter("priority", uint64_param=101), IA,
        "'priority' must be at least 0 and at most 100"),
    "51 unknown key": (with_parameter("colour", string_param="red"), IA, "parameters[colour]: is not known"),
    "parameter of the request": (with_parameter("top_p", double_param=2.0), IA, "parameters[top_p]: must be above 0"),
    "custom uint64": (with_parameter("max_tokens", uint64_param=3), IA, "invalid value type for 'max_tokens'"),
    "no value": (with_parameter("max_tokens"), IA, "got nothing"),
    "52 reserved": (with_parameter("triton_secret", bool_param=True), IA, "'triton_secret' is reserved"),
    "52 of HTTP": (with_parameter("binary_data_output", bool_param=True), IA, "'binary_data_output' is reserved"),
    "53 sequence": (with_parameter("sequence_id", int64_param=7), UNIMPL, "keeps no sequences"),
    "54 negative timeout": (with_parameter("timeout", int64_param=-1), IA, "'timeout' must be at least 0"),
    "endless timeout": (with_parameter("timeout", int64_param=(1 << 63) - 1), IA, "at most 86400000000"),
    "55 malformed": (sampling("{"), IA, "sampling_parameters: must be JSON"),
    "55 no object": (sampling("[1]"), IA, "sampling_parameters: must be a JSON object"),
    "55 duplicate keys": (sampling('{"n": 1, "n": 2}'), IA, "gives 'n' more than once"),
    "55 deep": (sampling('{"n":' + "[" * 30_000), IA, "nested at most 8 deep"),
    "55 digits": (sampling('{"n": ' + "9" * 5000 + "}"), IA, "a number of 5000 digits"),
    "55 NaN": (sampling('{"temperature": NaN}'), IA, "must not contain NaN"),
    "half a character": (sampling('{"stop": "\\ud800"}'), IA, "half of a surrogate pair"),
    "half a character as a name": (sampling('{"\\ud800": 1}'), IA, "half of a surrogate pair"),
    "endless JSON": (sampling('{"stop": "' + "x" * strict_json.MAX_BYTES + '"}'), IA,
        f"at most {strict_json.MAX_BYTES} bytes"),
    "56 stop id": (sampling('{"stop_token_ids": [-1]}'), IA, "stop_token_ids[0]: must be at least 0"),
    "56 stop id too large": (sampling('{"stop_token_ids": [100000]}'), IA,
        "stop_token_ids[0]: must be below the vocabulary size"),
    "60 image": (text(), UNIMPL, "image: is not supported"),
    "62 too many tokens": (sampling('{"max_tokens": 511}'), IA, "sampling_parameters.max_tokens: must be at most"),
    "64 no tokens": (sampling('{"max_tokens": 0}'), IA, "sampling_parameters.max_tokens: must be at least 1"),
    "64 negative": (sampling('{"max_tokens": -1}'), IA, "sampling_parameters.max_tokens: must be at least 0"),
    "64 2^31": (sampling('{"max_tokens": 2147483648}'), IA,
        "sampling_parameters.max_tokens: must be at least 1 and at most 511"),
    "66 temperature": (sampling('{"temperature": -1}'), IA, "sampling_parameters.temperature: must be 0 (greedy)"),
    "66 as text": (sampling('{"temperature": "NaN"}'), IA, "sampling_parameters.temperature: must be a finite number"),
    "66 infinite": (sampling('{"temperature": "1e999"}'), IA,
        "sampling_parameters.temperature: must be a finite number"),
    "66 tiny": (sampling('{"temperature": 1e-40}'), IA, "sampling_parameters.temperature"),
    "67 top_p": (sampling('{"top_p": "0"}'), IA, "sampling_parameters.top_p: must be above 0"),
    "68 top_k": (sampling('{"top_k": -2}'), IA, "sampling_parameters.top_k: must be at least -1"),
    "68 2^31": (sampling('{"top_k": 2147483648}'), IA, "sampling_parameters.top_k: must be at least -2147483648"),
    "69 min_p": (sampling('{"min_p": 2}'), IA, "sampling_parameters.min_p"),
    "70 float32": (sampling('{"presence_penalty": 1e39}'), IA, "that float32 holds"),
    "71 repetition": (sampling('{"repetition_penalty": 0}'), IA, "sampling_parameters.repetition_penalty"),
    "73 seed": (sampling('{"seed": -1}'), IA, "sampling_parameters.seed: must be at least 0"),
    "73 2^64": (sampling('{"seed": 18446744073709551616}'), IA, "sampling_parameters.seed: must be at least 0"),
    "74 empty stop": (sampling('{"stop": ""}'), IA, "sampling_parameters.stop[0]: must have at least 1"),
    "75 stops": (sampling('{"stop": [' + ",".join(['"a"'] * 1000) + "]}"), IA,
        "sampling_parameters.stop: must have at most 16"),
    "stop of a wrong type": (sampling('{"stop": [1]}'), IA, "sampling_parameters.stop: must be a string or a list"),
    "79 n": (sampling('{"n": 0}'), IA, "sampling_parameters.n: must be at least 1"),
    "79 many": (sampling('{"n": 1000000000}'), IA, "sampling_parameters.n: must be at least 1"),
    "83 logprobs": (sampling('{"logprobs": 21}'), IA, "sampling_parameters.logprobs: must be at most 20"),
    "83 negative": (sampling('{"logprobs": -1}'), IA, "sampling_parameters.logprobs"),
    "82 beams": (sampling('{"use_beam_search": true, "best_of": 17}'), IA,
        "sampling_parameters.best_of: must be at least 1 and at most"),
    "fewer beams than outputs": (sampling('{"use_beam_search": true, "best_of": 2, "n": 3}'), IA,
        "sampling_parameters.best_of: must be at least n, 3"),
    "beams that end somehow": (sampling('{"use_beam_search": true, "early_stopping": "now"}'), IA,
        "sampling_parameters.early_stopping: must be true or false"),
    "a penalty without beams": (sampling('{"length_penalty": 2}'), IA,
        "sampling_parameters.length_penalty: must be 1 without use_beam_search"),
    "as many beams as outputs": (sampling('{"use_beam_search": true, "n": 17}'), IA,
        "sampling_parameters.n: must be at least 1 and at most"),
    "beams that are drawn": (sampling('{"use_beam_search": true, "temperature": 1}'), IA,
        "sampling_parameters.temperature: must be 0, or unset, with beam search"),
    "beams and a form": (sampling('{"use_beam_search": true, "guided_regex": "a"}'), IA,
        "sampling_parameters.guided_regex: must not be set with beam search"),
    "guided by its older name": (sampling('{"guided_json": "{"}'), IA, "sampling_parameters.guided_json: is no JSON"),
    "guided by the older object": (sampling('{"guided_decoding": {"json": "{"}}'), IA,
        "sampling_parameters.guided_decoding: is no JSON"),
    "best_of": (sampling('{"best_of": 21}'), IA, "sampling_parameters.best_of: must be at least n, 1, and at most"),
    "best_of below n": (sampling('{"n": 2, "best_of": 1}'), IA, "sampling_parameters.best_of: must be at least n, 2"),
    "best_of below a later n": (sampling('{"best_of": "1", "n": "2"}'), IA,
        "sampling_parameters.best_of: must be at least n, 2"),
    "best_of of nothing": (sampling('{"best_of": 0}'), IA, "sampling_parameters.best_of: must be at least 1"),
    "best_of of no number": (sampling('{"best_of": true}'), IA, "sampling_parameters.best_of: must be an integer"),
    "guided": (sampling('{"guided_decoding": {"yaml": "a"}}'), UNIMPL, "guided_decoding.yaml: is not supported"),
    "guided twice": (sampling('{"guided_decoding": {"regex": "a", "json_object": true}}'), IA, "must name one form"),
    "guided by text": (sampling('{"guided_decoding": "{"}'), IA, "must be an object, or its JSON text"),
    "lora": (sampling('{"lora_name": "x"}'), UNIMPL, "lora_name: is not supported"),
    "name of several lines": (sampling('{"a\\r\\nb\\u001b[31m": 1}'), IA,
        r"sampling_parameters.a\r\nb\x1b[31m: is not known"),
    "id of several lines": (request("vllm_model", id="a\nb"), IA, r"[request id: a\nb] expected at least"),
    "unknown sampling": (sampling('{"colour": 1}'), IA, "sampling_parameters.colour: is not known"),
    "truth as a number": (sampling('{"n": true}'), IA, "sampling_parameters.n: must be an integer"),
    "number as a truth": (sampling('{"ignore_eos": 1}'), IA, "sampling_parameters.ignore_eos: must be true or false"),
    "bias of one token twice": (sampling('{"logit_bias": {"5": 1, "05": 2}}'), IA,
        "logit_bias[05]: must be an integer, without leading zeros"),
    "bias with a sign": (sampling('{"logit_bias": {"+5": 1}}'), IA, "logit_bias[+5]: must be an integer, without"),
    "bias with a space": (sampling('{"logit_bias": {" 5": 1}}'), IA, "logit_bias[ 5]: must be an integer, without"),
    "bias of minus nothing": (sampling('{"logit_bias": {"-0": 1}}'), IA, "logit_bias[-0]: must be an integer, without"),
    "bias in other digits": (sampling('{"logit_bias": {"\\u0665": 1}}'), IA, "must be an integer, without"),
    "bias": (sampling('{"logit_bias": {"x": 1}}'), IA, "logit_bias[x]: must be an integer"),
    "conformance: more digits than are added": (digits("1" * 19), IA,
        "INPUT0: must be decimal numbers of at most 18 digits"),
    "conformance: Python's digits": (digits("1_0"), IA, "INPUT0: must be decimal numbers"),
    "conformance: sequence of another name": (ended_sequence("7x"), IA,
        "sequence_id: this model wants a decimal number"),
    "conformance: sequence of too long a name": (ended_sequence("9" * 21), IA,
        "sequence_id: this model wants a decimal number"),
    "ensemble: no tokens": (ensemble(max_tokens=np.int32(0)), IA, "max_tokens: must be at least 1"),
    "ensemble: negative": (ensemble(max_tokens=np.int32(-1)), IA, "max_tokens: must be at least 0"),
    "ensemble: temperature": (ensemble(temperature=np.float32("nan")), IA, "temperature: must be 0 (greedy)"),
    "ensemble: top_p": (ensemble(top_p=np.float32(0)), IA, "top_p: must be above 0"),
    "ensemble: beams": (ensemble(beam_width=np.int32(4)), UNIMPL, "beam_width other than 1"),
    "ensemble: end_id": (ensemble(end_id=np.int32(-2)), IA, "end_id: must be at least 0"),
    "ensemble: end_id of nobody": (ensemble(end_id=np.int32(1 << 30)), IA,
        "end_id: must be below the vocabulary size"),
    "ensemble: older name": (ensemble(min_length=np.int32(9)), IA, "min_length: must be at most 4"),
    "ensemble: n": (ensemble(num_return_sequences=np.int32(1000)), IA, "num_return_sequences: must be at least 1"),
    "ensemble: logits": (ensemble(return_context_logits=True), UNIMPL, "return_context_logits: is not supported"),
    "ensemble: guide": (ensemble(guided_decoding_guide=b"x"), UNIMPL, "guided_decoding_guide: is not supported"),
    "ensemble: prompt": (ensemble(text_input=b"\xff"), IA, "text_input: must be UTF-8"),
    "ensemble: stream with prompt": (ensemble(stream=True, exclude_input_in_output=False), IA,
        "exclude_input_in_output"),
}  # fmt: skip
add(ROWS["60 image"][0], "image", "BYTES", [1], raw_strings(b"aGk="))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    model_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Running, Wire]]:
    """One server for all rows: what one of them breaks, the next one shows."""
    async with running_service(
        model_path, tmp_path_factory.mktemp("s"), conformance_models=all_models.__name__
    ) as running:
        yield running, Wire(running.channel)


async def _unary(wire: Wire, message: pb.ModelInferRequest) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await wire.ModelInfer(message)
    return refusal.value.code().name, refusal.value.details() or ""


async def _streamed(wire: Wire, message: pb.ModelInferRequest) -> tuple[str, str]:
    (answer,) = await stream(wire, message)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stream(wire, message, metadata=(("triton_grpc_error", "true"),))
    assert refusal.value.details() == answer.error_message
    return refusal.value.code().name, answer.error_message


# Every rule at the first entrance; at the other, rules are in tests/bad_input.
@pytest.mark.one_in(2)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("entrance", [_unary, _streamed])
@pytest.mark.parametrize(("message", "code", "why"), ROWS.values(), ids=ROWS.keys())
async def test_a_broken_rule_is_named_at_every_entrance(
    shared: tuple[Running, Wire], entrance: Callable[..., Any], message: pb.ModelInferRequest, code: str, why: str
) -> None:
    running, wire = shared
    found, details = await entrance(wire, message)
    assert (found, why in details) == (code, True), details
    assert len(details) <= 300
    canary = await wire.ModelInfer(text(exclude_input_in_output=True))
    assert strings_of(canary) == [ANSWER]
    assert running.service.core.num_open == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_bytes_that_are_no_message_are_refused(shared: tuple[Running, Wire]) -> None:
    _, wire = shared
    for data in (b"\xff", b"\x0a\x02\xff\xfe", text().SerializeToString()[:-3]):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await wire.ModelInfer(data)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.asyncio(loop_scope="module")
async def test_a_sequence_may_have_any_number_of_64_bits(shared: tuple[Running, Wire]) -> None:
    _, wire = shared
    for sequence_id in ("1", "4294967297", str((1 << 64) - (1 << 32) + 1)):
        assert numbers_of(await wire.ModelInfer(ended_sequence(sequence_id)), "OUTPUT") == [7]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_nul_within_a_prompt_is_text(shared: tuple[Running, Wire]) -> None:
    _, wire = shared
    assert strings_of(await wire.ModelInfer(text(b"a\0b"))) == ["a\0b" + ANSWER]


values = st.one_of(
    st.builds(lambda v: {"bool_param": v}, st.booleans()),
    st.builds(lambda v: {"int64_param": v}, st.integers(-(1 << 63), (1 << 63) - 1)),
    st.builds(lambda v: {"string_param": v}, st.text(st.characters(codec="utf-8"), max_size=8)),
    st.builds(lambda v: {"double_param": v}, st.floats()),
    st.builds(lambda v: {"uint64_param": v}, st.integers(0, (1 << 64) - 1)),
)
names = st.one_of(
    st.sampled_from(["max_tokens", "n", "seed", "temperature", "stop", "priority", "timeout", "top_k", "logprobs",
        "sequence_id"]),
    st.text(st.characters(codec="utf-8"), max_size=6),
)  # fmt: skip


@pytest.mark.asyncio(loop_scope="module")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    parameters=st.dictionaries(names, values, max_size=3),
    raw=st.lists(st.binary(max_size=24), max_size=3),
    inputs=st.lists(
        st.tuples(
            st.sampled_from(["text_input", "stream", "sampling_parameters", "IN", "x"]),
            st.sampled_from(["BYTES", "BOOL", "INT32", "", "FP16"]),
            st.lists(st.integers(-2, 3), max_size=3),
        ),
        max_size=3,
    ),
)
async def test_any_request_is_answered_or_refused(
    shared: tuple[Running, Wire], parameters: dict[str, Any], raw: list[bytes], inputs: list[Any]
) -> None:
    _, wire = shared
    message = request("vllm_model", id="h", raw_input_contents=raw)
    for key, value in parameters.items():
        message.parameters[key].CopyFrom(pb.InferParameter(**value))
    for name, datatype, shape in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
    try:
        await wire.ModelInfer(message)
    except grpc.aio.AioRpcError as error:
        assert error.code().name in (IA, UNIMPL, "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"), error
