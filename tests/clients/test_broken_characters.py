"""A subscription that breaks amid characters, whole and broken ones.

Its text is that of all bytes together, wherever the server begins again.

The server's side is played by its real detokenizer, with random bytes as tokens, cut into deltas
differently at each attempt.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from headrace import Delta, OutputFinished, RetryPolicy, Unavailable, calls
from headrace.streams.stream_state import SubscriptionState
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import inference_pb2
from headrace_service.text.detokenizer import MAX_HELD_BYTE_TOKENS, IncrementalDetokenizer, PieceTable

# Bytes of which many sequences are characters and many are broken ones, a piece that ends within a
# character, and a special token.
PIECES = [
    b"a",
    b"\xc3",
    b"\xa9",
    b"\xe6",
    b"\xbc",
    b"\xa2",
    b"\xf0",
    b"\x9f",
    b"\x98",
    b"\x80",
    b"b\xe6\xbc",
    b"\xef\xbf\xbd",
    b"<s>",
]
TABLE = PieceTable(PIECES, special_ids=[12], strips_leading_space=False, vocabulary_size=len(PIECES))
# The same bytes as byte tokens, of which consecutive ones count together, among tokens of text.
_TEXTS = {0, 11, 12}
FALLBACK = PieceTable(
    [*PIECES[:10], b"\x41", *PIECES[11:]],
    special_ids=[12],
    strips_leading_space=False,
    vocabulary_size=len(PIECES),
    fallback_ids=set(range(len(PIECES))) - _TEXTS,
)


def _events(table: PieceTable, log: list[int], from_token: int, sizes: list[int]) -> Iterator[pb.GenerationEvent]:
    """Returns what the server sends of an output, `sizes` tokens at a time in turn.

    Before from_token it gives what is still open there, if anything follows.
    """
    detokenizer = IncrementalDetokenizer(table, skip_special=True)
    position = len(detokenizer.feed(log[:from_token])[0]) if from_token else 0
    pending, turn = log[from_token:], 0
    while pending:
        size = sizes[turn % len(sizes)]
        ids, text = detokenizer.feed(pending[:size])
        pending, turn = pending[size:], turn + 1
        if ids:
            yield _delta(position, ids, text)
            position += len(ids)
    ids, text = detokenizer.finish([])
    if ids and (len(log) > from_token or not from_token):
        yield _delta(position, ids, text)
    yield pb.GenerationEvent(output_finished=pb.OutputFinished(reason=pb.FINISH_REASON_LENGTH))
    yield pb.GenerationEvent(done=pb.Done())


def _delta(first: int, ids: list[int], text: str) -> pb.GenerationEvent:
    return pb.GenerationEvent(
        delta=pb.Delta(first_token_index=first, token_ids=ids, content=[pb.Content(text=text)] if text else [])
    )


def _first_token(request: Message) -> int:
    assert isinstance(request, inference_pb2.SubscribeRequest)
    return request.from_token


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("table", [TABLE, FALLBACK], ids=["bytes", "fallback"])
@given(
    log=st.lists(st.integers(0, len(PIECES) - 1), max_size=MAX_HELD_BYTE_TOKENS),
    attempts=st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(1, 5), min_size=1, max_size=3)), max_size=5),
    last_sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_tokens_and_text_come_once(
    table: PieceTable, single: bool, log: list[int], attempts: list[tuple[int, list[int]]], last_sizes: list[int]
) -> None:
    state = SubscriptionState(calls.subscribe("r", 0 if single else None, 0), None, RetryPolicy(max_attempts=99))
    deltas: list[Delta] = []
    ends = 0
    for breaks_after, sizes in [*attempts, (10_000, last_sizes)]:
        for count, message in enumerate(_events(table, log, _first_token(state.call.request), sizes)):
            if count == breaks_after:
                state.failed(Unavailable("connection lost"))
                break
            event = state.take(message)
            deltas += [event] if isinstance(event, Delta) else []
            ends += isinstance(event, OutputFinished)
        else:
            break
    assert [token for delta in deltas for token in delta.token_ids] == log
    assert "".join(delta.text for delta in deltas) == table.text(log, True)
    assert ends == 1


def test_where_no_character_is_open_the_next_token_is_asked_for() -> None:
    log = [0, 1, 2, 0, 6, 6, 0, 0]
    state = SubscriptionState(calls.subscribe("r", 0, 0), None, RetryPolicy())
    asked = []
    for _ in range(5):
        for message in _events(TABLE, log, _first_token(state.call.request), [1]):
            if state.take(message) is not None:
                break
        state.failed(Unavailable("connection lost"))
        asked.append(_first_token(state.call.request))
    # The byte at 4 came as broken when the one at 5 did: until a whole character has followed, that
    # may be asked for again.
    assert asked == [1, 3, 4, 4, 7]
