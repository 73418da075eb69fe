"""What a tokenizer.json's decoder makes of single tokens: bytes, and how a text begins.

Owns the forms of decoders that a table of bytes per token can stand for: ByteLevel (GPT-2, Llama 3,
Qwen: each character of a token stands for one byte) and SentencePiece-style ones (Llama 2, Mistral,
Gemma: U+2581 is a space, and under ByteFallback <0xNN> is one byte). The tokenizers library sends
all tokens through its decoder, added and special ones too, and so does this file.
"""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import re
from typing import Any

from headrace_model_folder.errors import InvalidModelFolder, shown

# Two characters that Rust reads as a number in base 16, as the library does.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
_SPACE = "\u2581"
_KNOWN = (
    "ByteLevel, Metaspace, or a sequence of Replace, ByteFallback, Fuse, Strip as SentencePiece conversions have it"
)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenDecoder:
    """A decoder, as far as it concerns single tokens.

    Attributes:
        is_byte_level: characters of tokens stand for bytes; otherwise tokens are text.
        has_byte_fallback: <0xNN> is a byte.
        strips_leading_space: a text that stands alone loses one space at its start.
        drops_first_spaces: the first token of a text that stands alone loses all its U+2581.
    """

    is_byte_level: bool = False
    has_byte_fallback: bool = False
    strips_leading_space: bool = False
    drops_first_spaces: bool = False

    def is_byte(self, token: str) -> bool:
        """Whether a token stands for one byte where others are text."""
        return self.has_byte_fallback and _BYTE_TOKEN.fullmatch(token) is not None

    def piece(self, token: str) -> bytes:
        """The bytes of a token."""
        if self.is_byte_level:
            return _byte_level_bytes(token)
        match = _BYTE_TOKEN.fullmatch(token) if self.has_byte_fallback else None
        return bytes([int(match[1], 16)]) if match else token.replace(_SPACE, " ").encode()

    def beginning(self, token: str) -> bytes | None:
        """The bytes of a token as the first of a text; None if they are the same as elsewhere."""
        return token.replace(_SPACE, "").encode() if self.drops_first_spaces and _SPACE in token else None


def read_decoder(decoder: dict[str, Any] | None, file: str) -> TokenDecoder:
    """Reads the decoder of a tokenizer.json.

    Raises InvalidModelFolder for one that no table of bytes per token stands for.
    """
    parts = _flatten(decoder)
    if [part.get("type") for part in parts] == ["ByteLevel"]:
        return TokenDecoder(is_byte_level=True)
    read = TokenDecoder()
    replaces = fuses = False
    for part in parts:
        match part:
            case {"type": "Metaspace", "replacement": "\u2581"} if not fuses:
                replaces = True
                keeps = part.get("prepend_scheme", "always") == "never" or not part.get("add_prefix_space", True)
                read = dataclasses.replace(read, drops_first_spaces=not keeps)
            case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
                replaces = True
            case {"type": "ByteFallback"} if not fuses:
                read = dataclasses.replace(read, has_byte_fallback=True)
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if fuses or start == 0:
                read = dataclasses.replace(read, strips_leading_space=start == 1)
            case {"type": "Fuse"}:
                fuses = True
            case _:
                raise _unknown(file, [part.get("type") for part in parts])
    if not replaces:
        raise _unknown(file, [part.get("type") for part in parts])
    return read


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    parts = decoder.get("decoders")
    return parts if isinstance(parts, list) and all(isinstance(part, dict) for part in parts) else [decoder]


def _unknown(file: str, kinds: list[object]) -> InvalidModelFolder:
    return InvalidModelFolder(f"{file}: decoder must be {_KNOWN}, is {shown(', '.join(map(str, kinds)))}")


def _characters_of_bytes() -> str:
    """The byte-level alphabet, in the order of the bytes that its characters stand for.

    Printable Latin-1 characters stand for themselves, the other bytes for characters from U+0100
    on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


# A character set of its own to Python's codecs, which are twice as quick as a loop: a
# vocabulary has 100,000 tokens and more, and each process of a server reads it.
_BYTE_LEVEL = codecs.charmap_build(_characters_of_bytes())


def _byte_level_bytes(token: str) -> bytes:
    try:
        return codecs.charmap_encode(token, "strict", _BYTE_LEVEL)[0]
    except UnicodeEncodeError:  # a token with a character from outside the alphabet stands for its own text
        return token.encode()
