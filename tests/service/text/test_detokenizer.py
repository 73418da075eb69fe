"""However tokens arrive, their text is the text of the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_service.text.detokenizer import IncrementalDetokenizer, PieceTable

# Every byte by itself, whole characters, halves of characters, bytes that no UTF-8 has, nothing at
# all.
_PIECES = [bytes([byte]) for byte in range(256)] + [
    b"",
    b"the ",
    "é".encode(),
    "東京".encode(),
    "🙂".encode()[:2],
    "🙂".encode()[2:],
    b"a" + "🙂".encode()[:3],
    "🙂".encode()[3:] + b"b",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xc0\xaf",
    b"\xff\xfe",
    b"<end>",
]
_SPECIAL = len(_PIECES) - 1
_TABLE = PieceTable(_PIECES, {_SPECIAL}, False, len(_PIECES) + 4)
# Bytes of multi-byte characters are what goes wrong; plain ones are rare enough in a uniform draw.
_tokens = st.lists(
    st.one_of(st.integers(0, len(_PIECES) + 3), st.integers(0x80, 0xFF), st.integers(256, len(_PIECES) - 1)),
    max_size=40,
)
_splits = st.lists(st.integers(1, 5), min_size=1, max_size=40)


def whole(tokens: list[int], skip_special: bool) -> str:
    pieces = [
        _PIECES[token] if token < len(_PIECES) else b"" for token in tokens if not (skip_special and token == _SPECIAL)
    ]
    return b"".join(pieces).decode("utf-8", errors="replace")


def parts(tokens: list[int], splits: list[int]) -> list[list[int]]:
    cut, begin = [], 0
    while begin < len(tokens):
        size = splits[len(cut) % len(splits)]
        cut.append(tokens[begin : begin + size])
        begin += size
    return cut


@given(_tokens, _splits, st.booleans())
def test_any_split_gives_the_text_of_the_whole(tokens: list[int], splits: list[int], skip_special: bool) -> None:
    detokenizer = IncrementalDetokenizer(_TABLE, skip_special)
    released = [detokenizer.feed(part) for part in parts(tokens, splits)]
    released.append(detokenizer.finish([]))
    assert "".join(text for _, text in released) == whole(tokens, skip_special)
    assert [token for ids, _ in released for token in ids] == tokens


@given(_tokens, _splits, st.booleans())
def test_each_release_covers_the_same_tokens_in_ids_and_text(
    tokens: list[int], splits: list[int], skip_special: bool
) -> None:
    detokenizer = IncrementalDetokenizer(_TABLE, skip_special)
    for part in parts(tokens, splits):
        ids, text = detokenizer.feed(part)
        assert text == whole(ids, skip_special)


@given(_tokens, _splits)
def test_only_tokens_within_a_character_are_held_back(tokens: list[int], splits: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(_TABLE, True)
    fed: list[int] = []
    for part in parts(tokens, splits):
        detokenizer.feed(part)
        fed += part
        if detokenizer.num_held == 0:
            continue
        held = b"".join(_PIECES[token] if token < _SPECIAL else b"" for token in fed[len(fed) - detokenizer.num_held :])
        # The last one to three bytes begin a character that is longer than they are.
        begins = [held[-size:] for size in (1, 2, 3) if len(held) >= size and held[-size] >= 0xC2]
        assert any(len(begin) < (2 if begin[0] < 0xE0 else 3 if begin[0] < 0xF0 else 4) for begin in begins)


@pytest.mark.parametrize("begin", ["é".encode()[:1], "東".encode()[:2], "🙂".encode()[:3]])
def test_characters_that_never_end_hold_nothing_back_but_the_last(begin: bytes) -> None:
    detokenizer = IncrementalDetokenizer(_TABLE, True)
    released: list[int] = []
    for _ in range(50):
        for byte in begin:
            ids, text = detokenizer.feed([byte])
            assert text == whole(ids, True)
            released += ids
        assert detokenizer.num_held == len(begin)
    assert released == list(begin) * 49


@given(_tokens, st.integers(0, 20), st.integers(0, 12))
def test_trimming_cuts_bytes_from_the_end(tokens: list[int], num_fed: int, trim_bytes: int) -> None:
    detokenizer = IncrementalDetokenizer(_TABLE, True)
    before, text_before = detokenizer.feed(tokens[:num_fed])
    _, rest = detokenizer.finish(tokens[num_fed:], trim_bytes)
    late = b"".join(_PIECES[token] if token < _SPECIAL else b"" for token in tokens[len(before) :])
    assert text_before + rest == whole(before, True) + late[: max(0, len(late) - trim_bytes)].decode(errors="replace")


def test_trimming_counts_special_tokens_as_nothing_and_cuts_those_within() -> None:
    stop = [_PIECES.index(b"the "), _SPECIAL]
    for skip_special in (True, False):
        assert IncrementalDetokenizer(_TABLE, skip_special).finish(stop, len(b" "))[1] == "the"
    assert IncrementalDetokenizer(_TABLE, False).finish(stop, 0)[1] == "the <end>"


def test_a_text_that_stands_alone_loses_sentencepieces_leading_space_and_an_output_keeps_it() -> None:
    table = PieceTable([b" word", b" next"], (), True, 2)
    assert table.text([0, 1], True) == "word next"
    assert IncrementalDetokenizer(table, True).feed([0]) == ([0], " word")
