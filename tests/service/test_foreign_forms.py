"""The form of outputs by OpenAI's and vLLM's names becomes the public API's."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from headrace.v1 import generation_pb2
from headrace_service import foreign_forms
from headrace_service.errors import ServiceError
from headrace_service.kserve.language_models import vllm_sampling
from headrace_service.openai.requests import generation_spec
from headrace_service.openai.requests.shared_fields import SharedFields

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
FORMS: list[tuple[str, Any, dict[str, Any]]] = [
    ("json", SCHEMA, {"json_schema": SCHEMA}),
    ("json", json.dumps(SCHEMA), {"json_schema": SCHEMA}),
    ("regex", "a+", {"regex": "a+"}),
    ("choice", ["a", "b"], {"choice": {"texts": ["a", "b"]}}),
    ("grammar", "start: A", {"grammar": "start: A"}),
    ("json_object", True, {"json_object": {}}),
    (
        "structural_tag",
        TAG,
        {"structural_tags": {"tags": [{"trigger": "<f", "begin": "<f>", "json_schema": SCHEMA, "end": "</f>"}]}},
    ),
]


def plain(output: generation_pb2.StructuredOutput) -> dict[str, Any]:
    """The message as JSON, with schemas as what they mean."""
    form = output.WhichOneof("form")
    if form == "json_schema":
        return {form: json.loads(output.json_schema)}
    if form == "structural_tags":
        tags = [{f.name: getattr(tag, f.name) for f in tag.DESCRIPTOR.fields} for tag in output.structural_tags.tags]
        return {form: {"tags": [tag | {"json_schema": json.loads(tag["json_schema"])} for tag in tags]}}
    if form == "choice":
        return {form: {"texts": list(output.choice.texts)}}
    return {form: {}} if form == "json_object" else {str(form): getattr(output, str(form))}


@pytest.mark.parametrize(("name", "value", "expected"), FORMS)
def test_every_form_of_vllm_arrives_by_every_name(name: str, value: Any, expected: dict[str, Any]) -> None:
    spec = generation_spec.spec_of(SharedFields(structured_outputs={name: value, "regex" + "x": None}), None, "")
    assert plain(spec.structured_output) == expected
    for field in ("guided_decoding", "structured_outputs"):
        for given in ({name: value}, json.dumps({name: value})):
            spec = generation_pb2.GenerationSpec()
            vllm_sampling.fill(spec, vllm_sampling.in_tensor({field: given}))
            assert plain(spec.structured_output) == expected
    if name in ("json", "regex", "choice", "grammar"):
        fields: dict[str, Any] = {f"guided_{name}": value}
        assert plain(generation_spec.spec_of(SharedFields(**fields), None, "").structured_output) == expected
        spec = generation_pb2.GenerationSpec()
        vllm_sampling.fill(spec, vllm_sampling.in_tensor(fields))
        assert plain(spec.structured_output) == expected


def test_response_formats_of_openai_arrive() -> None:
    for given, expected in (
        ({"type": "json_object"}, {"json_object": {}}),
        ({"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
            {"json_schema": SCHEMA}),
        ({"type": "structural_tag", **TAG}, FORMS[-1][2]),
    ):  # fmt: skip
        spec = generation_spec.spec_of(SharedFields(response_format=given), None, "")
        assert plain(spec.structured_output) == expected
    text = generation_spec.spec_of(SharedFields(response_format={"type": "text"}), None, "")
    assert not text.HasField("structured_output")


@pytest.mark.parametrize(
    ("given", "code", "named"),
    [
        ({"regex": "a", "choice": ["a"]}, grpc.StatusCode.INVALID_ARGUMENT, "must name one form"),
        ({"regex": 1}, grpc.StatusCode.INVALID_ARGUMENT, "f.regex: must be a string"),
        ({"choice": "ab"}, grpc.StatusCode.INVALID_ARGUMENT, "f.choice: must be a list of strings"),
        ({"json": 5}, grpc.StatusCode.INVALID_ARGUMENT, "f.json: must be a JSON Schema"),
        ({"json_object": 1}, grpc.StatusCode.INVALID_ARGUMENT, "f.json_object: must be true or false"),
        ({"structural_tag": "{"}, grpc.StatusCode.INVALID_ARGUMENT, "f.structural_tag: must be JSON"),
        ({"structural_tag": {**TAG, "triggers": ["x"]}}, grpc.StatusCode.INVALID_ARGUMENT, "structures[0].begin"),
        ({"yaml": "a"}, grpc.StatusCode.UNIMPLEMENTED, "f.yaml: is not supported"),
    ],
)
def test_what_is_no_form_is_refused_by_name(given: dict[str, Any], code: grpc.StatusCode, named: str) -> None:
    with pytest.raises(ServiceError) as refused:
        foreign_forms.read_vllm(given, "f")
    assert refused.value.code is code and named in str(refused.value)
