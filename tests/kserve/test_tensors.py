"""Every rule about names, types, shapes and bytes of tensors, one row each."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.kserve.wire import add, raw_strings, request

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service.errors import ServiceError
from headrace_service.kserve.messages.datatypes import BY_NAME
from headrace_service.kserve.messages.signature import Signature, tensor
from headrace_service.kserve.messages.tensors import RequestTensors, Tensor, encode_strings

BATCHED = Signature(
    inputs=(tensor("A", "INT32", 4), tensor("B", "INT32", 4), tensor("S", "BYTES", -1, optional=True)),
    outputs=(tensor("X", "INT32", 4), tensor("Y", "INT32", 4)),
    max_batch_size=2,
)
PLAIN = Signature(
    inputs=tuple(tensor(name, name, -1, optional=True) for name in BY_NAME), outputs=(tensor("OUT", "INT32", -1),)
)
FOUR = struct.pack("<4i", 1, 2, 3, 4)


def decode(message: pb.ModelInferRequest, signature: Signature = BATCHED) -> dict[str, Tensor]:
    return RequestTensors(message, message.model_name, signature, lambda tensor: None).decode()


def both(**fields: Any) -> pb.ModelInferRequest:
    message = request("m", **fields)
    add(message, "A", "INT32", [1, 4], FOUR)
    add(message, "B", "INT32", [1, 4], FOUR)
    return message


def changed(change: Callable[[pb.ModelInferRequest], Any]) -> pb.ModelInferRequest:
    message = both()
    change(message)
    return message


def strings(raw: bytes, count: int) -> pb.ModelInferRequest:
    message = both()
    add(message, "S", "BYTES", [1, count], raw)
    return message


def contents(datatype: str, **values: Any) -> pb.ModelInferRequest:
    message = request("m")
    message.inputs.add(name=datatype, datatype=datatype, shape=[2], contents=pb.InferTensorContents(**values))
    return message


REFUSED = {
    "17 no inputs": (
        request("m"),
        "expected at least 2 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required input(s) "
        "['A', 'B']. "
        "Please provide all required input(s).",
    ),
    "18 unknown input": (
        changed(lambda m: add(m, "C", "INT32", [1, 4], FOUR)),
        "unexpected inference input 'C' for model 'm'",
    ),
    "input twice": (changed(lambda m: add(m, "A", "INT32", [1, 4], FOUR)), "input 'A' already exists in request"),
    "23 no type": (
        changed(lambda m: setattr(m.inputs[0], "datatype", "")),
        "data-type is '', which is no data-type, but model 'm' expects 'INT32'",
    ),
    "23 no such type": (
        changed(lambda m: setattr(m.inputs[0], "datatype", "FLOAT32")),
        "'FLOAT32', which is no data-type",
    ),
    "24 other type": (
        changed(lambda m: setattr(m.inputs[0], "datatype", "FP32")),
        "inference input 'A' data-type is 'FP32' but model 'm' expects 'INT32'",
    ),
    "25 rank": (
        changed(lambda m: m.inputs[0].shape.append(1)),
        "unexpected shape for input 'A' for model 'm'. Expected [-1,4], got [1,4,1].",
    ),
    "no dimensions": (changed(lambda m: m.inputs[0].ClearField("shape")), "got []."),
    "26 negative dimension": (changed(lambda m: m.inputs[0].shape.__setitem__(1, -1)), "got [1,-1]."),
    "negative dimension of any size": (strings(b"", -1), "Expected [-1,-1], got [1,-1]."),
    "27 no batch": (changed(lambda m: m.inputs[0].shape.__setitem__(0, 0)), "got [0,4]."),
    "huge dimension": (strings(b"", 1 << 62), "has 4611686018427387904 elements, must have at most 65536"),
    "many strings": (strings(bytes(4 * 65_537), 65_537), "has 65537 elements, must have at most 65536"),
    "a thousand dimensions": (changed(lambda m: m.inputs[0].shape.extend([1] * 1000)), "got [1,4,1,1,1,1,1,1,...]."),
    "29 batch too large": (
        changed(lambda m: m.inputs[0].shape.__setitem__(0, 3)),
        "inference request batch-size must be <= 2 for 'm'",
    ),
    "30 batches differ": (
        changed(lambda m: m.inputs[1].shape.__setitem__(0, 2)),
        "input 'B' batch size does not match other inputs for 'm'",
    ),
    "31 raw and contents": (
        changed(lambda m: m.inputs[1].contents.int_contents.extend([1, 2, 3, 4])),
        "contents field must not be specified when using raw_input_contents for 'B' for model 'm'",
    ),
    "32 too little raw": (
        changed(lambda m: m.raw_input_contents.pop()),
        "unable to find data for input tensor 'B' for model 'm' in request.",
    ),
    "32 neither": (
        changed(lambda m: m.ClearField("raw_input_contents")),
        "unable to find data for input tensor 'A' for model 'm' in request.",
    ),
    "too much raw": (
        changed(lambda m: m.raw_input_contents.append(b"")),
        "expected 2 raw input contents for model 'm', got 3",
    ),
    "34 short": (
        changed(lambda m: m.raw_input_contents.__setitem__(0, FOUR[:-1])),
        "input byte size mismatch for input 'A' for model 'm'. Expected 16, got 15",
    ),
    "34 long": (changed(lambda m: m.raw_input_contents.__setitem__(0, FOUR * 2)), "Expected 16, got 32"),
    "35 two contents": (
        contents("INT32", int_contents=[1, 2], uint_contents=[1, 2]),
        "binary data was already supplied for input 'INT32'",
    ),
    "36 wrong contents": (
        contents("INT32", fp32_contents=[1, 2]),
        "unexpected explicit tensor data for input tensor 'INT32' for model 'm': INT32 data must be given in "
        "int_contents, "
        "not fp32_contents",
    ),
    "short contents": (contents("INT32", int_contents=[1]), "Expected 8, got 4"),
    "few strings": (contents("BYTES", bytes_contents=[b"a"]), "unexpected number of string elements 1"),
    "empty contents": (contents("INT32"), "unable to find data for input tensor 'INT32'"),
    "38 FP16 in contents": (
        contents("FP16", fp32_contents=[1, 2]),
        "FP16 data must be given in raw_input_contents",
    ),
    "BF16 in contents": (contents("BF16", fp32_contents=[1, 2]), "BF16 data must be given in raw_input_contents"),
    "too large for INT8": (
        contents("INT8", int_contents=[1, 128]),
        "INT8 elements must be at least -128 and at most 127",
    ),
    "too large for UINT16": (contents("UINT16", uint_contents=[1 << 16, 1]), "at least 0 and at most 65535"),
    "40 length beyond the end": (
        strings(struct.pack("<I", 9) + b"abc", 1),
        "expecting string of length 9 but only 3 bytes available",
    ),
    "41 length of all ones": (strings(b"\xff\xff\xff\xff", 1), "expecting string of length 4294967295"),
    "half a length": (strings(raw_strings(b"a") + b"\x01", 2), "expecting 4 bytes but only 1 bytes available"),
    "43 too many strings": (
        strings(raw_strings(b"a", b"b"), 1),
        "unexpected number of string elements more than 1 for inference input 'S', expecting 1",
    ),
    "too few strings": (strings(raw_strings(b"a"), 2), "unexpected number of string elements 1"),
}


@pytest.mark.parametrize(("message", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_breaks_a_rule_is_refused_in_known_words(message: pb.ModelInferRequest, why: str) -> None:
    signature = PLAIN if message.inputs and message.inputs[0].name in BY_NAME else BATCHED
    with pytest.raises(ServiceError) as refusal:
        decode(message, signature)
    assert why in str(refusal.value)
    assert refusal.value.code.name == "INVALID_ARGUMENT"
    assert len(refusal.value.message) <= 300


def test_refusals_name_the_request() -> None:
    message = both(id="abc")
    del message.inputs[1]
    with pytest.raises(ServiceError, match=r"^\[request id: abc\] expected"):
        decode(message)


@pytest.mark.parametrize(
    ("outputs", "why"),
    [(["Z"], "unexpected inference output 'Z' for model 'm'"), (["X", "X"], "output 'X' already exists in request")],
)
def test_outputs_must_be_the_models(outputs: list[str], why: str) -> None:
    message = both()
    for name in outputs:
        message.outputs.add(name=name)
    with pytest.raises(ServiceError, match=why):
        RequestTensors(message, "m", BATCHED, lambda tensor: None).requested_outputs()


def test_no_outputs_means_all() -> None:
    message = both()
    tensors = RequestTensors(message, "m", BATCHED, lambda tensor: None)
    assert tensors.requested_outputs() == {"X", "Y"}
    message.outputs.add(name="Y")
    assert tensors.requested_outputs() == {"Y"}


def test_raw_contents_go_to_the_inputs_that_are_not_in_a_region() -> None:
    message = both()
    message.raw_input_contents.pop(0)
    message.raw_input_contents[0] = struct.pack("<4i", 5, 6, 7, 8)
    regions: dict[str, bytes] = {"A": FOUR}
    decoded = RequestTensors(message, "m", BATCHED, lambda tensor: regions.get(tensor.name)).decode()
    assert decoded["A"].array is not None and decoded["A"].array.tolist() == [[1, 2, 3, 4]]
    assert decoded["B"].array is not None and decoded["B"].array.tolist() == [[5, 6, 7, 8]]


def test_contents_beside_a_region_are_refused() -> None:
    message = both()
    message.inputs[0].contents.int_contents.append(1)
    with pytest.raises(ServiceError, match="in shared memory"):
        RequestTensors(message, "m", BATCHED, lambda tensor: FOUR).decode()


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_strings_survive_the_raw_form(elements: list[bytes]) -> None:
    message = request("m")
    add(message, "BYTES", "BYTES", [len(elements)], encode_strings(elements))
    decoded = decode(message, PLAIN)["BYTES"]
    assert decoded.elements == tuple(elements)
    assert decoded.raw() == message.raw_input_contents[0]


@given(st.data())
def test_numbers_survive_the_raw_form_and_the_contents(data: st.DataObject) -> None:
    datatype = data.draw(st.sampled_from([d for d in BY_NAME.values() if d.array is not None]))
    assert datatype.array is not None
    array = data.draw(hnp.arrays(datatype.array, st.integers(1, 9)))
    by_raw = request("m")
    add(by_raw, datatype.name, datatype.name, array.shape, array.tobytes())
    decoded = decode(by_raw, PLAIN)[datatype.name]
    assert decoded.raw() == array.tobytes() == Tensor.of(array).raw()
    if datatype.contents is not None:
        by_contents = request("m")
        values = {datatype.contents: array.tolist()}
        by_contents.inputs.add(
            name=datatype.name, datatype=datatype.name, shape=array.shape, contents=pb.InferTensorContents(**values)
        )
        again = decode(by_contents, PLAIN)[datatype.name].array
        np.testing.assert_array_equal(again, array)


@given(st.binary(max_size=64), st.integers(-2, 4))
def test_any_bytes_are_strings_or_refused(raw: bytes, count: int) -> None:
    try:
        decoded = decode(strings(raw, count))["S"]
    except ServiceError as refusal:
        assert refusal.code.name == "INVALID_ARGUMENT"
    else:
        assert decoded.raw() == raw and len(decoded.elements) == count
