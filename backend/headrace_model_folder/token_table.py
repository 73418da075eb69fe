"""Token id -> bytes, from tokenizer.json: what the detokenizer and the stop-string matcher work on.

Owns two kinds of BPE: byte-level (GPT-2, Llama 3, Qwen: each character of a token stands for one byte) and SentencePiece-style (Llama 2, Mistral: "▁" is a
space, <0xNN> is one byte). Joining the bytes of a token sequence gives the bytes of its text. Encoding text is not done here.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

import msgspec

from headrace_model_folder.bounded_files import MIB, read_bytes
from headrace_model_folder.errors import InvalidModelFolder, shown

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_LIMIT = 128 * MIB
_MAX_TOKENS = 1 << 22
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenTable:
    """The bytes of each token."""

    # [number of ids] None where an id stands for nothing. Added and special tokens have their own text.
    token_bytes: tuple[bytes | None, ...]
    # Tokens that mark structure and are no part of the answer's text.
    special_ids: frozenset[int]
    # SentencePiece puts a space before the text; its decoder takes one off again, at the very start only.
    strips_leading_space: bool


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Tokenizer(msgspec.Struct):
    model: msgspec.Raw
    decoder: dict[str, Any] | None = None
    added_tokens: list[_AddedToken] = []


class _ModelKind(msgspec.Struct):
    # Old files leave the type out for BPE.
    type: str = "BPE"


class _BpeModel(msgspec.Struct):
    vocab: dict[str, int]


def token_bytes(tokenizer_json_path: pathlib.Path | str) -> list[bytes | None]:
    """The bytes of each token id, as a list. Raises InvalidModelFolder as `read_token_table` does."""
    return list(read_token_table(tokenizer_json_path).token_bytes)


def read_token_table(tokenizer_json_path: pathlib.Path | str) -> TokenTable:
    """Builds the table from a tokenizer.json.

    Raises:
        InvalidModelFolder: the file is unreadable, or its tokenizer is of a kind that has no such table.
    """
    path = pathlib.Path(tokenizer_json_path)
    return parse_token_table(read_bytes(path.parent, path.name, TOKENIZER_LIMIT))


def parse_token_table(data: bytes) -> TokenTable:
    """Builds the table from a tokenizer.json's bytes. Raises InvalidModelFolder as `read_token_table` does."""
    try:
        tokenizer = msgspec.json.decode(data, type=_Tokenizer)
        kind = msgspec.json.decode(tokenizer.model, type=_ModelKind).type
        if kind != "BPE":
            raise InvalidModelFolder(f"{TOKENIZER_FILE}: model.type must be 'BPE', is {shown(kind)}")
        vocab = msgspec.json.decode(tokenizer.model, type=_BpeModel).vocab
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidModelFolder(f"{TOKENIZER_FILE}: is not a BPE tokenizer: {str(error)[:120]}") from None
    decoders = _flatten_decoder(tokenizer.decoder)
    if [d.get("type") for d in decoders] == ["ByteLevel"]:
        texts = {number: _byte_level_bytes(token) for token, number in vocab.items()}
        return _table(texts, tokenizer.added_tokens, strips_leading_space=False)
    strips = _sentencepiece_strips(decoders)
    texts = {number: _sentencepiece_bytes(token) for token, number in vocab.items()}
    return _table(texts, tokenizer.added_tokens, strips_leading_space=strips)


def _table(texts: dict[int, bytes], added: list[_AddedToken], strips_leading_space: bool) -> TokenTable:
    texts.update((token.id, token.content.encode()) for token in added)
    if not texts or min(texts) < 0 or max(texts) >= _MAX_TOKENS:
        raise InvalidModelFolder(f"{TOKENIZER_FILE}: token ids must be from 0 to {_MAX_TOKENS - 1}")
    table = tuple(texts.get(number) for number in range(max(texts) + 1))
    special = frozenset(token.id for token in added if token.special)
    return TokenTable(table, special, strips_leading_space)


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 characters stand for themselves, the other bytes for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # a token from outside the alphabet stands for its own text
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(_SPACE, " ").encode()


def _flatten_decoder(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    parts = decoder.get("decoders")
    return parts if isinstance(parts, list) and all(isinstance(part, dict) for part in parts) else [decoder]


def _sentencepiece_strips(decoders: list[dict[str, Any]]) -> bool:
    """Whether the decoder takes a space off the start. Raises for a decoder that is not SentencePiece-style."""
    replaces, strips = False, False
    for decoder in decoders:
        match decoder:
            case {"type": "Metaspace", "replacement": "\u2581"}:
                replaces = True
                strips = decoder.get("prepend_scheme", "always") != "never" and decoder.get("add_prefix_space", True)
            case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
                replaces = True
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                strips = start == 1
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise _unknown_decoder(decoder.get("type"))
    if not replaces:
        raise _unknown_decoder([decoder.get("type") for decoder in decoders])
    return bool(strips)


def _unknown_decoder(kind: object) -> InvalidModelFolder:
    known = (
        "ByteLevel, Metaspace, or a sequence of Replace, ByteFallback, Fuse, Strip as SentencePiece conversions have it"
    )
    text = ", ".join(map(str, kind)) if isinstance(kind, list) else str(kind)
    return InvalidModelFolder(f"{TOKENIZER_FILE}: decoder must be {known}, is {shown(text)}")
