"""The KServe wire for tests: calls, requests in few words, and what came back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np

from headrace_protos.inference import grpc_service_pb2 as pb

SERVICE = "inference.GRPCInferenceService"


class Wire:
    """A stub made of the descriptors: a method that the server lacks is missing in no test."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            kind = "stream_stream" if method.client_streaming else "unary_unary"
            call = getattr(channel, kind)(
                f"/{SERVICE}/{method.name}",
                request_serializer=lambda message: (
                    message if isinstance(message, bytes) else message.SerializeToString()
                ),
                response_deserializer=getattr(pb, method.output_type.name).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def raw_strings(*elements: bytes) -> bytes:
    return b"".join(len(element).to_bytes(4, "little") + element for element in elements)


def request(model: str = "vllm_model", id: str = "", **fields: Any) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(model_name=model, id=id, **fields)


def add(message: pb.ModelInferRequest, name: str, datatype: str, shape: Sequence[int], raw: bytes) -> None:
    """Adds an input by its raw bytes."""
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    message.raw_input_contents.append(raw)


ENOUGH = 64


def text(
    prompt: str | bytes = "hello",
    model: str = "vllm_model",
    id: str = "",
    sampling: str | None = f'{{"max_tokens": {ENOUGH}}}',
    **flags: bool,
) -> pb.ModelInferRequest:
    """A request in vLLM's tensors."""
    message = request(model, id)
    add(message, "text_input", "BYTES", [1], raw_strings(prompt if isinstance(prompt, bytes) else prompt.encode()))
    if sampling is not None:
        add(message, "sampling_parameters", "BYTES", [1], raw_strings(sampling.encode()))
    for name, value in flags.items():
        add(message, name, "BOOL", [1], bytes([value]))
    return message


def simple(id: str = "", first: int = 5, **fields: Any) -> pb.ModelInferRequest:
    """A request to `simple`: 16 times first + 1 and first - 1."""
    message = request("simple", id, **fields)
    for name, value in (("INPUT0", first), ("INPUT1", 1)):
        add(message, name, "INT32", [1, 16], np.full(16, value, "<i4").tobytes())
    return message


def strings_of(response: pb.ModelInferResponse, name: str = "text_output") -> list[str]:
    """The texts of an output, by its place, as clients find it."""
    index = [output.name for output in response.outputs].index(name)
    raw, found = response.raw_output_contents[index], []
    while raw:
        size = int.from_bytes(raw[:4], "little")
        found.append(raw[4 : 4 + size].decode())
        raw = raw[4 + size :]
    return found


def numbers_of(response: pb.ModelInferResponse, name: str) -> list[Any]:
    """The numbers of an output."""
    index = [output.name for output in response.outputs].index(name)
    kind = {"INT32": "<i4", "UINT32": "<u4", "FP32": "<f4", "INT8": "i1"}[response.outputs[index].datatype]
    return list(np.frombuffer(response.raw_output_contents[index], kind).tolist())


def is_final(response: pb.ModelInferResponse) -> bool:
    assert response.parameters["triton_final_response"].WhichOneof("parameter_choice") == "bool_param"
    return bool(response.parameters["triton_final_response"].bool_param)


async def stream(wire: Any, *messages: pb.ModelInferRequest, **options: Any) -> list[pb.ModelStreamInferResponse]:
    """Sends all requests, closes, and returns all that came."""
    call = wire.ModelStreamInfer(**options)
    for message in messages:
        await call.write(message)
    await call.done_writing()
    return [response async for response in call]
