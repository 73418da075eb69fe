"""Tokens of a conversation's output, and the parts that they are."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples

from headrace_service.output_forms.harmony import MARKERS
from headrace_service.output_forms.output_plan import KnownTool, OutputPlan
from headrace_service.output_forms.output_reader import merged
from headrace_service.output_forms.parts import CallFinished, Part, Text
from headrace_service.streams.content_reader import ContentReader
from headrace_service.text.detokenizer import PieceTable

_PIECES = [
    b"<tool_", b"call>", b"</tool_call>", b'{"name": "f", "arguments": {', b"}", b'"a": 1', b" ", b"\n", b"word",
    b"\xe6\x9d", b"\xb1", b"[TOOL_CALLS]", b"<think>", b"</think>", b"[", b"]",
]  # fmt: skip
_MARKER = _PIECES.index(b"[TOOL_CALLS]")
_CHANNELS = len(_PIECES)
_PIECES += [marker.encode() for marker in MARKERS]
_SPECIAL = (_MARKER, *range(_CHANNELS, len(_PIECES)))
_PIECES += [b"assistant", b"analysis", b"commentary", b"final", b" to=functions.f", b" json"]
_TABLE = PieceTable(_PIECES, _SPECIAL, False, len(_PIECES))
_TOOLS = (KnownTool("f"),)
_PLANS = [
    OutputPlan("hermes", _TOOLS, reasoning=("<think>", "</think>")),
    OutputPlan("mistral", _TOOLS, ((_MARKER, "[TOOL_CALLS]"),)),
    OutputPlan("harmony", _TOOLS, tuple(enumerate(MARKERS, _CHANNELS)), has_channels=True),
]


def read(plan: OutputPlan, runs: list[list[int]]) -> tuple[list[int], list[Part], list[int]]:
    """Returns tokens, parts, and after how many tokens each delta ended."""
    reader = ContentReader(plan, "request/0", _TABLE, skip_special=True)
    tokens: list[int] = []
    parts: list[Part] = []
    edges = []
    for run in runs:
        ids, new = reader.feed(run)
        assert ids or not new
        tokens, parts = tokens + ids, parts + new
        edges.append(len(tokens))
    ids, new = reader.finish([], 0)
    return tokens + ids, merged(parts + new), edges


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(_PLANS), st.lists(st.integers(0, len(_PIECES) - 1), max_size=40), st.data())
def test_any_split_of_tokens_gives_the_same_tokens_and_parts(
    plan: OutputPlan, tokens: list[int], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=6)))
    runs = [tokens[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    single = read(plan, [[token] for token in tokens])
    split = read(plan, runs)
    assert split[:2] == single[:2] == read(plan, [tokens])[:2]
    assert single[0] == tokens
    # A delta ends where one ends that has its last token alone.
    assert set(split[2]) <= {0, *single[2]}


def test_tokens_wait_for_what_follows_them_up_to_a_bound() -> None:
    space, word = _PIECES.index(b" "), _PIECES.index(b"word")
    reader = ContentReader(_PLANS[0], "request/0", _TABLE, skip_special=True)
    assert reader.feed([word]) == ([word], [Text("word")])
    assert reader.feed([space] * 1023) == ([], [])
    ids, parts = reader.feed([space, word])
    assert (len(ids), parts) == (1025, [Text(" " * 1024 + "word")])


def test_an_end_within_a_call_ends_the_call() -> None:
    reader = ContentReader(_PLANS[0], "request/0", _TABLE, skip_special=True)
    ids, _ = reader.feed([0, 1, 3, 5])
    assert ids == [0, 1, 3, 5]
    assert reader.finish([], 0) == ([], [CallFinished(0, '{"a": 1', False)])
    assert reader.num_calls == 1
