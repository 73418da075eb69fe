"""Text of tokens against the tokenizers library's own decode.

Every kind of decoder, normalizer and added token, however the tokens arrive.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tokenizers import Tokenizer

from headrace_model_folder.token_table import parse_token_table
from headrace_service.text.detokenizer import MAX_HELD_BYTE_TOKENS, IncrementalDetokenizer, PieceTable, StandingText
from headrace_service.text.text_model import piece_table

_SPACE_BACK = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_FALLBACK, _FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_SPACE_AWAY = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREPEND = {"type": "Prepend", "prepend": "▁"}


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(parts)}


def _metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}


_DECODERS = {
    "llama": _sequence(_SPACE_BACK, _FALLBACK, _FUSE, _STRIP),
    "gemma": _sequence(_SPACE_BACK, _FALLBACK, _FUSE),
    "metaspace": _metaspace("always"),
    "metaspace-first": _metaspace("first"),
    "metaspace-never": _metaspace("never"),
    "metaspace-bytes": _sequence(_metaspace("always"), _FALLBACK),
    "metaspace-fused": _sequence(_metaspace("always"), _FALLBACK, _FUSE, _STRIP),
    "byte-level": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
}
_NORMALIZERS = {
    "none": None,
    "prepend": {"type": "Sequence", "normalizers": [_PREPEND, _SPACE_AWAY]},
    "replace": _SPACE_AWAY,
    "lowercase": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}, _PREPEND]},
}
_BYTES = [*range(0x30, 0x43), *"é東🙂".encode(), 0xFF, 0xC0, 0xED, 0xA0, 0xF4, 0x90, 0xE2, 0x20]
_WORDS = [
    "x",
    "▁",
    "▁▁",
    "▁the",
    "end",
    "a▁b",
    "▁▁▁of▁",
    "Ġ",
    "Ġthe",
    "Ã",
    "©",
    "æĿ",
    "±",
    "Ċ",
    "東",
    "ø",
    "<0x4",
    "<0xGG>",
]
_TOKENS = list(dict.fromkeys([*_WORDS, *(f"<0x{byte:02X}>" for byte in _BYTES)]))
# Contents, of which some have spaces, capitals and characters of the byte-level alphabet.
_ADDED = ["<s>", "<tool>", "<Big One>", " lead", "trail ", "Ž", "ÿ", "<▁>", "<0x7E>"]
# Special, normalized. Of special tokens whose text the normalizer changes the library (0.23)
# forgets that they are special: see the last test.
_PROPERTIES = [(False, False), (False, True), (True, False)]


@functools.cache
def tables(decoder: str, normalizer: str, kinds: int) -> tuple[Tokenizer, PieceTable]:
    """A tokenizer and our table of it.

    `kinds` says which of the added tokens are special, and which are looked for in normalized text.
    """
    added = []
    for index, content in enumerate(_ADDED):
        special, normalized = (True, True) if kinds < 0 else _PROPERTIES[(kinds >> index) % len(_PROPERTIES)]
        plain = {"single_word": False, "lstrip": False, "rstrip": False}
        added.append(
            {"id": len(_TOKENS) + index, "content": content, "special": special, "normalized": normalized, **plain}
        )
    source = json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": _NORMALIZERS[normalizer],
            "decoder": _DECODERS[decoder],
            "model": {"type": "BPE", "vocab": {token: number for number, token in enumerate(_TOKENS)}, "merges": []},
        }
    )
    return Tokenizer.from_str(source), piece_table(parse_token_table(source.encode()), len(_TOKENS) + len(_ADDED) + 3)


_ids = st.lists(
    st.one_of(
        st.integers(0, len(_TOKENS) + len(_ADDED) + 2),
        st.integers(len(_WORDS), len(_TOKENS) - 1),
        st.integers(len(_TOKENS), len(_TOKENS) + len(_ADDED) - 1),
    ),
    max_size=24,
)
_splits = st.lists(st.integers(1, 6), min_size=1, max_size=24)
_cases = st.tuples(st.sampled_from(sorted(_DECODERS)), st.sampled_from(sorted(_NORMALIZERS)), st.integers(0, 255))


def parts(ids: list[int], splits: list[int]) -> list[list[int]]:
    cut, begin = [], 0
    while begin < len(ids):
        size = splits[len(cut) % len(splits)]
        cut.append(ids[begin : begin + size])
        begin += size
    return cut


def numbers(*tokens: str) -> list[int]:
    return [_TOKENS.index(token) if token in _TOKENS else len(_TOKENS) + _ADDED.index(token) for token in tokens]


@settings(max_examples=examples(600), deadline=None)
@example(("llama", "none", 0), numbers("<0x41>", "<0xFF>"), [1], True)
@example(("llama", "prepend", 1), numbers("end", "<tool>"), [1], True)
@example(("metaspace", "none", 0), numbers("▁▁▁of▁", "▁the"), [1], True)
@example(("metaspace", "none", 0), numbers("<0x41>"), [1], True)
@example(("metaspace", "none", 0), numbers(" lead", "▁the"), [1], True)
@example(("byte-level", "none", 0), numbers("ÿ", "©"), [1], True)
@given(_cases, _ids, _splits, st.booleans())
def test_a_text_that_stands_alone_is_the_librarys(
    case: tuple[str, str, int], ids: list[int], splits: list[int], skip_special: bool
) -> None:
    tokenizer, table = tables(*case)
    expected = tokenizer.decode(ids, skip_special_tokens=skip_special)
    assert table.text(ids, skip_special) == expected
    standing = StandingText(table, skip_special)
    assert "".join([standing.feed(part) for part in parts(ids, splits)]) + standing.finish() == expected


@settings(max_examples=examples(600), deadline=None)
@given(_cases, _ids, _splits, st.booleans(), st.integers(0, 6))
def test_an_output_is_what_the_library_puts_behind_its_prompt(
    case: tuple[str, str, int], ids: list[int], splits: list[int], skip_special: bool, num_last: int
) -> None:
    tokenizer, table = tables(*case)
    prompt, ids = numbers("x"), ids[:MAX_HELD_BYTE_TOKENS]
    expected = tokenizer.decode(prompt + ids, skip_special_tokens=skip_special).removeprefix("x")
    detokenizer = IncrementalDetokenizer(table, skip_special)
    cut = max(0, len(ids) - num_last)
    released = [detokenizer.feed(part) for part in parts(ids[:cut], splits)]
    released.append(detokenizer.finish(ids[cut:]))
    assert "".join(text for _, text in released) == expected
    assert [token for tokens, _ in released for token in tokens] == ids
    # Ids without text, and text without ids, are never given.
    assert all(tokens or not text for tokens, text in released)


def test_byte_tokens_that_are_no_utf8_are_one_replacement_each_as_they_come() -> None:
    _, table = tables("llama", "none", 0)
    detokenizer = IncrementalDetokenizer(table, True)
    fed = [detokenizer.feed(numbers(token)) for token in ("<0x41>", "<0xFF>", "<0x42>", "end", "<0x42>", "end")]
    assert [text for _, text in fed] == ["", "��", "�", "end", "", "Bend"]


def test_a_long_run_of_byte_tokens_is_given_in_time_and_cut_between_characters() -> None:
    _, table = tables("llama", "none", 0)
    character = numbers("<0xE6>", "<0x9D>", "<0xB1>")
    detokenizer = IncrementalDetokenizer(table, True)
    text, most = "", 0
    for token in character * 40:
        text += detokenizer.feed([token])[1]
        most = max(most, detokenizer.num_held)
    # And the rest of a character.
    assert most < MAX_HELD_BYTE_TOKENS + 3
    # What was given stays; what comes after it is judged by itself.
    ids, rest = detokenizer.finish(numbers("<0xFF>"))
    assert len(ids) <= MAX_HELD_BYTE_TOKENS + 3 and text + rest == "東" * (40 - len(ids) // 3) + "�" * len(ids)
    # Where the whole is at hand it is judged as a whole, as the library does.
    assert table.text(character * 40 + numbers("<0xFF>"), True) == "�" * 121


@given(_splits, st.integers(1, 60))
def test_where_a_long_run_is_cut_does_not_depend_on_how_it_arrives(splits: list[int], num_characters: int) -> None:
    _, table = tables("llama", "none", 0)
    ids = numbers(*"<0xF0> <0x9F> <0x99> <0x82>".split()) * num_characters + numbers("<0xC0>")
    texts = []
    for cut in (parts(ids, splits), [ids], [[token] for token in ids]):
        detokenizer = IncrementalDetokenizer(table, True)
        texts.append("".join(detokenizer.feed(part)[1] for part in cut) + detokenizer.finish([])[1])
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    ("tokens", "trim_bytes", "text"),
    [
        (["<0x41>", "<0x42>", "end"], 3, "AB"),
        (["<0x41>", "<0x42>"], 1, "A"),
        # What is cut does not count: the run is UTF-8 without it.
        (["<0xE6>", "<0x9D>", "<0xB1>", "<0x42>", "<tool>"], 7, "東"),
        (["<0x41>", "<0xFF>", "end"], 1, "��en"),
    ],
)
def test_a_stop_string_is_cut_from_byte_tokens(tokens: list[str], trim_bytes: int, text: str) -> None:
    _, table = tables("llama", "none", 0)
    ids = numbers(*tokens)
    for num_fed in range(len(ids)):
        detokenizer = IncrementalDetokenizer(table, True)
        # What the engine may still cut it gives with the end.
        before = detokenizer.feed(ids[: min(num_fed, len(ids) - trim_bytes)])[1]
        assert before + detokenizer.finish(ids[min(num_fed, len(ids) - trim_bytes) :], trim_bytes)[1] == text


def test_a_special_token_is_left_out_whatever_the_normalizer_makes_of_its_text() -> None:
    _, table = tables("llama", "prepend", -1)
    ids = numbers("end", "<s>", "end")
    assert table.text(ids, True) == "endend" and table.text(ids, False) == "end <s>end"
