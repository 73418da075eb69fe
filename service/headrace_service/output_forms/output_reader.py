"""Reads one output of a conversation: its tokens' text comes in, its parts come out.

Owns which reader an output has (sections of reasoning and answer, or messages of channels) and how
special tokens reach it.
"""

from __future__ import annotations

from typing import Protocol

from headrace_service.output_forms import model_form
from headrace_service.output_forms.harmony import HarmonyReader
from headrace_service.output_forms.output_plan import OutputPlan
from headrace_service.output_forms.parts import CallArguments, CallFinished, Calls, CallStarted, Part, Reasoning, Text
from headrace_service.output_forms.plain import AnswerReader
from headrace_service.output_forms.sectioned import SectionedReader


class _WholeReader(Protocol):
    """Reads a whole output, whose parts it appends to a list of its own."""

    num_reasoning_tokens: int

    @property
    def holds(self) -> bool:
        """Whether text that came is in no part yet."""

    def feed(self, num_tokens: int, text: str) -> None:
        """Takes the text of the next tokens."""

    def finish(self) -> None:
        """The output ends here."""


class OutputReader:
    """The parts of one output while it arrives.

    Args:
        plan: what to look for.
        place: names the output, the same whoever reads it.
        shows_special: whether special tokens have text.

    Attributes:
        marker_ids: tokens to be given to `feed_marker`, not as text.
    """

    def __init__(self, plan: OutputPlan, place: str, shows_special: bool) -> None:
        self._parts: list[Part] = []
        self._plan = plan
        self.marker_ids = plan.stand_ins()
        self._spellings = {text: self.marker_ids[token] for token, text in plan.special_markers}
        shown = (text if shows_special else "" for _, text in plan.special_markers)
        self._shown = dict(zip(map(ord, self.marker_ids.values()), shown, strict=True))
        self._calls = Calls(self._parts, {tool.name for tool in plan.tools}, place)
        self._reader: _WholeReader
        if plan.has_channels:
            self._reader = HarmonyReader(
                self._parts, self._calls, self._spelling, plan.within_channel, takes_calls=bool(plan.call_format)
            )
        else:
            self._reader = SectionedReader(plan, self._parts, self._spelling, self._answer_reader)

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._calls.count + self._calls.is_open

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        return self._reader.num_reasoning_tokens

    @property
    def holds(self) -> bool:
        """Whether text that came is in no part yet."""
        return self._reader.holds

    def feed(self, num_tokens: int, text: str) -> None:
        """Takes the text of the next tokens: of one, or of some that are a character together."""
        self._reader.feed(num_tokens, text)

    def feed_marker(self, token_id: int) -> None:
        """Takes a special token that is a marker."""
        self.feed(1, self.marker_ids[token_id])

    def finish(self) -> None:
        """The output ends here."""
        self._reader.finish()

    def take(self) -> list[Part]:
        """Returns the parts that are decided, each run of a kind as one, and forgets them."""
        parts = merged(self._parts)
        self._parts.clear()
        return [part for part in map(self._cleaned, parts) if part is not None] if self._shown else parts

    def _answer_reader(self, is_after_marker: bool) -> AnswerReader:
        return model_form.answer_reader(self._plan, self._parts, self._calls, self._spelling, is_after_marker)

    def _spelling(self, marker: str) -> str:
        """What a marker is in the text that readers are fed; it may begin with a special token."""
        begin = max((text for text in self._spellings if marker.startswith(text)), key=len, default="")
        return self._spellings[begin] + marker.removeprefix(begin) if begin else marker

    def _cleaned(self, part: Part) -> Part | None:
        """Returns a part without what stands for special tokens; None if nothing is left of it."""
        match part:
            case Text(text):
                text = text.translate(self._shown)
                return Text(text) if text else None
            case Reasoning(text):
                text = text.translate(self._shown)
                return Reasoning(text) if text else None
            case CallStarted(index, id, name):
                return CallStarted(index, id, name.translate(self._shown))
            case CallArguments(index, delta):
                delta = delta.translate(self._shown)
                return CallArguments(index, delta) if delta else None
            case CallFinished(index, arguments, valid):
                return CallFinished(index, arguments.translate(self._shown), valid)


def merged(parts: list[Part]) -> list[Part]:
    """Returns parts with consecutive ones of a kind as one."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        match last, part:
            case Text(before), Text(text):
                whole[-1] = Text(before + text)
            case Reasoning(before), Reasoning(text):
                whole[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(_, delta):
                whole[-1] = CallArguments(index, before + delta)
            case _:
                whole.append(part)
    return whole
