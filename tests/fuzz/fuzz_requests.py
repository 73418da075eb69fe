"""A coverage-guided byte fuzzer over everything that reads a caller's bytes.

That is what the engine does not see: parsing, validation, tensors, both tensor conventions.

    python -m tests.fuzz.fuzz_requests FOLDER -max_total_time=60      # the folder keeps the inputs
                                                                      that found new code, from
                                                                      valid requests on

What must hold: a request is taken, or refused by a ServiceError whose status callers may see and
whose text is short. Anything else is a crash, and atheris prints the bytes. The first byte of an
input chooses the reader.
"""

from __future__ import annotations

import pathlib
import sys

import atheris

with atheris.instrument_imports(include=["headrace_service", "google.protobuf"]):
    from headrace.v1 import generation_pb2, inference_pb2
    from headrace_protos.inference import grpc_service_pb2
    from headrace_request.rule_kinds import Bounds
    from headrace_request.sampling import Sampling
    from headrace_service import errors, validation
    from headrace_service.auth.caller import EVERYBODY
    from headrace_service.generations import conversation, engine_request
    from headrace_service.kserve.language_models.asked import Convention
    from headrace_service.kserve.language_models.tensorrt_llm_tensors import TensorRtLlmTensors
    from headrace_service.kserve.language_models.vllm_tensors import VllmTensors
    from headrace_service.kserve.messages import infer_request
    from headrace_service.kserve.messages.shared_document import SharedDocument
    from headrace_service.kserve.messages.shared_memory import SharedMemoryRegions
    from headrace_service.messages import parsing
    from headrace_service.resolved_spec import ModelFacts

_FORBIDDEN = {"UNKNOWN", "INTERNAL", "DATA_LOSS"}
_FACTS = ModelFacts("model", Bounds(1000, 2048, 16), 1 << 16, Sampling())
_CONVENTIONS: tuple[Convention, ...] = (VllmTensors(), TensorRtLlmTensors())
_REGIONS = SharedMemoryRegions(enabled=False, document=SharedDocument(None, {})).of(EVERYBODY)


def _generate(data: bytes) -> None:
    spec = parsing.Unparsed(inference_pb2.GenerateRequest, data).parse().spec
    resolved = validation.resolve(spec, _FACTS)
    engine_request.resolve_max_tokens(resolved, 10, _FACTS.bounds, "spec.text")


def _spec(data: bytes) -> None:
    validation.resolve(parsing.Unparsed(generation_pb2.GenerationSpec, data).parse(), _FACTS)


def _chat(data: bytes) -> None:
    request = parsing.Unparsed(inference_pb2.ChatRequest, data).parse()
    conversation.check_conversation(request.messages, request.continue_last_message)


def _infer(data: bytes) -> None:
    message = parsing.Unparsed(grpc_service_pb2.ModelInferRequest, data[1:]).parse()
    _read(message, _CONVENTIONS[data[0] % 2] if data else _CONVENTIONS[0])


def _sampling_parameters(data: bytes) -> None:
    """Sampling parameters, the JSON of vLLM's backend, in an otherwise valid request."""
    message = grpc_service_pb2.ModelInferRequest(model_name="model")
    for name, value in (("text_input", b"hi"), ("sampling_parameters", data)):
        message.inputs.add(name=name, datatype="BYTES", shape=[1])
        message.raw_input_contents.append(len(value).to_bytes(4, "little") + value)
    _read(message, _CONVENTIONS[0])


def _strings(data: bytes) -> None:
    """The elements of a BYTES tensor."""
    message = grpc_service_pb2.ModelInferRequest(model_name="model", raw_input_contents=[data])
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    _read(message, _CONVENTIONS[0])


def _read(message: grpc_service_pb2.ModelInferRequest, convention: Convention) -> None:
    request = infer_request.parse(message, convention.signature, _REGIONS)
    validation.resolve(convention.read(request).spec, _FACTS)


_READERS = (_generate, _spec, _chat, _infer, _sampling_parameters, _strings)


def read(data: bytes) -> None:
    """One input. Raises whatever must not happen."""
    if not data:
        return
    try:
        _READERS[data[0] % len(_READERS)](data[1:])
    except errors.ServiceError as error:
        assert error.code.name not in _FORBIDDEN, error.code
        assert len(errors.to_status(error).SerializeToString()) <= 1024


def seeds() -> list[bytes]:
    """A valid request for each reader."""
    stop = generation_pb2.StopConditions(strings=["end"], token_ids=[7], max_tokens=5, bad_words=["no"])
    sampling = generation_pb2.SamplingParameters(temperature=0.5, top_k=5, seed=1, logit_bias={3: 1.0})
    spec = generation_pb2.GenerationSpec(text="hi", sampling=sampling, stop=stop, n=2, logprobs=1)
    part = inference_pb2.Part(text="hi")
    chat = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role=2, parts=[part])])
    infer = grpc_service_pb2.ModelInferRequest(model_name="model", id="1")
    infer.parameters["priority"].uint64_param = 1
    infer.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hi")
    infer.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    requests = [inference_pb2.GenerateRequest(spec=spec), spec, chat, infer]
    data = [request.SerializeToString() for request in requests]
    data[3] = b"\0" + data[3]
    data += [b'{"max_tokens": "5", "stop": ["a"], "logit_bias": {"3": 1}, "temperature": 0.5}', b"\2\0\0\0hi"]
    return [bytes([number]) + seed for number, seed in enumerate(data)]


if __name__ == "__main__":
    for folder in (pathlib.Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")):
        folder.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds()):
            (folder / f"seed-{number}").write_bytes(seed)
    atheris.Setup(sys.argv, read)
    atheris.Fuzz()
