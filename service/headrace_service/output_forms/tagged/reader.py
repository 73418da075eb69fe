"""Arguments that arrive one by one, reported as one JSON object.

Owns the object. Where an argument's tags stand, a format's reader knows.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace_service.output_forms.call_format import Spelling
from headrace_service.output_forms.json_values import as_json, json_text
from headrace_service.output_forms.marked_call import MarkedCallReader
from headrace_service.output_forms.parts import Calls, Part


class TaggedReader(MarkedCallReader):
    """Reads calls whose arguments have tags.

    Args:
        parts: where parts are appended.
        calls: takes the calls.
        spelling: of markers.
        is_after_marker: whether whitespace at the beginning belongs to something else.
        text_parameters: by function, the arguments whose values are text.
    """

    def __init__(
        self,
        parts: list[Part],
        calls: Calls,
        spelling: Spelling,
        is_after_marker: bool,
        text_parameters: Mapping[str, frozenset[str]],
    ) -> None:
        super().__init__(parts, calls, spelling, is_after_marker)
        self._text_parameters = text_parameters
        self._texts: frozenset[str] = frozenset()
        self._num_arguments = 0
        # Of the value that is being read: whether it is text, and what is not text so far.
        self._is_text = False
        self._value: list[str] = []

    @property
    def holds(self) -> bool:
        """Whether text that came is in no part yet."""
        return super().holds or bool(self._value)

    def _start_call(self, name: str) -> None:
        self._text.marker()
        self._calls.start(name)
        self._texts, self._num_arguments = self._text_parameters.get(name, frozenset()), 0

    def _end_call(self) -> None:
        self._calls.add("}" if self._num_arguments else "{}")
        self._calls.finish(whole=True)
        self._at = self._begin()

    def _begin_value(self, name: str) -> None:
        """Reports an argument's name; its value follows."""
        self._is_text, self._value = name in self._texts, []
        begin = ", " if self._num_arguments else "{"
        self._calls.add(f"{begin}{json_text(name)}: " + ('"' if self._is_text else ""))
        self._num_arguments += 1

    def _add_value(self, text: str) -> None:
        """Takes more of a value, and reports it where it is text."""
        if self._is_text:
            self._calls.add(json_text(text)[1:-1])
        else:
            self._value.append(text)

    def _end_value(self) -> None:
        self._calls.add('"' if self._is_text else as_json("".join(self._value).strip()))
        self._value = []
