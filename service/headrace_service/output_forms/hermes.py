"""Calls between <tool_call> and </tool_call>, each a JSON object: Hermes, Qwen2.5, Qwen3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace_service.output_forms import lark
from headrace_service.output_forms.call_format import CallReader, Tool, ToolUse
from headrace_service.output_forms.json_call import JsonState
from headrace_service.output_forms.lark import TokenIds

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
MARKERS: Final = (OPEN, CLOSE)


class HermesReader(CallReader):
    """Reads the format. What follows a call that broke off is passed over, up to its end marker."""

    def _begin(self) -> Callable[[str], str]:
        self._look_for(OPEN, CLOSE)
        return self._in_text

    def _in_text(self, text: str) -> str:
        before, marker, rest = self._find(text)
        self._text.feed(before)
        if marker == self._spelling(OPEN):
            self._begin_json(marker)
        elif marker and self._calls.count:
            # The end of a call, which was reported.
            self._text.marker()
        else:
            self._text.feed(marker)
        return rest

    def _past_broken(self, text: str) -> str:
        _, marker, rest = self._find(text)
        if marker:
            self._at = self._in_text
        return rest

    def _after_call(self, state: JsonState) -> None:
        self._look_for(OPEN, CLOSE)
        self._at = self._in_text
        if state is JsonState.BROKEN:
            self._look_for(CLOSE)
            self._at = self._past_broken


def grammar(use: ToolUse, token_ids: TokenIds) -> str:
    """Returns the grammar of an output with such calls.

    Args:
        use: the tools, and whether they are called.
        token_ids: the special tokens that markers are.
    """
    rules = [f"call_{index}: {_object(tool)}" for index, tool in enumerate(use.tools)]
    some_call = lark.any_of([f"call_{index}" for index in range(len(use.tools))])
    body = f"space? {some_call} space? {lark.marker_of(CLOSE, token_ids.get(CLOSE))}"
    return lark.marked_calls(use, OPEN, token_ids.get(OPEN), body, rules)


def _object(tool: Tool) -> str:
    begin = '{"name": ' + lark.quoted(tool.name) + ', "arguments": '
    return f'{lark.quoted(begin)} {lark.arguments_of(tool)} "}}"'
