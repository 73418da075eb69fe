"""Grammars of whole outputs in harmony, in Lark's notation: reasoning, calls of tools, an answer.

Owns what a model is held to from its first token on, so that nothing depends on how it spells the
header of a message. What an answer in a given form is, another grammar says: `ANSWER` refers to it.
"""

from __future__ import annotations

from typing import Final

from headrace_service.output_forms import harmony, lark
from headrace_service.output_forms.call_format import Tool, ToolUse
from headrace_service.output_forms.harmony_header import CHANNELS, FUNCTIONS, ROLE
from headrace_service.output_forms.lark import TokenIds

ANSWER: Final = "@answer"
"""Stands for the form of an answer; it is a grammar of its own, of that name."""
_ANALYSIS, _COMMENTARY, _FINAL = CHANNELS


def of_calls(use: ToolUse, token_ids: TokenIds, within: str, max_reasoning_tokens: int | None) -> str:
    """Returns the grammar of an output that may call one of some tools.

    Args:
        use: the tools, and whether one is called. The format has no two calls in an output.
        token_ids: the special tokens that markers are, all of them.
        within: the channel of the message in which the prompt ends; "": it ends behind a role.
        max_reasoning_tokens: most tokens of reasoning; None: any number.
    """
    markers = _Markers(token_ids)
    calls = [f"call_{index}" for index in range(len(use.tools))]
    rules = [f"{call}: {_call(tool, markers)}" for call, tool in zip(calls, use.tools, strict=True)]
    last = lark.any_of(calls) if use.choice == "required" else lark.any_of([*calls, "final"])
    final = f"final: {markers.header(_FINAL)} TEXT"
    must_call = use.choice == "required"
    # An answer that the prompt has begun is another message before the call.
    within = _COMMENTARY if must_call and within == _FINAL else within
    return _grammar(markers, last, [final, *rules], within, max_reasoning_tokens, "TEXT", has_preambles=not must_call)


def of_answer(token_ids: TokenIds, within: str, max_reasoning_tokens: int | None) -> str:
    """Returns the grammar of an output whose final message has the form `ANSWER`.

    No preamble stands before it, so that all of the output's text has the form.

    Args:
        token_ids: the special tokens that markers are, all of them.
        within: the channel of the message in which the prompt ends; "": it ends behind a role.
        max_reasoning_tokens: most tokens of reasoning; None: any number.
    """
    markers = _Markers(token_ids)
    final = f"final: {markers.header(_FINAL)} {ANSWER}"
    return _grammar(markers, "final", [final], within, max_reasoning_tokens, ANSWER, has_preambles=False)


class _Markers:
    """The special tokens as rules."""

    def __init__(self, token_ids: TokenIds) -> None:
        self._token_ids = token_ids
        self.next_message = f"{self(harmony.END)} {self(harmony.START)} {lark.quoted(ROLE)}"

    def __call__(self, marker: str) -> str:
        """Returns the rule of one marker."""
        return lark.marker_of(marker, self._token_ids[marker])

    def header(self, channel: str) -> str:
        """Returns the rule of a header, the role before it left out."""
        return f"{self(harmony.CHANNEL)} {lark.quoted(channel)} {self(harmony.MESSAGE)}"


def _grammar(
    markers: _Markers,
    last: str,
    rules: list[str],
    within: str,
    max_reasoning_tokens: int | None,
    answer: str,
    has_preambles: bool,
) -> str:
    """Returns the grammar of outputs whose last message is `last`.

    An output with a budget has one message of reasoning, and one preamble behind it.
    """
    is_free = max_reasoning_tokens is None
    preamble = "preamble?" if has_preambles else ""
    before = "before*" if is_free else f"thought? {preamble}"
    kinds = ["thought", "preamble"] if has_preambles else ["thought"]
    starts = {
        _FINAL: answer,
        _ANALYSIS: f"thinking next {'before*' if is_free else preamble} {last}",
        _COMMENTARY: f"TEXT next {before} {last}",
    }
    lines = [
        f"start: {starts.get(within, f'{before} {last}')}",
        f"before: {lark.any_of(kinds)}",
        f"thought: {markers.header(_ANALYSIS)} thinking next",
        f"thinking{'' if is_free else f'[max_tokens={max_reasoning_tokens}]'}: TEXT",
        f"preamble: {markers.header(_COMMENTARY)} TEXT next",
        f"next: {markers.next_message}",
        *rules,
        r"TEXT: /(.|\n)*/",
    ]
    return "\n".join(lines)


def _call(tool: Tool, markers: _Markers) -> str:
    """Returns the rule of a call, whose recipient stands before its channel or behind it."""
    to = f" to={FUNCTIONS}{tool.name}"
    channel, message = markers(harmony.CHANNEL), markers(harmony.MESSAGE)
    kind = f'(" json" | " "? {markers(harmony.CONSTRAIN)} "json")?'
    header = lark.any_of(
        [f"{channel} {lark.quoted(_COMMENTARY + to)}", f"{lark.quoted(to)} {channel} {lark.quoted(_COMMENTARY)}"]
    )
    return f"{header} {kind} {message} {lark.arguments_of(tool)}"
