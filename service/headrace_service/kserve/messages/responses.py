"""Responses as bytes.

Owns the encoding of ModelInferResponse and ModelStreamInferResponse. Outputs go into
raw_output_contents, one entry each, because clients find them by position. The responses of a
generation that brings text alone differ in nothing but that text: `ResponseTemplate` has protobuf
encode the rest once, and joins each response from it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service.kserve.messages.infer_request import InferRequest
from headrace_service.kserve.messages.refusals import VERSION
from headrace_service.kserve.messages.tensors import Tensor
from headrace_service.messages import varint

FINAL = "triton_final_response"
# Field number and wire type of a field that begins with its length.
_RAW_TAG = bytes([pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | 2])
_RESPONSE_TAG = bytes([pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | 2])
MAX_ID_CHARS = 1024
_MAX_ERROR_CHARS = 1000

# An output's name, type and shape.
Output = tuple[str, str, Sequence[int]]


class ResponseTemplate:
    """The responses of one request, but for their elements.

    Args:
        request: whose responses they are.
        outputs: in the order of their elements.
        decoupled: whether responses say if they are the last.
    """

    __slots__ = ("_final", "_next")

    def __init__(self, request: InferRequest, outputs: Sequence[Output], *, decoupled: bool = True) -> None:
        message = _beginning(request)
        for name, datatype, shape in outputs:
            message.outputs.add(name=name, datatype=datatype, shape=shape)
        self._next = self._final = message.SerializeToString()
        if decoupled:
            self._next += pb.ModelInferResponse(parameters={FINAL: _FALSE}).SerializeToString()
            self._final += pb.ModelInferResponse(parameters={FINAL: _TRUE}).SerializeToString()

    def fill_text(self, text: bytes, final: bool) -> bytes:
        """Returns a ModelStreamInferResponse whose one output is a BYTES tensor of one element.

        The hot path.
        """
        size = len(text)
        body = (self._final if final else self._next) + _text_head(size) + text
        return _stream_head(len(body)) + body


def in_stream(response: bytes) -> bytes:
    """Returns a ModelInferResponse as a ModelStreamInferResponse."""
    return _stream_head(len(response)) + response


def whole(
    request: InferRequest, outputs: Mapping[str, Tensor], *, decoupled: bool = False, final: bool = True
) -> bytes:
    """Returns a ModelInferResponse of the wanted outputs.

    Those placed in shared memory are written there.

    Raises:
        ServiceError: INVALID_ARGUMENT; an output does not fit its place.
    """
    message = _beginning(request)
    if decoupled:
        message.parameters[FINAL].bool_param = final
    for name, tensor in outputs.items():
        if name in request.outputs:
            _add_output(message, request, name, tensor)
    return message.SerializeToString()


def empty_final(request: InferRequest) -> bytes:
    """Returns the ModelInferResponse that only says that nothing follows."""
    message = _beginning(request)
    message.parameters[FINAL].bool_param = True
    return message.SerializeToString()


def failure(request_id: str, text: str) -> bytes:
    """Returns the ModelStreamInferResponse of a request that failed."""
    # An empty text would read as success.
    message = pb.ModelStreamInferResponse(error_message=text[:_MAX_ERROR_CHARS] or "the request failed")
    # Whole, for its caller to know it again; of one that is refused for its length the beginning.
    message.infer_response.id = request_id[:MAX_ID_CHARS]
    return message.SerializeToString()


_TRUE, _FALSE = pb.InferParameter(bool_param=True), pb.InferParameter(bool_param=False)


def _beginning(request: InferRequest) -> pb.ModelInferResponse:
    return pb.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)


def _add_output(message: pb.ModelInferResponse, request: InferRequest, name: str, tensor: Tensor) -> None:
    output = message.outputs.add(name=name, datatype=tensor.datatype.name, shape=tensor.shape)
    placement = request.placements.get(name)
    data = tensor.raw()
    if placement is not None:
        placement.write(data)
        output.parameters["shared_memory_region"].string_param = placement.region
        output.parameters["shared_memory_byte_size"].int64_param = len(data)
        data = b""
    message.raw_output_contents.append(data)


@functools.lru_cache(4096)
def _text_head(size: int) -> bytes:
    """What comes before the one element of a BYTES tensor.

    The entry's length and the element's own.
    """
    return _RAW_TAG + varint.encode(size + 4) + size.to_bytes(4, "little")


@functools.lru_cache(4096)
def _stream_head(size: int) -> bytes:
    return _RESPONSE_TAG + varint.encode(size)
