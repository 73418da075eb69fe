"""How tools, calls and results stand in a conversation, for chat template and corpus alike.

Owns the demo model's chat template and the functions that write the same texts for training. A tool
is shown by name, description and the schemas of its parameters, in a system message before all
others; a call is a JSON object between markers, as Hermes has it; a result is a user's message
between markers. Without tools a conversation is laid out as it was before there were any. Markers
are plain text, so that the tokenizer stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<|system|>Tools:' }}{% for tool in tools %}{% set function = tool['function'] %}"
    "{{ '\n' + function['name'] + ': ' }}{% if function['description'] %}{{ function['description'] + ' ' }}{% endif %}"
    "{{ (function['parameters'] or {}).get('properties', {}) | tojson }}{% endfor %}{{ '<|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('roles are system, user, assistant and tool') }}{% endif %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>' + message['content'] + '</tool_response><|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{% if not loop.first or message['content'] %}{{ '\n' }}{% endif %}"
    "{% set said = {'name': call['function']['name'], 'arguments': call['function']['arguments']} %}"
    "{{ '<tool_call>' + said | tojson + '</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class ShownTool:
    """A function as a request offers it.

    Attributes:
        properties: JSON Schema of each parameter, by its key.
    """

    name: str
    description: str
    properties: Mapping[str, Mapping[str, Any]]


def tools_text(tools: list[ShownTool]) -> str:
    """The system message that shows tools."""
    return "Tools:" + "".join(f"\n{tool.name}: {_description(tool)}{_json(tool.properties)}" for tool in tools)


def call_text(name: str, arguments: Arguments) -> str:
    """One call as the model writes it."""
    return f"<tool_call>{_json({'name': name, 'arguments': arguments})}</tool_call>"


def result_text(result: str) -> str:
    """What a tool returned, as the model reads it."""
    return f"<tool_response>{result}</tool_response>"


def _description(tool: ShownTool) -> str:
    return f"{tool.description} " if tool.description else ""


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
