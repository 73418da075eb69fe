"""The functions that a conversation offers its model, checked, as templates and formats read them.

Owns the rules of tools, of the choice among them, and of the calls and results that come back in
messages. Which format the model's calls have is `output_forms`'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from headrace.v1 import inference_pb2
from headrace_request import limits
from headrace_request.structured_rules import path_beyond
from headrace_service import errors
from headrace_service.output_forms.call_format import Tool, ToolUse
from headrace_service.output_forms.model_form import ModelForm
from headrace_service.violations import Violations

MAX_TOOLS: Final = 128
MAX_TOOLS_BYTES: Final = 128 << 10
MAX_CALL_ID_CHARACTERS: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}}


class ToolFields(NamedTuple):
    """What a caller's API calls the fields of tools and calls.

    Attributes:
        function: what stands before a function's fields.
        schema: the schema of its parameters.
        arguments: the arguments of a call.
        choice: the name in a choice.
    """

    function: str = ""
    schema: str = "parameters_json_schema"
    arguments: str = "arguments_json"
    choice: str = "tool_choice.name"


HEADRACE_FIELDS: Final = ToolFields()
"""The names of headrace.v1."""


class Offered(NamedTuple):
    """The tools of a conversation.

    Attributes:
        shown: those that the model is shown.
        use: those that it may call, and whether it does.
    """

    shown: Sequence[Tool]
    use: ToolUse


class Asked(NamedTuple):
    """What a caller says of tools: `parallel` is None where it says nothing."""

    tools: Sequence[inference_pb2.Tool]
    choice: inference_pb2.ToolChoice
    parallel: bool | None
    has_structured_output: bool


def offered(asked: Asked, form: ModelForm, fields: ToolFields = HEADRACE_FIELDS) -> Offered | None:
    """Returns the tools of a conversation, after checking them; None: the model is shown none.

    Args:
        asked: what the caller says.
        form: how the model writes calls.
        fields: what the caller's API calls them.

    Raises:
        ServiceError: INVALID_ARGUMENT with all violations; FAILED_PRECONDITION, the model takes no
            tools.
    """
    found = Violations()
    if not asked.tools:
        rule = "must not be set without tools"
        found.require(asked.choice.WhichOneof("choice") is None, "tool_choice", rule)
        found.require(asked.parallel is None, "parallel_tool_calls", rule)
        found.raise_if_any()
        return None
    if not form.call_format:
        raise errors.failed_precondition(f"tools: the model takes none: {form.why_no_tools}")
    tools = _tools(asked.tools, form, fields, found)
    use = _use(asked, tools, fields, found)
    found.raise_if_any()
    return None if use is None else Offered(tools, use)


def for_template(tool: Tool) -> dict[str, Any]:
    """Returns a tool as chat templates read it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def call_for_template(
    call: inference_pb2.ToolCall, field: str, fields: ToolFields, found: Violations
) -> dict[str, Any]:
    """Returns a call of an earlier message as chat templates read it; what is wrong is noted."""
    rule = f"must have at least 1 and at most {MAX_CALL_ID_CHARACTERS} characters"
    found.require(1 <= len(call.id) <= MAX_CALL_ID_CHARACTERS, f"{field}.id", rule)
    found.require(bool(call.name), f"{field}.{fields.function}name", "must not be empty")
    arguments = _object(call.arguments_json, f"{field}.{fields.function}{fields.arguments}", found)
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}}


def _tools(given: Sequence[inference_pb2.Tool], form: ModelForm, fields: ToolFields, found: Violations) -> list[Tool]:
    found.require(len(given) <= MAX_TOOLS, "tools", f"must have at most {MAX_TOOLS} entries")
    num_bytes = sum(len(text.encode()) for tool in given for text in _texts(tool))
    found.require(num_bytes <= MAX_TOOLS_BYTES, "tools", f"has {num_bytes} bytes; must have at most {MAX_TOOLS_BYTES}")
    found.raise_if_any()
    tools: dict[str, Tool] = {}
    for index, one in enumerate(given):
        field = f"tools[{index}].{fields.function}"
        rule = 'must be 1 to 64 letters, digits, "_", "-" and "."'
        found.require(_NAME.fullmatch(one.name) is not None, f"{field}name", rule)
        found.require(one.name not in tools, f"{field}name", f"must not be {one.name}, which is an earlier tool's")
        tool = tools[one.name] = _tool(one, f"{field}{fields.schema}", found)
        why = form.why_not_strict(tool) if tool.strict else ""
        rule = f"must be false: calls in the format {form.call_format} can't be held to {why}"
        found.require(not why, f"{field}strict", rule)
    return list(tools.values())


def _texts(one: inference_pb2.Tool) -> tuple[str, str, str]:
    return one.name, one.description, one.parameters_json_schema


def _tool(one: inference_pb2.Tool, field: str, found: Violations) -> Tool:
    schema = _object(one.parameters_json_schema, field, found) if one.parameters_json_schema else _NO_PARAMETERS
    found.require(schema.get("type", "object") == "object", field, "must be the schema of an object")
    return Tool(one.name, one.description, schema, one.strict if one.HasField("strict") else True)


def _use(asked: Asked, tools: Sequence[Tool], fields: ToolFields, found: Violations) -> ToolUse | None:
    """Returns which tools the model calls; None: none."""
    choice, parallel = asked.choice, asked.parallel is not False
    found.require(choice.mode in inference_pb2.ToolChoiceMode.values(), "tool_choice.mode", "must be a ToolChoiceMode")
    if choice.mode == inference_pb2.TOOL_CHOICE_MODE_NONE:
        return None
    rule = "must not be set beside tools, unless tool_choice is none: an output is one or the other"
    found.require(not asked.has_structured_output, "spec.structured_output", rule)
    if choice.WhichOneof("choice") == "name":
        named = [tool for tool in tools if tool.name == choice.name]
        found.require(bool(named), fields.choice, f"{errors.echo(choice.name)} is none of the tools")
        return ToolUse(named, "required", parallel=False)
    required = choice.mode == inference_pb2.TOOL_CHOICE_MODE_REQUIRED
    return ToolUse(tools, "required" if required else "auto", parallel)


def _object(text: str, field: str, found: Violations) -> dict[str, Any]:
    """Returns the JSON object that a text is; what is wrong with it is noted."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        found.add(field, f"nests deeper than {limits.MAX_STRUCTURED_DEPTH} levels")
        return {}
    except (msgspec.DecodeError, UnicodeError) as error:
        found.add(field, f"must be a JSON object: {error}")
        return {}
    if not isinstance(value, dict):
        found.add(field, "must be a JSON object")
        return {}
    path = path_beyond(value, limits.MAX_STRUCTURED_DEPTH)
    found.require(path is None, field, f"nests deeper than {limits.MAX_STRUCTURED_DEPTH} levels at {path}")
    return value
