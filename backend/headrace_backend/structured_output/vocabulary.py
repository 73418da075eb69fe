"""The model's vocabulary as llguidance has it.

Owns the way from a table of bytes per token to `LLTokenizer`. Does not own the table
(`headrace_model_folder.token_table`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import llguidance
import msgspec

from headrace_model_folder import ModelFolder
from headrace_model_folder.token_table import library_tokenizer

# Gives the tokens of a text. Where a grammar leaves one text only, its tokens are the tokenizer's.
Encode = Callable[[str], list[int]]


class Vocabulary(msgspec.Struct, frozen=True):
    """Tokens and what they are worth."""

    # [vocab_size] b"" for ids without a text, special tokens as their names.
    token_bytes: list[bytes]
    special_ids: list[int]
    # The model's end-of-text tokens; at least 1.
    end_ids: list[int]

    @property
    def size(self) -> int:
        """Number of token ids that the model may draw."""
        return len(self.token_bytes)


def read_vocabulary(folder: ModelFolder) -> Vocabulary | None:
    """The vocabulary of a model folder; None if it has no tokenizer, or no end-of-text token."""
    table, end_ids = folder.token_table, folder.generation_defaults.eos_token_ids
    if table is None or not end_ids:
        return None
    texts = [text or b"" for text in table.token_bytes]
    # A model often has more ids than its tokenizer has tokens.
    texts += [b""] * (folder.config.vocab_size - len(texts))
    return Vocabulary(texts, sorted(table.special_ids), list(end_ids))


def folder_encode(folder: ModelFolder) -> Encode:
    """The folder's own tokenizer, without its post-processor.

    Raises:
        InvalidModelFolder: The file has gone or changed.
    """
    tokenizer = library_tokenizer(folder.tokenizer_json())
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


class _Tokenizer:
    """What llguidance asks of a tokenizer."""

    bos_token_id: Final = None

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self.tokens: Sequence[bytes] = vocabulary.token_bytes
        self.special_token_ids: Sequence[int] = vocabulary.special_ids
        self.eos_token_id = vocabulary.end_ids[0]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode() if isinstance(text, bytes) else text)


def folder_tokenizer(vocabulary: Vocabulary, folder: ModelFolder) -> llguidance.LLTokenizer:
    """The vocabulary in llguidance's form, with the folder's own tokenizer.

    Takes up to some seconds.

    Raises:
        InvalidModelFolder: The file has gone or changed.
    """
    made = _read_by_library(vocabulary, folder.tokenizer_json().decode())
    return made if made is not None else make_tokenizer(vocabulary, folder_encode(folder))


def _read_by_library(vocabulary: Vocabulary, tokenizer_json: str) -> llguidance.LLTokenizer | None:
    """The tokenizer as llguidance reads it by itself; None where its tokens are not ours.

    Masks then never ask Python for the tokens of a text, for which their threads would wait for
    the interpreter's lock.
    """
    try:
        made = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocabulary.size, eos_token=vocabulary.end_ids)
    # It panics on some of those that it does not know.
    except BaseException:
        return None
    special = frozenset(vocabulary.special_ids)

    def is_same(token: int, text: bytes) -> bool:
        # This byte marks special tokens there.
        if text.startswith(b"\xff"):
            return True
        return made.decode_bytes([token]) == text and made.is_special_token(token) == (token in special)

    if made.vocab_size != vocabulary.size or not all(map(is_same, range(vocabulary.size), vocabulary.token_bytes)):
        return None
    return made


def make_tokenizer(vocabulary: Vocabulary, encode: Encode | None = None) -> llguidance.LLTokenizer:
    """The vocabulary in llguidance's form, which takes up to a second to make.

    Args:
        vocabulary: The model's.
        encode: Tokens of a text; None: the longest tokens that fit, from the left. Which texts a
            grammar allows does not depend on it.
    """
    made: list[llguidance.LLTokenizer] = []

    def longest_first(text: str) -> list[int]:
        return made[0].greedy_tokenize(text) if made else []

    wrapped = llguidance.TokenizerWrapper(_Tokenizer(vocabulary, encode or longest_first))
    made.append(llguidance.LLTokenizer(wrapped, n_vocab=vocabulary.size, eos_token=vocabulary.end_ids))
    return made[0]
