"""Grammars in Lark's notation, as llguidance reads them: what formats of calls write alike.

Owns quoting, JSON within a grammar, and free text up to a marker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace_request import json_schema
from headrace_service.output_forms.call_format import Tool, ToolUse

# Special tokens that markers are, by marker.
TokenIds = Mapping[str, int]

# Rules that grammars refer to. Free text may be empty; space is bounded, because a model may never
# leave off writing it.
COMMON = "\n".join(["rest: TEXT", r"TEXT: /(.|\n)*/", r"space: /[ \n]{1,8}/"])


def quoted(text: str) -> str:
    """Returns a text as it stands between quotes."""
    return json.dumps(text, ensure_ascii=False)


def json_of(schema: Mapping[str, Any] | bool) -> str:
    """Returns the rule of JSON that a schema allows."""
    return f"%json {json.dumps(json_schema.held(schema))}"


def arguments_of(tool: Tool) -> str:
    """Returns the rule of a tool's arguments as a JSON object."""
    return json_of(tool.parameters if tool.strict else {"type": "object"})


def any_of(rules: list[str]) -> str:
    """Returns the rule of one of several rules."""
    return f"({' | '.join(rules)})"


def text_to(name: str, marker: str, token_id: int | None) -> tuple[str, str]:
    """Returns a rule's name and its lines: free text up to a marker, and the marker.

    Args:
        name: of the rule.
        marker: ends the text, which can't contain it.
        token_id: the special token that the marker is; None: it is text.
    """
    if token_id is None:
        # A lazy lexeme ends where its text has come to the marker.
        return name, f"{name}[lazy]: TEXT {quoted(marker)}"
    return name, f"{name}: TEXT <[{token_id}]>"


def marker_of(marker: str, token_id: int | None) -> str:
    """Returns the rule of a marker alone."""
    return quoted(marker) if token_id is None else f"<[{token_id}]>"


def marked_calls(use: ToolUse, marker: str, token_id: int | None, body: str, rules: list[str]) -> str:
    """Returns the grammar of outputs whose calls begin with a marker.

    Args:
        use: whether there must be calls, and whether there may be several.
        marker: begins a call.
        token_id: the special token that the marker is; None: it is text.
        body: the rule of what follows the marker.
        rules: lines that the body refers to.
    """
    call = f"marked: {marker_of(marker, token_id)} {body}"
    name, lines = text_to("text_to_call", marker, token_id)
    match use.choice, use.parallel:
        case "required", True:
            start = "start: space? marked (space? marked)*"
        case "required", False:
            start = "start: space? marked"
        case _, True:
            start, call = f"start: call* rest\ncall: {name} {body}", lines
        case _:
            start, call = f"start: rest | {name} {body}", lines
    return "\n".join([start, call, *rules, COMMON])
