"""TraceSetting and LogSettings.

Owns what of the protocol's settings means something here. What does not can be read, with the value
that is true, and set to that value alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace_facts.facts import Detail
from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service import errors, logs
from headrace_service.calls.call import Call
from headrace_service.kserve.messages import refusals
from headrace_service.kserve.messages.shared_document import Content, SharedDocument
from headrace_service.kserve.models import ModelDirectory
from headrace_service.tracing.tracer import Tracer

# Where there is no telemetry.
_NO_TRACE: Mapping[str, Sequence[str]] = {
    "trace_level": ["OFF"],
    "trace_rate": ["1000"],
    "trace_count": ["-1"],
    "log_frequency": ["0"],
    "trace_file": [""],
    "trace_mode": ["triton"],
}
_OFF, _TIMESTAMPS = "OFF", "TIMESTAMPS"
_LEVELS = ("log_info", "log_warning", "log_error")
_VERBOSE = "log_verbose_level"
# Neither can be changed while the server runs.
_FIXED = {"log_file": "", "log_format": "ISO8601"}
_MAX_VERBOSE = 1


class SettingsHandlers:
    """Handlers of the RPCs that read and change trace and log settings.

    Args:
        models: whose settings may be asked for.
        document: where all processes keep log settings.
        tracer: knows what is traced; None where there is no telemetry.
    """

    def __init__(self, models: ModelDirectory, document: SharedDocument, tracer: Tracer | None) -> None:
        self._models = models
        self._tracer = tracer
        self._document = document

    async def trace_setting(self, request: pb.TraceSettingRequest, call: Call) -> pb.TraceSettingResponse:
        """Says what is traced, after changing the level if that was asked for.

        It holds for all models.
        """
        if request.model_name:
            self._models.find(request.model_name, "", call.caller)
        now = _trace_settings(self._tracer)
        for name, setting in request.settings.items():
            _check_trace(name, list(setting.value), now)
        level = list(request.settings["trace_level"].value) if "trace_level" in request.settings else []
        if self._tracer is not None and level and level != now["trace_level"]:
            await self._tracer.set_detail(Detail.OFF if level == [_OFF] else Detail.ARRAY)
        response = pb.TraceSettingResponse()
        for name, values in _trace_settings(self._tracer).items():
            response.settings[name].value.extend(values)
        return response

    async def log_settings(self, request: pb.LogSettingsRequest, call: Call) -> pb.LogSettingsResponse:
        """Reads the levels that are logged, after changing those given: all or none."""
        changes = {name: _log_value(name, value) for name, value in request.settings.items()}
        changes = {name: value for name, value in changes.items() if name not in _FIXED}
        if changes:
            self._document.update(lambda content: content.update(changes))
        current = self._document.read()
        response = pb.LogSettingsResponse()
        for name in _LEVELS:
            response.settings[name].bool_param = current[name]
        response.settings[_VERBOSE].uint32_param = current[_VERBOSE]
        for name, text in _FIXED.items():
            response.settings[name].string_param = text
        return response


def initial_log_settings(log_level: str) -> Content:
    """Returns what is logged at a level, as the protocol's settings."""
    at = logs.Switches.at(log_level)
    return {"log_info": at.info, "log_warning": at.warning, "log_error": at.error, _VERBOSE: int(at.debug)}


def switches(content: Content) -> logs.Switches:
    """Returns the settings as the logs understand them."""
    return logs.Switches(
        debug=content[_VERBOSE] > 0,
        info=content["log_info"],
        warning=content["log_warning"],
        error=content["log_error"],
    )


def _trace_settings(tracer: Tracer | None) -> Mapping[str, Sequence[str]]:
    """Returns what is traced, in the protocol's words.

    OFF leaves spans of requests and their phases, TIMESTAMPS is the way of each token besides.
    """
    if tracer is None:
        return _NO_TRACE
    policy = tracer.policy
    # One in so many; 0: those alone whose callers ask for it.
    rate = round(1 / policy.sample_ratio) if policy.sample_ratio > 0 else 0
    return {
        **_NO_TRACE,
        "trace_level": [_OFF if policy.detail is Detail.OFF else _TIMESTAMPS],
        "trace_rate": [str(rate)],
        "trace_mode": ["opentelemetry"],
    }


def _check_trace(name: str, values: list[str], now: Mapping[str, Sequence[str]]) -> None:
    """Lets a setting pass that is as asked for already, or is the level.

    No value: back to what it was at the start, which is no request to change it.
    """
    if name not in now:
        raise errors.invalid_field(f"settings[{name[:64]}]", "is no trace setting")
    if not values or values == now[name]:
        return
    if now is _NO_TRACE:
        raise refusals.unsupported(f"settings[{name}]: telemetry is off, and it stays {now[name][0] or 'unset'!r}")
    if name != "trace_level":
        raise refusals.unsupported(
            f"settings[{name}]: can not be updated through the network protocol, and stays {now[name][0] or 'unset'!r}"
        )
    if values not in ([_OFF], [_TIMESTAMPS]):
        raise refusals.unsupported("settings[trace_level]: must be OFF or TIMESTAMPS")


def _log_value(name: str, value: pb.LogSettingsRequest.SettingValue) -> bool | int | str:
    kind = value.WhichOneof("parameter_choice")
    field = f"settings[{name[:64]}]"
    if name in _LEVELS:
        if kind != "bool_param":
            raise errors.invalid_field(field, "must be a bool")
        return value.bool_param
    if name == _VERBOSE:
        if kind != "uint32_param" or value.uint32_param > _MAX_VERBOSE:
            raise errors.invalid_field(field, f"must be a uint32, at most {_MAX_VERBOSE}")
        return value.uint32_param
    if name not in _FIXED:
        raise errors.invalid_field(field, "is no log setting")
    if kind != "string_param":
        raise errors.invalid_field(field, "must be a string")
    if value.string_param != _FIXED[name]:
        raise refusals.unsupported(
            f"{field}: can not be updated through the network protocol, and stays {_FIXED[name]!r}"
        )
    return value.string_param
