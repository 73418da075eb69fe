"""One output's tokens on their way into deltas.

Readers begin with the first token, or join in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from headrace_protos.engine.v1 import engine_pb2
from headrace_service.streams.output_text import OutputText
from headrace_service.streams.render_state import RenderState
from headrace_service.streams.wires import EventWire
from headrace_service.text.detokenizer import PieceTable

# A word, and byte tokens of which the last is in no character.
_TABLE = PieceTable([b" word", b"A", b"B", b"\xff"], (), False, 4, fallback_ids={1, 2, 3})
Deltas = list[tuple[int, list[int], str]]


class _Wire:
    """Keeps the deltas."""

    def __init__(self) -> None:
        self.deltas: Deltas = []

    def delta(
        self, output_index: int, first: int, token_ids: Sequence[int], text: str, logprobs: Any, parts: Any
    ) -> bytes:
        self.deltas.append((first, list(token_ids), text))
        return b""


def deltas(parts: list[list[int]], from_token: int) -> Deltas:
    """Returns the deltas of an output whose tokens come in these parts.

    The end comes with the last part. The reader asks from a token on.
    """
    wire = _Wire()
    render = RenderState(skip_special=True, with_logprobs=False, ids_only=False)
    output = OutputText(0, _TABLE, render, from_token, cast(EventWire, wire))
    for index, part in enumerate(parts):
        output.tokens += part
        output.end = engine_pb2.OutputEnd() if index == len(parts) - 1 else None
        output.take([])
    return wire.deltas


@pytest.mark.parametrize("parts", [[[0, 1, 2]], [[0, 1], [2]], [[0, 1, 2], []], [[0], [1], [2], []]])
def test_who_has_all_tokens_of_an_ended_output_gets_none_again(parts: list[list[int]]) -> None:
    assert sum((ids for _, ids, _ in deltas(parts, 0)), []) == [0, 1, 2]
    assert "".join(text for _, _, text in deltas(parts, 0)) == " wordAB"
    # What was undecided when the output ended went out with its end.
    assert deltas(parts, 3) == []


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 1, 2], [3], []]])
def test_who_joins_within_a_run_of_byte_tokens_gets_it_whole(parts: list[list[int]]) -> None:
    assert deltas(parts, 2) == [(1, [1, 2, 3], "���")]
