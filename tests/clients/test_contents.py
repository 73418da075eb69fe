"""Contents of deltas: typed, put together, and cut where a reader had them before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import AnswerText, Content, Delta, ReasoningText, ToolCall, ToolCallArguments, ToolCallFinished
from headrace.completion import OutputTranscript
from headrace.conversations.content import ToolCallStarted, num_units, without_units

TEXTS = st.text("aé", min_size=1, max_size=3)
CONTENTS = st.lists(
    st.one_of(
        st.builds(AnswerText, TEXTS),
        st.builds(ReasoningText, TEXTS),
        st.builds(ToolCallArguments, st.integers(0, 1), TEXTS),
        st.builds(ToolCallStarted, st.integers(0, 1), TEXTS, TEXTS),
        st.builds(ToolCallFinished, st.integers(0, 1), TEXTS, st.booleans()),
    ),
    max_size=6,
).map(tuple)


def units(contents: tuple[Content, ...]) -> list[Content]:
    return [without_units(contents, place)[:1][0] for place in range(num_units(contents))]


@given(CONTENTS, st.integers(0, 20))
def test_what_is_cut_off_is_as_long_as_asked(contents: tuple[Content, ...], known: int) -> None:
    known = min(known, num_units(contents))
    rest = without_units(contents, known)
    assert num_units(rest) == num_units(contents) - known
    assert units(rest) == units(contents)[known:]


def test_calls_and_reasoning_are_put_together() -> None:
    output = OutputTranscript()
    output.add(Delta(0, 0, (1,), "a", content=(ReasoningText("so"), AnswerText("a"), ToolCallStarted(0, "c", "f"))))
    output.add(Delta(0, 1, (2,), "", content=(ToolCallArguments(0, "{"), ToolCallArguments(0, "}"))))
    output.add(Delta(0, 2, (), "", content=(ToolCallFinished(0, "{}", True),)))
    assert output.content.tool_calls() == (ToolCall("c", "f", "{}"),)
    assert ("".join(output.content.reasoning), "".join(output.text), output.num_units) == ("so", "a", 7)
    assert (output.sure_token_index, output.sure_num_units) == (2, 7)


@pytest.mark.parametrize("text", ["[]", "{", "1"])
def test_arguments_that_are_no_object_are_not_parsed(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        ToolCall("c", "f", text).parsed()
