"""Conformance models that keep state between requests.

Simple_sequence, simple_dyna_sequence, simple_string_dyna_sequence.

Owns the sequences that are open. They live in the process that a client's connection reaches; a
sequence is for one connection.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
from tests.kserve.conformance_models.model import ConformanceModel, Outputs

from headrace_service import errors
from headrace_service.kserve.messages import refusals
from headrace_service.kserve.messages.infer_request import InferRequest
from headrace_service.kserve.messages.signature import Signature, tensor
from headrace_service.kserve.messages.tensors import Array, Tensor

_MAX_SEQUENCES = 1024
_IDLE_S = 60.0
# All that 64 bits hold. What is added is an INT32 in the end, as in Triton: the low bits.
_MAX_DIGITS = 20
_DECIMAL = re.compile(f"-?[0-9]{{1,{_MAX_DIGITS}}}")
_LOW_BITS = (1 << 32) - 1
_SIGNATURE = Signature(
    inputs=(tensor("INPUT", "INT32", 1),),
    outputs=(tensor("OUTPUT", "INT32", 1),),
    max_batch_size=8,
    keeps_sequences=True,
)


class Sequences:
    """The open sequences of one model, each with its last output."""

    def __init__(self) -> None:
        self._last: dict[int | str, tuple[Array, float]] = {}

    def before(self, request: InferRequest) -> Array | None:
        """Returns the output before this request's; None for the first.

        Raises:
            ServiceError: INVALID_ARGUMENT, the request is in no sequence or in one that has not
                begun; RESOURCE_EXHAUSTED.
        """
        parameters, model = request.parameters, request.model_name
        if parameters.sequence_id is None:
            raise refusals.invalid(
                f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID",
                "sequence_id",
            )
        self._forget_idle()
        if parameters.sequence_start:
            if len(self._last) >= _MAX_SEQUENCES:
                raise errors.exhausted(f"{_MAX_SEQUENCES} sequences are open, the most of model '{model}'", _IDLE_S)
            return None
        if parameters.sequence_id not in self._last:
            raise refusals.invalid(
                f"inference request for sequence {errors.echo(str(parameters.sequence_id))} to model '{model}' must "
                "specify "
                "the START flag on the first request of the sequence",
                "sequence_start",
            )
        return self._last[parameters.sequence_id][0]

    def after(self, request: InferRequest, output: Array) -> None:
        """Keeps a request's output, unless it ends its sequence."""
        sequence_id = request.parameters.sequence_id
        assert sequence_id is not None
        if request.parameters.sequence_end:
            self._last.pop(sequence_id, None)
        else:
            self._last[sequence_id] = (output, time.monotonic())

    def _forget_idle(self) -> None:
        idle_before = time.monotonic() - _IDLE_S
        for sequence_id in [key for key, (_, used) in self._last.items() if used < idle_before]:
            del self._last[sequence_id]


# Makes a request's output of its input and the output before it.
_Step = Callable[[InferRequest, Array, Array | None], Array]


def models() -> list[ConformanceModel]:
    """Returns the models."""
    return [
        _model("simple_sequence", _add_start),
        _model("simple_dyna_sequence", lambda request, value, last: _add_id(request, _add_start(request, value, last))),
        _model("simple_string_dyna_sequence", lambda request, value, last: _add_id(request, _add_last(value, last))),
    ]


def _model(name: str, step: _Step) -> ConformanceModel:
    sequences = Sequences()

    async def compute(request: InferRequest) -> AsyncIterator[tuple[Outputs, bool]]:
        last = sequences.before(request)
        value = request.inputs["INPUT"].array
        assert value is not None
        if last is not None and last.shape != value.shape:
            raise refusals.invalid("INPUT: must have the same shape throughout a sequence", "INPUT")
        output = step(request, value.astype(np.int64), last).astype(np.int32)
        sequences.after(request, output)
        yield {"OUTPUT": Tensor.of(output)}, True

    return ConformanceModel(name, _SIGNATURE, compute)


def _add_start(request: InferRequest, value: Array, last: Array | None) -> Array:
    return value + int(request.parameters.sequence_start)


def _add_last(value: Array, last: Array | None) -> Array:
    return value if last is None else value + last


def _add_id(request: InferRequest, value: Array) -> Array:
    if not request.parameters.sequence_end:
        return value
    sequence_id = str(request.parameters.sequence_id)
    if not _DECIMAL.fullmatch(sequence_id):
        raise refusals.invalid(
            f"sequence_id: this model wants a decimal number of at most {_MAX_DIGITS} digits", "sequence_id"
        )
    return value + (int(sequence_id) & _LOW_BITS)
