"""Token id -> bytes, from tokenizer.json: what the detokenizer and the stop-string matcher work on.

Owns the reading of vocabulary and added tokens, of BPE tokenizers only; what a token's bytes are is
`token_decoder`'s. Joining the bytes of a token sequence gives the bytes of its text, but for byte
tokens that are no UTF-8 together (`TokenTable.fallback_ids`). Encoding text is not done here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import tokenizers

from headrace_model_folder.bounded_files import MIB, read_bytes
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.token_decoder import TokenDecoder, read_decoder

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_LIMIT = 128 * MIB
_MAX_TOKENS = 1 << 22


@dataclasses.dataclass(frozen=True, slots=True)
class TokenTable:
    """The bytes of each token."""

    # [number of ids] None where an id stands for nothing.
    token_bytes: tuple[bytes | None, ...]
    # Tokens that mark structure and are no part of the answer's text.
    special_ids: frozenset[int]
    # Tokens that stand for one byte where all others are text: consecutive ones that are no UTF-8
    # together are one U+FFFD each. Empty where every token is bytes.
    fallback_ids: frozenset[int]
    # SentencePiece puts a space before the text; its decoder takes one off again, at the very start
    # only.
    strips_leading_space: bool
    # What tokens are worth as the first of a text, where that differs: Metaspace takes the spaces
    # off the first token.
    beginnings: Mapping[int, bytes]

    def digest(self) -> str:
        """12 hexadecimal digits that are the same for vocabularies whose ids mean the same."""
        digest = hashlib.sha256()
        for number, text in enumerate(self.token_bytes):
            kind = b"-" if text is None else b"s" if number in self.special_ids else b"t"
            digest.update(b"%s%d:%s" % (kind, len(text or b""), text or b""))
        return digest.hexdigest()[:12]


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False
    normalized: bool = False


class _Tokenizer(msgspec.Struct):
    model: msgspec.Raw
    decoder: dict[str, Any] | None = None
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    added_tokens: list[_AddedToken] = []


class _ModelKind(msgspec.Struct):
    # Old files leave the type out for BPE.
    type: str = "BPE"


class _BpeModel(msgspec.Struct):
    vocab: dict[str, int]


def token_bytes(tokenizer_json_path: pathlib.Path | str) -> list[bytes | None]:
    """The bytes of each token id, as a list.

    Raises InvalidModelFolder as `read_token_table` does.
    """
    return list(read_token_table(tokenizer_json_path).token_bytes)


def read_token_table(tokenizer_json_path: pathlib.Path | str) -> TokenTable:
    """Builds the table from a tokenizer.json.

    Raises:
        InvalidModelFolder: the file is unreadable, or its tokenizer is of a kind that has no such
            table.
    """
    path = pathlib.Path(tokenizer_json_path)
    return parse_token_table(read_bytes(path.parent, path.name, TOKENIZER_LIMIT))


def parse_token_table(data: bytes) -> TokenTable:
    """Builds the table from a tokenizer.json's bytes.

    Raises InvalidModelFolder as `read_token_table` does.
    """
    try:
        tokenizer = msgspec.json.decode(data, type=_Tokenizer)
        kind = msgspec.json.decode(tokenizer.model, type=_ModelKind).type
        if kind != "BPE":
            raise InvalidModelFolder(f"{TOKENIZER_FILE}: model.type must be 'BPE', is {shown(kind)}")
        vocab = msgspec.json.decode(tokenizer.model, type=_BpeModel).vocab
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidModelFolder(f"{TOKENIZER_FILE}: is not a BPE tokenizer: {str(error)[:120]}") from None
    decoder = read_decoder(tokenizer.decoder, TOKENIZER_FILE)
    texts = {number: token for token, number in vocab.items()}
    texts.update(_added_texts(tokenizer.added_tokens, tokenizer.normalizer))
    special = frozenset(token.id for token in tokenizer.added_tokens if token.special)
    return _table(texts, decoder, special)


def _table(texts: dict[int, str], decoder: TokenDecoder, special: frozenset[int]) -> TokenTable:
    if not texts or min(texts) < 0 or max(texts) >= _MAX_TOKENS:
        raise InvalidModelFolder(f"{TOKENIZER_FILE}: token ids must be from 0 to {_MAX_TOKENS - 1}")
    pieces = {number: decoder.piece(text) for number, text in texts.items()}
    is_marked = decoder.has_byte_fallback or decoder.drops_first_spaces
    beginnings = {number: decoder.beginning(text) for number, text in texts.items()} if is_marked else {}
    return TokenTable(
        token_bytes=tuple(pieces.get(number) for number in range(max(texts) + 1)),
        special_ids=special,
        fallback_ids=frozenset(number for number, text in texts.items() if is_marked and decoder.is_byte(text)),
        strips_leading_space=decoder.strips_leading_space,
        beginnings={number: piece for number, piece in beginnings.items() if piece is not None},
    )


def _added_texts(added: Sequence[_AddedToken], normalizer: msgspec.Raw) -> dict[int, str]:
    """What each added token is to the decoder.

    It is its content, or what the normalizer makes of it where it is looked for in normalized text.
    """
    texts = {token.id: token.content for token in added}
    normalized = [token for token in added if token.normalized]
    if bytes(normalizer) == b"null" or not normalized:
        return texts
    library = _library_of(normalized, normalizer)
    for token in normalized:
        number = library.token_to_id(token.content)
        text = library.id_to_token(number) if number is not None else None
        texts[token.id] = token.content if text is None else text
    return texts


def _library_of(added: Sequence[_AddedToken], normalizer: msgspec.Raw) -> tokenizers.Tokenizer:
    """A tokenizer of nothing but a normalizer and added tokens: the library says what they become.

    Raises InvalidModelFolder.
    """
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    source = {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": token.content, "special": token.special, "normalized": True, **plain}
            for number, token in enumerate(added)
        ],
        "normalizer": normalizer,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    return library_tokenizer(msgspec.json.encode(source), "normalizer")


def library_tokenizer(data: bytes, what: str = "tokenizer") -> tokenizers.Tokenizer:
    """Returns what the tokenizers library makes of a tokenizer.json's bytes.

    Args:
        data: The bytes.
        what: The part of the file that they come from, for the error.

    Raises:
        InvalidModelFolder: the library can't use them.
    """
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    # the library's panics are no Exceptions, and its errors nothing more particular
    except BaseException as error:
        raise InvalidModelFolder(f"{TOKENIZER_FILE}: {what} can't be used: {str(error)[:120]}") from None
