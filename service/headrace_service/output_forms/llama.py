"""An output that is nothing but JSON objects with name and parameters: Llama 3.1 to 3.3.

Whether an output is calls shows in its first character: a brace, or the special token before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace_service.output_forms import lark
from headrace_service.output_forms.call_format import CallReader, Tool, ToolUse
from headrace_service.output_forms.json_call import JsonState
from headrace_service.output_forms.lark import TokenIds
from headrace_service.output_forms.text_pieces import SPACE

TAG: Final = "<|python_tag|>"
MARKERS: Final = (TAG,)
# Before a call; what has more is text.
_MAX_SPACE: Final = 256


class LlamaReader(CallReader):
    """Reads the format. From the first text that is no call on, all is text."""

    # What stands before the object that may follow: space, the special token, a semicolon.
    _edge = ""

    def _begin(self) -> Callable[[str], str]:
        return self._at_edge

    @property
    def holds(self) -> bool:
        """Whether text that came is in no part yet."""
        return super().holds or bool(self._edge)

    def finish(self) -> None:
        """The output ends here."""
        self._leave_edge()
        super().finish()

    def _at_edge(self, text: str) -> str:
        text, self._edge = self._edge + text, ""
        before = text.lstrip(SPACE)
        if len(text) - len(before) > _MAX_SPACE:
            self._at = self._in_text
            return text
        tag = self._spelling(TAG)
        if self._calls.count and before.startswith(";"):
            before = before[1:].lstrip(SPACE)
        if before.startswith(tag):
            before = before[len(tag) :].lstrip(SPACE)
        if before.startswith("{"):
            self._begin_json(text[: len(text) - len(before)])
            return before
        if not before or tag.startswith(before):
            self._edge = text
            return ""
        self._at = self._in_text
        return text

    def _in_text(self, text: str) -> str:
        self._text.feed(text)
        return ""

    def _leave_edge(self) -> None:
        """The output ends where a call could have begun."""
        edge, self._edge = self._edge, ""
        if not self._calls.count:
            self._text.feed(edge)

    def _after_call(self, state: JsonState) -> None:
        self._at = self._at_edge if state is JsonState.WHOLE else self._in_text


def grammar(use: ToolUse, token_ids: TokenIds) -> str:
    """Returns the grammar of an output with such calls; an answer in text begins with no brace.

    Args:
        use: the tools, and whether they are called.
        token_ids: the special tokens that markers are.
    """
    rules = [f"call_{index}: {_object(tool)}" for index, tool in enumerate(use.tools)]
    some_call = lark.any_of([f"call_{index}" for index in range(len(use.tools))])
    tag = f"{lark.marker_of(TAG, token_ids[TAG])}? " if TAG in token_ids else ""
    several = f' (";" space? {some_call})*' if use.parallel else ""
    calls = f"calls: space? {tag}{some_call}{several}"
    start = "start: calls" if use.choice == "required" else "start: calls | space? answer?"
    return "\n".join([start, calls, *rules, r"answer: /[^{ \t\r\n](.|\n)*/", lark.COMMON])


def _object(tool: Tool) -> str:
    begin = '{"name": ' + lark.quoted(tool.name) + ', "parameters": '
    return f'{lark.quoted(begin)} {lark.arguments_of(tool)} "}}"'
