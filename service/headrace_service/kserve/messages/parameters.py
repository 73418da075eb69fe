"""Parameters of a request: those with a meaning of their own, and the model's.

Owns the reserved keys, their types and ranges. What is neither reserved nor a value that a model
may take is refused; which keys a model knows is the model's business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_request import limits
from headrace_service import errors
from headrace_service.kserve.messages import refusals

Value = bool | int | str | float
_Parameters = Mapping[str, pb.InferParameter]
_MAX_TIMEOUT_US = limits.MAX_TIME_LIMIT_S * 10**6
_MAX_PARAMETERS = 256
_MAX_KEY_CHARS = 256
_EMPTY_FINAL = "triton_enable_empty_final_response"
_TRACE_CONTEXT = ("traceparent", "tracestate")
_TRACE_DETAIL = "trace_detail"
_TRACE_DETAILS = ("off", "array", "span")
# Of the HTTP side of the protocol: nothing can come of them here.
_OF_HTTP = ("headers", "binary_data_output")
_NAMES = {
    "bool_param": "bool",
    "int64_param": "int64",
    "uint64_param": "uint64",
    "string_param": "string",
    "double_param": "double",
}


@dataclasses.dataclass(frozen=True, slots=True)
class RequestParameters:
    """A request's parameters.

    Attributes:
        sequence_id: of the sequence it belongs to; None: none.
        sequence_start: whether it begins the sequence.
        sequence_end: whether it ends it.
        priority: 1 to 100, 1 being the highest; 0: none was asked for.
        timeout_us: most time it may take, microseconds; 0: no limit of its own.
        empty_final: whether a response without outputs may tell that the one before it was the
            last.
        traceparent: W3C trace context of this one request; "": that of its call.
        tracestate: W3C trace state, with traceparent.
        trace_detail: how much of its tokens is traced, "off", "array" or "span"; "": the server's
            setting.
        custom: the model's own.
    """

    sequence_id: int | str | None = None
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    timeout_us: int = 0
    empty_final: bool = False
    traceparent: str = ""
    tracestate: str = ""
    trace_detail: str = ""
    custom: Mapping[str, Value] = dataclasses.field(default_factory=dict)


def parse(parameters: _Parameters) -> RequestParameters:
    """Returns a request's parameters.

    Raises:
        ServiceError: INVALID_ARGUMENT; a reserved one has a wrong type or value, or a custom one a
            type that models do not take.
    """
    if not parameters:
        return _NONE
    if len(parameters) > _MAX_PARAMETERS:
        raise refusals.invalid(f"parameters: must have at most {_MAX_PARAMETERS} entries", "parameters")
    found: dict[str, Any] = {}
    custom: dict[str, Value] = {}
    for key, parameter in parameters.items():
        _parse_one(key, parameter, found, custom)
    return RequestParameters(**found, custom=custom)


_NONE = RequestParameters()


def _parse_one(key: str, parameter: pb.InferParameter, found: dict[str, Any], custom: dict[str, Value]) -> None:
    if key == "sequence_id":
        # Zero and the empty string say: no sequence.
        found[key] = _typed(key, parameter, "int64_param", "uint64_param", "string_param") or None
    elif key in ("sequence_start", "sequence_end"):
        found[key] = _typed(key, parameter, "bool_param")
    elif key == "priority":
        found[key] = _in_range(key, _typed(key, parameter, "uint64_param", "int64_param"), limits.MAX_PRIORITY)
    elif key == "timeout":
        found["timeout_us"] = _in_range(key, _typed(key, parameter, "int64_param"), _MAX_TIMEOUT_US)
    elif key == _EMPTY_FINAL:
        found["empty_final"] = _typed(key, parameter, "bool_param")
    elif key in _TRACE_CONTEXT:
        found[key] = _typed(key, parameter, "string_param")
    elif key == _TRACE_DETAIL:
        found[key] = _one_of(key, _typed(key, parameter, "string_param"), _TRACE_DETAILS)
    elif key.startswith("triton_") or key in _OF_HTTP:
        raise refusals.invalid(f"parameter {errors.echo(key)} is reserved and not supported here", _field(key))
    else:
        custom[key] = _typed(key, parameter, "bool_param", "int64_param", "string_param", "double_param")


def _typed(key: str, parameter: pb.InferParameter, *kinds: str) -> Value:
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in kinds:
        expected = " or ".join(_NAMES[wanted] for wanted in kinds)
        got = _NAMES[kind] if kind is not None else "nothing"
        raise refusals.invalid(
            f"invalid value type for {errors.echo(key)} parameter, expected {expected}, got {got}", _field(key)
        )
    value: Value = getattr(parameter, kind)
    return value


def _in_range(key: str, value: Value, high: int) -> Value:
    if not 0 <= int(value) <= high:
        raise refusals.invalid(f"parameter '{key}' must be at least 0 and at most {high}", _field(key))
    return value


def _one_of(key: str, value: Value, allowed: Sequence[str]) -> Value:
    if value not in allowed:
        raise refusals.invalid(f"parameter '{key}' must be one of {', '.join(allowed)}", _field(key))
    return value


def _field(key: str) -> str:
    return f"parameters[{key[:_MAX_KEY_CHARS]}]"
