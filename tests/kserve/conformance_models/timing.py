"""Conformance models that take their time: repeat_int32, custom_identity_int32."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
from tests.kserve.conformance_models.model import ConformanceModel, Outputs

from headrace_service.kserve.messages import refusals
from headrace_service.kserve.messages.infer_request import InferRequest
from headrace_service.kserve.messages.signature import Signature, tensor
from headrace_service.kserve.messages.tensors import Tensor

_IDENTITY_DELAY_S = 10.0
_MAX_DELAY_MS = 600_000


def models() -> list[ConformanceModel]:
    """Returns the models."""
    repeat = Signature(
        inputs=(tensor("IN", "INT32", -1), tensor("DELAY", "UINT32", -1), tensor("WAIT", "UINT32", 1)),
        outputs=(tensor("OUT", "INT32", 1), tensor("IDX", "UINT32", 1)),
        decoupled=True,
    )
    identity = Signature(
        inputs=(tensor("INPUT0", "INT32", -1),), outputs=(tensor("OUTPUT0", "INT32", -1),), max_batch_size=8
    )
    return [
        ConformanceModel("repeat_int32", repeat, _repeat),
        ConformanceModel("custom_identity_int32", identity, _identity),
    ]


async def _repeat(request: InferRequest) -> AsyncIterator[tuple[Outputs, bool]]:
    """One response per element of IN, each after its DELAY in milliseconds.

    WAIT is for how long others have to wait: here, nobody has.
    """
    values, delays = request.inputs["IN"].array, request.inputs["DELAY"].array
    assert values is not None and delays is not None
    if values.size != delays.size:
        raise refusals.invalid(
            f"expected IN and DELAY shape to match, got [{values.size}] and [{delays.size}]", "DELAY"
        )
    if delays.size and delays.max() > _MAX_DELAY_MS:
        raise refusals.invalid(f"DELAY: must be at most {_MAX_DELAY_MS} ms", "DELAY")
    for index, (value, delay) in enumerate(zip(values, delays, strict=True)):
        await asyncio.sleep(float(delay) / 1000)
        outputs = {"OUT": Tensor.of(np.array([value], np.int32)), "IDX": Tensor.of(np.array([index], np.uint32))}
        yield outputs, index == values.size - 1


async def _identity(request: InferRequest) -> AsyncIterator[tuple[Outputs, bool]]:
    await asyncio.sleep(_IDENTITY_DELAY_S)
    yield {"OUTPUT0": request.inputs["INPUT0"]}, True
