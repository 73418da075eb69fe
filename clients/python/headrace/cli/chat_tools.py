"""Tools of a chat: read from a file, and answered by the person who types.

Owns the file's form and what is said of a call. Nothing is run: the person plays the function, and
types what it returns.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import click

from headrace.cli.output import warn
from headrace.conversations.content import ToolCall
from headrace.conversations.messages import Message, Tool

_FIELDS = {"name", "description", "parameters", "strict"}


def read_tools(path: pathlib.Path) -> list[Tool]:
    """Reads a JSON file with a list of tools, each with name, description, parameters and strict.

    OpenAI's form, with these under "function", is read too.

    Raises:
        click.UsageError: The file cannot be read, or has something else.
    """
    try:
        given = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise click.UsageError(f"--tools: {path} is no JSON that can be read: {error}") from error
    if not isinstance(given, list) or not given:
        raise click.UsageError(f"--tools: {path} must have a list of tools")
    return [_tool(one, index, path) for index, one in enumerate(given)]


def _tool(given: Any, index: int, path: pathlib.Path) -> Tool:
    function = given.get("function", given) if isinstance(given, dict) else given
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise click.UsageError(f"--tools: entry {index} of {path} must be an object with a name")
    unknown = sorted(set(function) - _FIELDS)
    if unknown:
        raise click.UsageError(f"--tools: entry {index} of {path} has {unknown[0]}, which no tool has")
    return Tool(**{name: value for name, value in function.items() if value is not None})


class OpenCalls:
    """Calls of the last answer whose results have not been typed yet."""

    def __init__(self) -> None:
        self._waiting: list[ToolCall] = []
        self._results: list[Message] = []

    def __bool__(self) -> bool:
        """Whether some wait."""
        return bool(self._waiting)

    def begin(self, calls: tuple[ToolCall, ...]) -> None:
        """Asks for the results of an answer's calls."""
        self._waiting, self._results = list(calls), []
        self._ask()

    def answer(self, result: str) -> list[Message] | None:
        """Takes the result of the call that waits first; returns all once none waits."""
        call = self._waiting.pop(0)
        self._results.append(Message("tool", result, tool_call_id=call.id))
        self._ask()
        return None if self._waiting else self._results

    def forget(self) -> None:
        """Waits for no result any more."""
        self._waiting.clear()

    def _ask(self) -> None:
        if self._waiting:
            call = self._waiting[0]
            warn(f"[the model calls {call.name}({call.arguments}); type what it returns]")
