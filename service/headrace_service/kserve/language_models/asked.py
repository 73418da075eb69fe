"""What both tensor conventions make of a request, and the means they share.

Owns the plain data between a convention (`vllm_tensors`, `tensorrt_llm_tensors`) and
`language_model`, and the reading of single values. A convention knows names and defaults; rules and
ranges of the values themselves are the public API's (`validation`), whose field paths are given the
caller's names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from headrace.v1 import generation_pb2
from headrace_request import limits
from headrace_service import errors
from headrace_service.errors import ServiceError
from headrace_service.kserve.messages import refusals
from headrace_service.kserve.messages.generation_wire import Render
from headrace_service.kserve.messages.infer_request import InferRequest
from headrace_service.kserve.messages.parameters import RequestParameters
from headrace_service.kserve.messages.signature import Signature
from headrace_service.kserve.messages.tensors import Tensor

_MAX_U32 = (1 << 32) - 1
_INT32 = range(-(1 << 31), 1 << 31)
_MAX_U64 = (1 << 64) - 1
_DETAILS = {
    "off": generation_pb2.TRACE_DETAIL_OFF,
    "array": generation_pb2.TRACE_DETAIL_ARRAY,
    "span": generation_pb2.TRACE_DETAIL_SPAN,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A generation that a request asks for.

    Attributes:
        spec: the generation.
        stream: whether responses come while it runs, or one at its end.
        prompt_first: whether the text begins with the prompt.
        outputs: names of the outputs of each response.
        names: what fields of GenerationSpec are called in the request.
    """

    spec: generation_pb2.GenerationSpec
    stream: bool
    prompt_first: bool
    outputs: frozenset[str]
    names: Mapping[str, str]


class Convention(Protocol):
    """A convention of tensors for generating text."""

    @property
    def signature(self) -> Signature:
        """The tensors that models of this convention take and give."""

    @property
    def text_shape(self) -> tuple[int, ...]:
        """Shape of text_output with one output."""

    def read(self, request: InferRequest) -> Asked:
        """Returns what a request asks for. Raises ServiceError."""

    def render(self, asked: Asked, token_text: Callable[[int], str]) -> Render:
        """Returns how responses are made; `token_text` is the text of one token alone."""


def apply(parameters: RequestParameters, spec: generation_pb2.GenerationSpec) -> None:
    """Puts the reserved parameters that concern a generation into its spec.

    Raises:
        ServiceError: UNIMPLEMENTED; sequences have no meaning here.
    """
    if parameters.sequence_id is not None or parameters.sequence_start or parameters.sequence_end:
        raise refusals.unsupported("sequence_id, sequence_start and sequence_end: this model keeps no sequences")
    if parameters.priority:
        # 1 is the highest there, the largest number here.
        spec.priority = limits.MAX_PRIORITY + 1 - parameters.priority
    if parameters.trace_detail:
        spec.trace_detail = _DETAILS[parameters.trace_detail]
    if parameters.timeout_us:
        spec.time_limit.FromMicroseconds(parameters.timeout_us)


def text_of(inputs: Mapping[str, Tensor], name: str) -> str:
    """Returns the one text of an input.

    Raises:
        ServiceError: INVALID_ARGUMENT; it has not one element, or is not UTF-8.
    """
    texts = texts_of(inputs, name)
    if len(texts) != 1:
        raise refusals.invalid(f"{name}: must have exactly 1 element, has {len(texts)}", name)
    return texts[0]


def texts_of(inputs: Mapping[str, Tensor], name: str) -> list[str]:
    """Returns the texts of an input. Raises ServiceError: INVALID_ARGUMENT; one is not UTF-8."""
    try:
        return [element.decode() for element in inputs[name].elements]
    except UnicodeDecodeError:
        raise refusals.invalid(f"{name}: must be UTF-8", name) from None


def number_of(inputs: Mapping[str, Tensor], name: str) -> Any:
    """Returns the one number, or truth value, of an input.

    Raises ServiceError: INVALID_ARGUMENT; it has not one element.
    """
    array = inputs[name].array
    assert array is not None
    if array.size != 1:
        raise refusals.invalid(f"{name}: must have exactly 1 element, has {array.size}", name)
    return array.item()


def flag(inputs: Mapping[str, Tensor], name: str, default: bool = False) -> bool:
    """Returns a truth value, if it is given."""
    return bool(number_of(inputs, name)) if name in inputs else default


def returns(request: InferRequest, name: str) -> bool:
    """Returns whether an output comes: its input says so, or it is listed and that says nothing."""
    return flag(request.inputs, name, default=request.named_outputs)


def unsigned(value: int, name: str, high: int = _MAX_U32) -> int:
    """Returns a number for a field that takes no sign. Raises ServiceError: INVALID_ARGUMENT."""
    if not 0 <= value <= high:
        raise errors.invalid_field(name, f"must be at least 0 and at most {high}")
    return value


def signed(value: int, name: str) -> int:
    """Returns a number for a field of 32 bits. Raises ServiceError: INVALID_ARGUMENT."""
    if value not in _INT32:
        raise errors.invalid_field(name, f"must be at least {_INT32.start} and at most {_INT32.stop - 1}")
    return value


def seed(value: int, name: str) -> int:
    """Returns a seed. Raises ServiceError: INVALID_ARGUMENT."""
    return unsigned(value, name, _MAX_U64)


def unbuilt(name: str) -> ServiceError:
    """Returns UNIMPLEMENTED for an option of the convention that this server does not have."""
    return refusals.unsupported(f"{name}: is not supported by this server")
