"""Tensors of a request as values, and values as tensors of a response.

Owns every rule about names, types, shapes and bytes: the raw form (little-endian, row-major,
unpadded; a BYTES element is its length in four bytes and then itself) and the form in `contents`.
Where bytes come from shared memory is `shared_memory`'s. Every refusal is INVALID_ARGUMENT in the
words that clients of Triton know.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service import errors
from headrace_service.kserve.messages import refusals
from headrace_service.kserve.messages.datatypes import BY_NAME, Datatype
from headrace_service.kserve.messages.signature import Signature, TensorSpec

Array = npt.NDArray[Any]
InputTensor = pb.ModelInferRequest.InferInputTensor
# Reads an input's bytes out of a registered region; None if the input is not in one.
ReadRegion = Callable[[InputTensor], bytes | None]

# What is taken apart element by element, in a few dozen milliseconds during which no other call is
# served.
MAX_STRINGS = 1 << 16
MAX_CONTENTS = 1 << 18
_MAX_RANK = 32
_MAX_LISTED_NAMES = 8
# Ranges of the elements that ride in a wider contents field.
_NARROW = {"INT8": (-(1 << 7), 1 << 7), "INT16": (-(1 << 15), 1 << 15), "UINT8": (0, 1 << 8), "UINT16": (0, 1 << 16)}


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """The value of an input or output.

    Attributes:
        datatype: of the elements.
        shape: batch dimension included.
        array: the elements of a number type; None for BYTES and BF16.
        elements: those of BYTES, in row-major order; one whole element of raw bytes for BF16.
    """

    datatype: Datatype
    shape: tuple[int, ...]
    array: Array | None = None
    elements: tuple[bytes, ...] = ()

    @staticmethod
    def of(array: Array) -> Tensor:
        """Returns an array of numbers as a tensor."""
        return Tensor(_DATATYPE_OF[array.dtype.newbyteorder("<")], array.shape, array=array)

    @staticmethod
    def strings(elements: Sequence[bytes], shape: Sequence[int] | None = None) -> Tensor:
        """Returns byte strings as a tensor, by default of one dimension."""
        return Tensor(BY_NAME["BYTES"], tuple(shape or (len(elements),)), elements=tuple(elements))

    def raw(self) -> bytes:
        """Returns the elements as raw_output_contents has them."""
        if self.array is not None:
            return np.ascontiguousarray(self.array, self.datatype.array).tobytes()
        if self.datatype.name == "BYTES":
            return encode_strings(self.elements)
        return b"".join(self.elements)


_DATATYPE_OF = {datatype.array: datatype for datatype in BY_NAME.values() if datatype.array is not None}


def encode_strings(elements: Iterable[bytes]) -> bytes:
    """Returns byte strings in the raw form."""
    return b"".join([part for element in elements for part in (len(element).to_bytes(4, "little"), element)])


class RequestTensors:
    """The inputs of one request, checked against its model.

    Args:
        request: as it came.
        name: of the model as the caller named it.
        signature: of the model.
        read_region: where inputs in shared memory are read.
    """

    def __init__(self, request: pb.ModelInferRequest, name: str, signature: Signature, read_region: ReadRegion) -> None:
        self._request = request
        self._name = name
        self._signature = signature
        self._read_region = read_region

    def decode(self) -> dict[str, Tensor]:
        """Returns the inputs by name.

        Raises:
            ServiceError: INVALID_ARGUMENT; the first rule that is broken.
        """
        self._check_names()
        batch_sizes = {tensor.name: self._check_form(tensor) for tensor in self._request.inputs}
        self._check_batch(batch_sizes)
        raw = iter(self._request.raw_input_contents)
        decoded = {tensor.name: self._decode(tensor, raw) for tensor in self._request.inputs}
        left = sum(1 for _ in raw)
        if left:
            raise self._refuse(
                "raw_input_contents",
                f"expected {len(self._request.raw_input_contents) - left} raw input contents for model '{self._name}', "
                f"got {len(self._request.raw_input_contents)}",
            )
        return decoded

    def requested_outputs(self) -> set[str]:
        """Returns the names of the outputs that are wanted: those listed, or all.

        Raises:
            ServiceError: INVALID_ARGUMENT; one is none of the model's, or listed twice.
        """
        names = [output.name for output in self._request.outputs]
        for name in names:
            if self._signature.output(name) is None:
                raise self._refuse(
                    "outputs", f"unexpected inference output {errors.echo(name)} for model '{self._name}'"
                )
        for name in names:
            if names.count(name) > 1:
                raise self._refuse("outputs", f"output '{name}' already exists in request for model '{self._name}'")
        return set(names) or {output.name for output in self._signature.outputs}

    # -- names, types, shapes

    def _check_names(self) -> None:
        given = [tensor.name for tensor in self._request.inputs]
        for name in given:
            if self._signature.input(name) is None:
                raise self._refuse("inputs", f"unexpected inference input {errors.echo(name)} for model '{self._name}'")
            if given.count(name) > 1:
                raise self._refuse("inputs", f"input '{name}' already exists in request for model '{self._name}'")
        missing = [spec.name for spec in self._signature.inputs if not spec.optional and spec.name not in given]
        if missing:
            raise self._refuse("inputs", self._missing_text(given, missing))

    def _missing_text(self, given: list[str], missing: list[str]) -> str:
        num_required = sum(not spec.optional for spec in self._signature.inputs)
        at_least = "at least " if num_required < len(self._signature.inputs) else ""
        return (
            f"expected {at_least}{num_required} inputs but got {len(given)} inputs for model '{self._name}'. "
            f"Got input(s) {_listed(given)}, but missing required input(s) {_listed(missing)}. "
            "Please provide all required input(s)."
        )

    def _check_form(self, tensor: InputTensor) -> int | None:
        """Checks type and shape; returns the batch size of a model that has one."""
        spec = self._signature.input(tensor.name)
        assert spec is not None
        if tensor.datatype != spec.datatype.name:
            known = "" if tensor.datatype in BY_NAME else ", which is no data-type,"
            raise self._refuse(
                tensor.name,
                f"inference input '{tensor.name}' data-type is {errors.echo(tensor.datatype)}{known} "
                f"but model '{self._name}' expects '{spec.datatype.name}'",
            )
        return self._check_shape(tensor, spec)

    def _check_shape(self, tensor: InputTensor, spec: TensorSpec) -> int | None:
        shape = tensor.shape[:_MAX_RANK]
        batched = self._signature.max_batch_size > 0
        if len(tensor.shape) > _MAX_RANK or not spec.fits(shape[1:] if batched else shape):
            raise self._unexpected_shape(tensor, spec)
        if not batched:
            return None
        if shape[0] < 1:
            raise self._unexpected_shape(tensor, spec)
        if shape[0] > self._signature.max_batch_size:
            raise self._refuse(
                tensor.name,
                f"inference request batch-size must be <= {self._signature.max_batch_size} for '{self._name}'",
            )
        return int(shape[0])

    def _check_batch(self, batch_sizes: dict[str, int | None]) -> None:
        first = next(iter(batch_sizes.values()), None)
        for name, size in batch_sizes.items():
            if size != first:
                raise self._refuse(
                    name,
                    f"input '{name}' batch size does not match other inputs for '{self._name}': {size}, not {first}",
                )

    def _unexpected_shape(self, tensor: InputTensor, spec: TensorSpec) -> errors.ServiceError:
        expected = _shape_text(self._signature.shape_of(spec))
        return self._refuse(
            tensor.name,
            f"unexpected shape for input '{tensor.name}' for model '{self._name}'. "
            f"Expected {expected}, got {_shape_text(tensor.shape)}.",
        )

    # -- elements

    def _decode(self, tensor: InputTensor, raw: Iterable[bytes]) -> Tensor:
        datatype = BY_NAME[tensor.datatype]
        has_contents = tensor.HasField("contents")
        region = self._read_region(tensor)
        if region is not None:
            if has_contents:
                raise self._refuse(
                    tensor.name,
                    f"contents field must not be specified for input '{tensor.name}' in shared memory "
                    f"for model '{self._name}'",
                )
            return self._from_raw(tensor, datatype, region)
        if self._request.raw_input_contents:
            if has_contents:
                raise self._refuse(
                    tensor.name,
                    "contents field must not be specified when using raw_input_contents for "
                    f"'{tensor.name}' for model '{self._name}'",
                )
            return self._from_raw(tensor, datatype, self._next_raw(tensor, raw))
        return self._from_contents(tensor, datatype)

    def _next_raw(self, tensor: InputTensor, raw: Iterable[bytes]) -> bytes:
        for data in raw:
            return data
        raise self._no_data(tensor)

    def _no_data(self, tensor: InputTensor) -> errors.ServiceError:
        return self._refuse(
            tensor.name, f"unable to find data for input tensor '{tensor.name}' for model '{self._name}' in request."
        )

    def _from_raw(self, tensor: InputTensor, datatype: Datatype, data: bytes) -> Tensor:
        shape = tuple(tensor.shape)
        count = math.prod(shape)
        if datatype.name == "BYTES":
            return Tensor(datatype, shape, elements=self._decode_strings(tensor, data, count))
        expected = count * datatype.size
        if len(data) != expected:
            raise self._wrong_size(tensor, expected, len(data))
        if datatype.array is None:
            return Tensor(datatype, shape, elements=(data,))
        return Tensor(datatype, shape, array=np.frombuffer(data, datatype.array).reshape(shape))

    def _wrong_size(self, tensor: InputTensor, expected: int, got: int) -> errors.ServiceError:
        return self._refuse(
            tensor.name,
            f"input byte size mismatch for input '{tensor.name}' for model '{self._name}'. "
            f"Expected {expected}, got {got}",
        )

    def _decode_strings(self, tensor: InputTensor, data: bytes, count: int) -> tuple[bytes, ...]:
        self._check_count(tensor, count, MAX_STRINGS)
        elements: list[bytes] = []
        at = 0
        while at < len(data) and len(elements) < count:
            if len(data) - at < 4:
                raise self._refuse(
                    tensor.name,
                    f"incomplete string length indicator for inference input '{tensor.name}', "
                    f"expecting 4 bytes but only {len(data) - at} bytes available",
                )
            (size,) = struct.unpack_from("<I", data, at)
            at += 4
            if size > len(data) - at:
                raise self._refuse(
                    tensor.name,
                    f"incomplete string data for inference input '{tensor.name}', "
                    f"expecting string of length {size} but only {len(data) - at} bytes available",
                )
            elements.append(data[at : at + size])
            at += size
        if at < len(data) or len(elements) < count:
            got = f"more than {count}" if at < len(data) else str(len(elements))
            raise self._refuse(
                tensor.name,
                f"unexpected number of string elements {got} for inference input '{tensor.name}', expecting {count}",
            )
        return tuple(elements)

    def _from_contents(self, tensor: InputTensor, datatype: Datatype) -> Tensor:
        filled = [field.name for field, _ in tensor.contents.ListFields()]
        shape = tuple(tensor.shape)
        count = math.prod(shape)
        if not tensor.HasField("contents") or (not filled and count > 0):
            raise self._no_data(tensor)
        if len(filled) > 1:
            raise self._refuse(
                tensor.name,
                f"binary data was already supplied for input '{tensor.name}' for model '{self._name}': "
                f"only one of {', '.join(filled)} may be set",
            )
        if filled and filled[0] != datatype.contents:
            raise self._unexpected_contents(tensor, datatype, filled[0])
        self._check_count(tensor, count, MAX_STRINGS if datatype.size == 0 else MAX_CONTENTS)
        values = getattr(tensor.contents, filled[0]) if filled else ()
        if len(values) != count:
            if datatype.size == 0:
                raise self._refuse(
                    tensor.name,
                    f"unexpected number of string elements {len(values)} for inference input '{tensor.name}', "
                    f"expecting {count}",
                )
            raise self._wrong_size(tensor, count * datatype.size, len(values) * datatype.size)
        if datatype.size == 0:
            return Tensor(datatype, shape, elements=tuple(values))
        self._check_range(tensor, datatype, values)
        return Tensor(datatype, shape, array=np.array(values, dtype=datatype.array).reshape(shape))

    def _check_count(self, tensor: InputTensor, count: int, limit: int) -> None:
        if count > limit:
            raise self._refuse(
                tensor.name,
                f"input '{tensor.name}' for model '{self._name}' has {count} elements, must have at most {limit}",
            )

    def _unexpected_contents(self, tensor: InputTensor, datatype: Datatype, field: str) -> errors.ServiceError:
        if datatype.contents is None:
            rule = f"{datatype.name} data must be given in raw_input_contents"
        else:
            rule = f"{datatype.name} data must be given in {datatype.contents}, not {field}"
        return self._refuse(
            tensor.name,
            f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{self._name}': {rule}",
        )

    def _check_range(self, tensor: InputTensor, datatype: Datatype, values: Sequence[int]) -> None:
        if datatype.name not in _NARROW:
            return
        low, high = _NARROW[datatype.name]
        if len(values) and not (low <= min(values) and max(values) < high):
            raise self._refuse(
                tensor.name,
                f"unexpected value for input '{tensor.name}' for model '{self._name}': "
                f"{datatype.name} elements must be at least {low} and at most {high - 1}",
            )

    def _refuse(self, field: str, text: str) -> errors.ServiceError:
        of_request = f"[request id: {self._request.id[:64]}] " if self._request.id else ""
        return refusals.invalid(of_request + text, field)


def _listed(names: list[str]) -> str:
    shown = [repr(name[:32]) for name in names[:_MAX_LISTED_NAMES]]
    return f"[{', '.join(shown + ['...'] if len(names) > _MAX_LISTED_NAMES else shown)}]"


def _shape_text(shape: Sequence[int]) -> str:
    return f"[{','.join(str(size) for size in shape[:8])}{',...' if len(shape) > 8 else ''}]"
