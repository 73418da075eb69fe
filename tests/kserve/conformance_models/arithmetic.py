"""Conformance models that add, subtract and repeat what they are given.

Simple, simple_int8, simple_string, simple_identity.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import numpy as np
from tests.kserve.conformance_models.model import ConformanceModel, Outputs

from headrace_service.kserve.messages import refusals
from headrace_service.kserve.messages.infer_request import InferRequest
from headrace_service.kserve.messages.signature import Signature, tensor
from headrace_service.kserve.messages.tensors import Array, Tensor

_MAX_BATCH = 8
_WIDTH = 16
# Sums of two such numbers fit 64 bits.
_MAX_DIGITS = 18
_DECIMAL = re.compile(rb"[+-]?[0-9]{1,%d}" % _MAX_DIGITS)


def models() -> list[ConformanceModel]:
    """Returns the models."""
    identity = Signature(
        inputs=(tensor("INPUT0", "BYTES", -1),), outputs=(tensor("OUTPUT0", "BYTES", -1),), max_batch_size=_MAX_BATCH
    )
    return [
        ConformanceModel("simple", _two_by_two("INT32"), _add_and_subtract),
        ConformanceModel("simple_int8", _two_by_two("INT8"), _add_and_subtract),
        ConformanceModel("simple_string", _two_by_two("BYTES"), _add_and_subtract_texts),
        ConformanceModel("simple_identity", identity, _repeat),
    ]


def _two_by_two(datatype: str) -> Signature:
    return Signature(
        inputs=(tensor("INPUT0", datatype, _WIDTH), tensor("INPUT1", datatype, _WIDTH)),
        outputs=(tensor("OUTPUT0", datatype, _WIDTH), tensor("OUTPUT1", datatype, _WIDTH)),
        max_batch_size=_MAX_BATCH,
    )


async def _add_and_subtract(request: InferRequest) -> AsyncIterator[tuple[Outputs, bool]]:
    first, second = request.inputs["INPUT0"].array, request.inputs["INPUT1"].array
    assert first is not None and second is not None
    yield {"OUTPUT0": Tensor.of(first + second), "OUTPUT1": Tensor.of(first - second)}, True


async def _add_and_subtract_texts(request: InferRequest) -> AsyncIterator[tuple[Outputs, bool]]:
    first, second = _integers(request, "INPUT0"), _integers(request, "INPUT1")
    yield {"OUTPUT0": _texts(first + second), "OUTPUT1": _texts(first - second)}, True


async def _repeat(request: InferRequest) -> AsyncIterator[tuple[Outputs, bool]]:
    yield {"OUTPUT0": request.inputs["INPUT0"]}, True


def _integers(request: InferRequest, name: str) -> Array:
    given = request.inputs[name]
    if not all(_DECIMAL.fullmatch(element) for element in given.elements):
        raise refusals.invalid(f"{name}: must be decimal numbers of at most {_MAX_DIGITS} digits", name)
    return np.array([int(element) for element in given.elements], np.int64).reshape(given.shape)


def _texts(values: Array) -> Tensor:
    return Tensor.strings([str(value).encode() for value in values.flatten()], values.shape)
