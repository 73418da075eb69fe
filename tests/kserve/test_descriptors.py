"""The wire's messages are Triton's, number by number, beside Triton's own."""

from __future__ import annotations

import importlib
import sys

import pytest
from google.protobuf import descriptor
from tritonclient.grpc import model_config_pb2 as triton_config_pb2
from tritonclient.grpc import service_pb2 as triton_pb2

from headrace_protos.inference import grpc_service_pb2, model_config_pb2

# KServe's clients read two fields of these answers that Triton's messages do not have, and one of
# the metadata.
OURS_BESIDES = {
    "inference.RepositoryModelLoadResponse": {1, 2},
    "inference.RepositoryModelUnloadResponse": {1, 2},
    "inference.ModelMetadataResponse": {6},
    "inference.ModelMetadataResponse.PropertiesEntry": {1, 2},
}
FILES = [(grpc_service_pb2, triton_pb2), (model_config_pb2, triton_config_pb2)]


def messages(file: descriptor.FileDescriptor) -> dict[str, descriptor.Descriptor]:
    found: dict[str, descriptor.Descriptor] = {}

    def visit(message: descriptor.Descriptor) -> None:
        found[message.full_name] = message
        for nested in message.nested_types:
            visit(nested)

    for message in file.message_types_by_name.values():
        visit(message)
    return found


def form(field: descriptor.FieldDescriptor) -> tuple[object, ...]:
    """All that the wire, and a reader of the message's JSON, see of a field."""
    of_type = field.message_type.full_name if field.message_type else field.enum_type.name if field.enum_type else ""
    oneof = field.containing_oneof.name if field.containing_oneof else ""
    return field.name, field.type, field.is_repeated, of_type, oneof


@pytest.mark.parametrize(("ours", "tritons"), FILES, ids=["service", "config"])
def test_every_field_is_tritons(ours: object, tritons: object) -> None:
    theirs = messages(tritons.DESCRIPTOR)  # type: ignore[attr-defined]
    compared = 0
    for name, message in messages(ours.DESCRIPTOR).items():  # type: ignore[attr-defined]
        added = OURS_BESIDES.get(name, set())
        for field in message.fields:
            if field.number not in added:
                assert form(field) == form(theirs[name].fields_by_number[field.number]), f"{name}.{field.name}"
                compared += 1
    assert compared > 50


def test_requests_have_every_field_that_triton_has() -> None:
    theirs = messages(triton_pb2.DESCRIPTOR)
    for name, message in messages(grpc_service_pb2.DESCRIPTOR).items():
        if name.endswith("Request") or "Infer" in name:
            assert set(theirs[name].fields_by_number) <= set(message.fields_by_number), name


def test_every_method_is_there() -> None:
    (ours,) = grpc_service_pb2.DESCRIPTOR.services_by_name.values()
    (theirs,) = triton_pb2.DESCRIPTOR.services_by_name.values()
    assert {m.name: (m.input_type.name, m.output_type.name) for m in ours.methods} == {
        m.name: (m.input_type.name, m.output_type.name) for m in theirs.methods
    }


def test_both_live_in_one_process_and_read_each_other() -> None:
    request = grpc_service_pb2.ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"\x01\x00"])
    request.inputs.add(name="IN", datatype="INT16", shape=[1]).parameters["x"].bool_param = True
    theirs = triton_pb2.ModelInferRequest.FromString(request.SerializeToString())
    assert type(theirs) is not type(request)
    assert grpc_service_pb2.ModelInferRequest.FromString(theirs.SerializeToString()) == request


def test_generated_modules_can_be_imported_only_once_per_process() -> None:
    """A second copy would need a second pool; Python's module cache is what prevents it."""
    assert importlib.import_module("headrace_protos.inference.grpc_service_pb2") is grpc_service_pb2
    assert "headrace_protos.private_pool" in sys.modules


def test_data_types_have_tritons_numbers() -> None:
    ours = dict(model_config_pb2.DataType.items())
    assert ours == dict(triton_config_pb2.DataType.items())
    assert model_config_pb2.TYPE_BF16 == 14
