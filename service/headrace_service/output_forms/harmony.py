"""Messages of channels, as gpt-oss writes them: analysis, commentary, final, calls of functions.

An output is one message or several: <|start|>, a header, <|message|>, a body, <|end|>. The prompt
has begun the first one. What is analysis is reasoning; what goes to a function is a call, whose
arguments are the body; all else is the answer's text. A call ends the output with <|call|>, an
answer ends it with <|return|>. All markers are special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from headrace_request.reasoning import Reasoning as Section
from headrace_service.output_forms.call_format import Spelling
from headrace_service.output_forms.harmony_header import CHANNELS, ROLE, Header
from headrace_service.output_forms.parts import Calls, Part, Reasoning, Text

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
RETURN: Final = "<|return|>"
CALL: Final = "<|call|>"
CONSTRAIN: Final = "<|constrain|>"
MARKERS: Final = (START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN)
# Behind these a model that goes on writes what others say.
LAST: Final = (RETURN, CALL)
_ENDS: Final = (END, *LAST)
# Between messages that become one text.
_EMPTY_LINE: Final = "\n\n"


class HarmonyReader:
    """Reads a whole output, reasoning and calls included. What is no message is text.

    Args:
        parts: where parts are appended.
        calls: takes the calls.
        spelling: of markers, a character each.
        within: the channel of the message in which the prompt ends; "": it ends in a header, behind
            the role.
        takes_calls: whether the conversation has tools; else what goes to a function is text.

    Attributes:
        num_reasoning_tokens: tokens of messages of reasoning so far, their markers included.
    """

    def __init__(self, parts: list[Part], calls: Calls, spelling: Spelling, within: str, takes_calls: bool) -> None:
        self._calls = calls
        self._takes_calls = takes_calls
        self._names = {spelling(marker): marker for marker in MARKERS}
        assert all(len(spelled) == 1 for spelled in self._names), "markers are special tokens"
        self._markers = re.compile(f"([{''.join(self._names)}])")
        self._channel, self._constrain = spelling(CHANNEL), spelling(CONSTRAIN)
        self._text = _Messages(lambda text: parts.append(Text(text)))
        self._reasoning = _Messages(lambda text: parts.append(Reasoning(text)))
        # Takes the body of the message; what stands between messages is text.
        self._body: Callable[[str], None] = self._text.add
        # Whether an open call has no arguments so far.
        self._is_bare = True
        self._header: Header | None = None
        self.num_reasoning_tokens = 0
        self._num_header_tokens = 0
        if within in CHANNELS:
            self._begin_body(within, "")
        else:
            self._header = self._new_header("")

    @property
    def holds(self) -> bool:
        """Whether text that came is in no part yet."""
        return self._header is not None and bool(self._header.raw)

    def feed(self, num_tokens: int, text: str) -> None:
        """Takes the text of the next tokens: of one, or of some that are a character together."""
        was_reasoning = self._is_reasoning
        for index, piece in enumerate(self._markers.split(text)):
            if index % 2:
                self._take_marker(self._names[piece], piece)
            elif piece:
                self._take_text(piece)
        if self._header is not None:
            self._num_header_tokens += num_tokens
            return
        if was_reasoning or self._is_reasoning:
            self.num_reasoning_tokens += self._num_header_tokens + num_tokens
        self._num_header_tokens = 0

    def finish(self) -> None:
        """The output ends here. What could have become a header is no text."""
        if self._header is not None and not self._header.is_sure:
            self._break_header(self._header)
        self._header = None
        self._end_body(has_marker=False)

    @property
    def _is_reasoning(self) -> bool:
        return self._header is None and self._body == self._reasoning.add

    def _take_text(self, text: str) -> None:
        if self._header is None:
            self._body(text)
        elif not self._header.feed(text):
            self._break_header(self._header)

    def _take_marker(self, marker: str, spelled: str) -> None:
        header = self._header
        if header is not None and marker == MESSAGE:
            self._end_header(header)
        elif header is not None and marker in (CHANNEL, CONSTRAIN):
            self._take_text(spelled)
        elif marker in (START, CHANNEL):
            # A model may leave out the end of a message, and the role of the next one.
            self._leave(header)
            self._header = self._new_header(spelled, has_role=marker == START)
        elif marker in _ENDS:
            self._leave(header)
        else:
            self._body(spelled)

    # -- headers

    def _new_header(self, begins: str, has_role: bool = False) -> Header:
        return Header(self._channel, self._constrain, begins, has_role)

    def _end_header(self, header: Header) -> None:
        said = header.addressed()
        if said is None or (said.function and not self._takes_calls):
            self._break_header(header)
            return
        self._header = None
        self._begin_body(said.channel, said.function)

    def _break_header(self, header: Header) -> None:
        """What was taken for a header is text, and so is what follows it."""
        self._header = None
        self._begin_body("", "")
        self._text.add(header.raw)

    # -- bodies

    def _begin_body(self, channel: str, function: str) -> None:
        if function:
            self._calls.start(function)
            self._body, self._is_bare = self._take_arguments, True
            return
        messages = self._reasoning if channel == CHANNELS[0] else self._text
        messages.begin()
        self._body = messages.add

    def _leave(self, header: Header | None) -> None:
        """A message is over, or broke off in its header; text may follow."""
        if header is not None and header.raw:
            self._break_header(header)
        self._header = None
        self._end_body(has_marker=True)
        self._begin_body("", "")

    def _end_body(self, has_marker: bool) -> None:
        if not self._calls.is_open:
            return
        if self._is_bare and has_marker:
            # A function without parameters.
            self._calls.add("{}")
        self._calls.finish(whole=True)

    def _take_arguments(self, text: str) -> None:
        self._is_bare = self._is_bare and text.isspace()
        self._calls.add(text)


class _Messages:
    """Messages that become one text, with an empty line between them."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._has_text = False
        self._is_new = False

    def begin(self) -> None:
        """Another message begins."""
        self._is_new = self._has_text

    def add(self, text: str) -> None:
        """Takes more of the message."""
        # What stands for a special token may come to nothing.
        if text.encode(errors="ignore"):
            text = _EMPTY_LINE + text if self._is_new else text
            self._has_text, self._is_new = True, False
        self._emit(text)


def section(encode: Callable[[str], Sequence[int]]) -> Section:
    """Returns a message of analysis as the engine knows it: any number, one budget for all.

    Args:
        encode: the tokens of a text, none added.
    """
    analysis, _, final = (f"{CHANNEL}{channel}{MESSAGE}" for channel in CHANNELS)
    answer = tuple(encode(f"{START}{ROLE}{final}"))
    return Section(tuple(encode(analysis)), tuple(encode(END)), closing_ids=answer, repeats=True)


def channel_within(prompt: str) -> str:
    """Returns the channel of the message in which a prompt ends; "": it does not end in a body."""
    header, found, _ = prompt.rpartition(START)[2].partition(MESSAGE)
    if not found or END in prompt.rpartition(MESSAGE)[2]:
        return ""
    words = header.partition(CHANNEL)[2].split()
    return words[0] if words and words[0] in CHANNELS else ""
