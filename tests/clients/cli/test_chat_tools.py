"""A chat in which the person plays the functions that the model calls."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any, cast

import click
import pytest

from headrace import Accepted, Client, Delta, Done, Event, FinishReason, Ledger, Message, OutputFinished, Tool, Usage
from headrace.cli.chat import Conversation
from headrace.cli.chat_input import Input
from headrace.cli.chat_settings import Settings
from headrace.cli.chat_tools import read_tools
from headrace.conversations.content import Content, ReasoningText, ToolCall, ToolCallFinished, ToolCallStarted

CALLS: tuple[Content, ...] = (
    ReasoningText("Which?"),
    ToolCallStarted(0, "c0", "weather"),
    ToolCallFinished(0, '{"city": "Oslo"}', True),
    ToolCallStarted(1, "c1", "clock"),
    ToolCallFinished(1, "{}", True),
)
LEDGER = Ledger(*[0] * len(Ledger.__slots__))


class _Model:
    """Calls two functions, then answers; keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[list[Message], Any]] = []

    @contextlib.contextmanager
    def chat(self, messages: list[Message], tools: Any, **options: Any) -> Iterator[Iterator[Event]]:
        self.sent.append((list(messages), tools))
        calls = len(self.sent) == 1
        delta = Delta(0, 0, (1,), "", content=CALLS) if calls else Delta(0, 0, (1,), "Sunny.")
        reason = FinishReason.TOOL_CALLS if calls else FinishReason.STOP
        yield iter([Accepted("r", "m", 1), delta, OutputFinished(0, reason), Done(Usage(1, 1, 0), LEDGER)])


def test_results_are_asked_for_call_by_call_and_sent_together(capsys: pytest.CaptureFixture[str]) -> None:
    model, tool = _Model(), Tool("weather")
    client = cast(Client, model)
    chat = Conversation(client, Settings(client, {}), None, as_json=False, tools=[tool])
    for line in ("The weather?", "rain", "noon", "Thanks."):
        chat.handle(Input(line))
    printed = capsys.readouterr()
    assert 'calls weather({"city": "Oslo"}); type what it returns' in printed.err
    assert "calls clock({})" in printed.err and "Which?" in printed.err
    assert printed.out.split() == ["Sunny.", "Sunny."]
    calls = (ToolCall("c0", "weather", '{"city": "Oslo"}'), ToolCall("c1", "clock", "{}"))
    results = [Message("tool", "rain", tool_call_id="c0"), Message("tool", "noon", tool_call_id="c1")]
    asked, tools = model.sent[1]
    assert asked == [Message("user", "The weather?"), Message("assistant", "", calls), *results]
    assert tools == [tool]
    assert model.sent[2][0][-2:] == [Message("assistant", "Sunny."), Message("user", "Thanks.")]


def test_reset_forgets_calls_that_wait(capsys: pytest.CaptureFixture[str]) -> None:
    model = _Model()
    client = cast(Client, model)
    chat = Conversation(client, Settings(client, {}), None, as_json=False)
    for line in ("The weather?", "/reset", "Hello."):
        chat.handle(Input(line))
    assert model.sent[1][0] == [Message("user", "Hello.")]


def test_tools_are_read_in_both_forms(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "tools.json"
    own = {"name": "weather", "description": "d", "parameters": {"type": "object"}, "strict": False}
    path.write_text(json.dumps([own, {"type": "function", "function": {"name": "clock", "strict": None}}]))
    assert read_tools(path) == [Tool("weather", "d", {"type": "object"}, strict=False), Tool("clock")]


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "no JSON"), ("{}", "list of tools"), ("[1]", "an object with a name"), ('[{"name": "a", "b": 1}]', "has b")],
)
def test_a_file_that_has_no_tools_is_refused(tmp_path: pathlib.Path, text: str, words: str) -> None:
    (tmp_path / "tools.json").write_text(text)
    with pytest.raises(click.UsageError, match=words):
        read_tools(tmp_path / "tools.json")
