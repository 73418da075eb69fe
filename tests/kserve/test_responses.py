"""Responses joined from parts are what protobuf would have written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service.kserve.messages import responses
from headrace_service.kserve.messages.infer_request import InferRequest
from headrace_service.kserve.messages.parameters import RequestParameters
from headrace_service.kserve.messages.tensors import Tensor


def asked(model: str = "m", id: str = "7") -> InferRequest:
    return InferRequest(model, id, RequestParameters(), {}, frozenset({"text_output"}), False, {})


@given(
    st.text(st.characters(codec="utf-8"), max_size=300),
    st.booleans(),
    st.text(st.characters(codec="utf-8"), max_size=20),
)
def test_a_joined_response_reads_as_a_built_one(text: str, final: bool, id: str) -> None:
    request = asked(id=id)
    template = responses.ResponseTemplate(request, [("text_output", "BYTES", (1,))])
    joined = pb.ModelStreamInferResponse.FromString(template.fill_text(text.encode(), final))
    built = responses.whole(request, {"text_output": Tensor.strings([text.encode()])}, decoupled=True, final=final)
    assert joined == pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse.FromString(built))
    assert pb.ModelStreamInferResponse.FromString(responses.in_stream(built)) == joined


def test_a_failure_always_has_a_text_and_its_id() -> None:
    failure = pb.ModelStreamInferResponse.FromString(responses.failure("7", ""))
    assert failure.error_message and failure.infer_response.id == "7"


def test_outputs_that_were_not_wanted_are_left_out() -> None:
    outputs = {"text_output": Tensor.strings([b"a"]), "other": Tensor.strings([b"b"])}
    response = pb.ModelInferResponse.FromString(responses.whole(asked(), outputs))
    assert [output.name for output in response.outputs] == ["text_output"]
    assert len(response.raw_output_contents) == 1 and "triton_final_response" not in response.parameters
