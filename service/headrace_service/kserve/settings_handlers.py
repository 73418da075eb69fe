"""TraceSetting and LogSettings.

Owns what of the protocol's settings means something here. What does not can be read, with the value that is true, and set to that value alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service import errors, logs
from headrace_service.kserve import refusals
from headrace_service.kserve.models import ModelDirectory
from headrace_service.kserve.shared_document import Content, SharedDocument
from headrace_service.rpc_boundary import Call

_TRACE: Mapping[str, Sequence[str]] = {
    "trace_level": ["OFF"],
    "trace_rate": ["1000"],
    "trace_count": ["-1"],
    "log_frequency": ["0"],
    "trace_file": [""],
    "trace_mode": ["triton"],
}
_LEVELS = ("log_info", "log_warning", "log_error")
_VERBOSE = "log_verbose_level"
# Neither can be changed while the server runs.
_FIXED = {"log_file": "", "log_format": "ISO8601"}
_MAX_VERBOSE = 1


class SettingsHandlers:
    """The RPCs.

    Args:
        models: whose settings may be asked for.
        document: where all processes keep log settings.
    """

    def __init__(self, models: ModelDirectory, document: SharedDocument) -> None:
        self._models = models
        self._document = document

    async def trace_setting(self, request: pb.TraceSettingRequest, call: Call) -> pb.TraceSettingResponse:
        """Says that nothing is traced; refuses to change that."""
        if request.model_name:
            self._models.find(request.model_name, "", call.caller)
        for name, setting in request.settings.items():
            _check_trace(name, list(setting.value))
        response = pb.TraceSettingResponse()
        for name, values in _TRACE.items():
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


def _check_trace(name: str, values: list[str]) -> None:
    if name not in _TRACE:
        raise errors.invalid_field(f"settings[{name[:64]}]", "is no trace setting")
    # No value: back to what it was, which is what it is.
    if values and values != _TRACE[name]:
        raise refusals.unsupported(
            f"settings[{name}]: tracing is not built yet, and stays {_TRACE[name][0] or 'unset'!r}"
        )


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
