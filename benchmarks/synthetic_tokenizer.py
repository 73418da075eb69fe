"""A byte-level BPE of any size, made from syllables.

It is for measuring text in and out where no published tokenizer may lie.

Owns its vocabulary and merges. Words are syllables of a consonant and a vowel (" badogu"); merges
begin at the space before a word and take syllable after syllable, so each word of up to three
syllables that is in the vocabulary is one token, and any text goes through to the same bytes.
Deterministic: the same size gives the same file.

Ids in order: 256 bytes; 120 syllables; words (a space and one, two, then three syllables); 256
special tokens at the end.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Iterator

NUM_SPECIAL = 256
_CONSONANTS = "bcdfghjklmnpqrstvwxz"
_VOWELS = "aeiouy"
_SPACE = "\u0120"
NUM_SYLLABLES = len(_CONSONANTS) * len(_VOWELS)
# The first id that is a word of its own, whatever stands beside it.
FIRST_WORD = 256 + NUM_SYLLABLES


def _byte_characters() -> list[str]:
    """The byte-level alphabet.

    Printable Latin-1 stands for itself, the other bytes for characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _merges() -> Iterator[tuple[str, str]]:
    """Endless enough: syllables, then words by their number of syllables."""
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    yield from ((syllable[0], syllable[1]) for syllable in syllables)
    for length in (1, 2, 3):
        for parts in itertools.product(syllables, repeat=length):
            yield _SPACE + "".join(parts[:-1]), parts[-1]


def write_tokenizer(path: pathlib.Path, vocab_size: int) -> None:
    """Writes a tokenizer.json of exactly `vocab_size` entries.

    Raises:
        ValueError: The size leaves no room for words, or needs words of four syllables.
    """
    num_merges = vocab_size - 256 - NUM_SPECIAL
    most = sum(NUM_SYLLABLES**length for length in (1, 1, 2, 3))
    if not NUM_SYLLABLES < num_merges <= most:
        raise ValueError(f"vocab_size must be from {513 + NUM_SYLLABLES} to {512 + most}, is {vocab_size}")
    merges = list(itertools.islice(_merges(), num_merges))
    entries = [*_byte_characters(), *("".join(pair) for pair in merges)]
    special = [{"id": len(entries) + n, "content": f"<|special {n}|>"} for n in range(NUM_SPECIAL)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**token, **flags} for token in special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text: number for number, text in enumerate(entries)},
            "merges": merges,
        },
    }
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def as_words(token_ids: list[int], vocab_size: int) -> list[int]:
    """Replaces ids that are no words of their own.

    So their text is encoded to exactly these ids again.
    """
    num_words = vocab_size - NUM_SPECIAL - FIRST_WORD
    return [
        token if FIRST_WORD <= token < FIRST_WORD + num_words else FIRST_WORD + token % num_words for token in token_ids
    ]
