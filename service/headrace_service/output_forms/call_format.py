"""What every format of calls is: a reader of text, and a grammar that holds the model to it.

Owns what formats share. A format's file has both sides, so that what the grammar allows is what the
reader understands.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from headrace_service.output_forms.json_call import JsonCall, JsonState
from headrace_service.output_forms.parts import Calls, Part, Text
from headrace_service.output_forms.text_pieces import EdgedText, MarkerSearch

# Tells by which text a reader knows a marker: its own, or what stands for a special token.
Spelling = Callable[[str], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: what the model calls it.
        description: what it does, for the model; may be empty.
        parameters: JSON Schema of its arguments, that of an object.
        strict: whether arguments can only be such as the schema allows.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions of a request, and whether the model calls them.

    Attributes:
        tools: at least one, no two of the same name.
        choice: "auto": as it likes; "required": the output is nothing but calls.
        parallel: whether one output may have several.
    """

    tools: Sequence[Tool]
    choice: Literal["auto", "required"] = "auto"
    parallel: bool = True

    @property
    def needs_grammar(self) -> bool:
        """Whether the model must be held to anything."""
        return self.choice == "required" or not self.parallel or any(tool.strict for tool in self.tools)


class CallReader(abc.ABC):
    """Reads the calls in one output, and the text around them, a place after the other.

    Args:
        parts: where parts are appended as soon as they are decided.
        calls: takes the calls.
        spelling: of markers.
        is_after_marker: whether whitespace at the beginning belongs to something else.
    """

    def __init__(self, parts: list[Part], calls: Calls, spelling: Spelling, is_after_marker: bool) -> None:
        self._calls = calls
        self._spelling = spelling
        self._text = EdgedText(lambda text: parts.append(Text(text)), is_after_marker)
        self._search: MarkerSearch | None = None
        self._json: JsonCall | None = None
        # What stood before the object that is being read, to be text if that is no call.
        self._before = ""
        # Reads on from where the text is; returns what is left for the next place.
        self._at: Callable[[str], str] = self._begin()

    @abc.abstractmethod
    def _begin(self) -> Callable[[str], str]:
        """Returns the place where an output begins."""

    @abc.abstractmethod
    def _in_text(self, text: str) -> str:
        """The place outside of calls."""

    @abc.abstractmethod
    def _after_call(self, state: JsonState) -> None:
        """Goes to where the text is after a call that is whole or broken, or after what is none."""

    @property
    def holds(self) -> bool:
        """Whether text that came is in no part yet."""
        is_searching = self._search is not None and self._search.holds
        return is_searching or self._text.holds or (self._json is not None and not self._calls.is_open)

    def feed(self, text: str) -> None:
        """Takes more text."""
        while text:
            text = self._at(text)

    def finish(self) -> None:
        """The output ends here."""
        if self._json is not None:
            self._json.finish()
            self._give_back(self._json)
        elif self._calls.is_open:
            self._calls.finish(whole=False)
        if self._search is not None and self._at == self._in_text:
            self._text.feed(self._search.flush())
        self._text.finish()

    def _look_for(self, *markers: str) -> None:
        self._search = MarkerSearch(*map(self._spelling, markers))

    def _find(self, text: str) -> tuple[str, str, str]:
        assert self._search is not None
        return self._search.feed(text)

    def _begin_json(self, before: str) -> None:
        """Goes on with a JSON object, before which stood what is text if the object is no call."""
        self._json, self._before, self._search = JsonCall(self._calls), before, None
        self._at = self._in_json

    def _in_json(self, text: str) -> str:
        json, num_calls = self._json, self._calls.count
        assert json is not None
        rest = json.feed(text)
        if self._calls.is_open or self._calls.count > num_calls:
            self._text.marker()
        if json.state is not JsonState.OPEN:
            self._json = None
            self._give_back(json)
            self._after_call(json.state)
        return rest

    def _give_back(self, json: JsonCall) -> None:
        """What was taken for a call and is none is text."""
        if json.state is JsonState.NO_CALL:
            self._text.feed(self._before + json.raw)
