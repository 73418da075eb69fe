"""Token ids to text, a few at a time, such that the pieces always add up to the text of the whole.

Owns the token -> bytes table as the service uses it, and the state of one output's text. The text of an output is
`b"".join(pieces).decode("utf-8", errors="replace")`, however its tokens arrive: a token whose bytes end within a character is held back, ids and
text together, until a later token completes the character or shows it to be broken (or the output ends). Knows nothing of streams or messages.

Outputs continue their prompt, so that a leading space (which SentencePiece tokenizers give to the first word) is kept: prompt and output put
together are the whole text. A text that stands alone (`PieceTable.text`) loses it, as the tokenizer's own decoder does.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

_EMPTY: list[int] = []


class PieceTable:
    """What each token of a vocabulary is worth in bytes.

    Attributes:
        pieces: per token its bytes, special tokens as their text; b"" for ids without a token.
        special_ids: ids of special tokens, such as an end-of-turn mark.
        max_piece_bytes: length of the longest piece.
    """

    def __init__(
        self,
        pieces: Sequence[bytes | None],
        special_ids: Collection[int],
        strips_leading_space: bool,
        vocabulary_size: int,
    ) -> None:
        self.pieces = [piece or b"" for piece in pieces]
        # A model's logits may be wider than its tokenizer's vocabulary (padding); such tokens have no text.
        self.pieces += [b""] * (vocabulary_size - len(self.pieces))
        self.special_ids = frozenset(special_ids)
        self.max_piece_bytes = max(map(len, self.pieces))
        self._strips_leading_space = strips_leading_space
        self._visible = [b"" if token in self.special_ids else piece for token, piece in enumerate(self.pieces)]
        self._texts = _whole_texts(self.pieces)
        self._visible_texts = ["" if token in self.special_ids else text for token, text in enumerate(self._texts)]

    def __len__(self) -> int:
        return len(self.pieces)

    def columns(self, skip_special: bool) -> tuple[list[bytes], list[str | None]]:
        """Returns, per token, its bytes, and its text if its bytes are whole characters."""
        return (self._visible, self._visible_texts) if skip_special else (self.pieces, self._texts)

    def text(self, token_ids: Sequence[int], skip_special: bool) -> str:
        """Returns the text of token ids that stand alone."""
        return self.decode_alone(self.join(token_ids, skip_special))

    def join(self, token_ids: Sequence[int], skip_special: bool) -> bytes:
        """Returns the bytes of token ids."""
        pieces, _ = self.columns(skip_special)
        return b"".join([pieces[token] for token in token_ids])

    def decode_alone(self, joined: bytes | bytearray) -> str:
        """Returns the text of all the bytes of token ids that stand alone."""
        text = joined.decode("utf-8", errors="replace")
        return text[1:] if self._strips_leading_space and text.startswith(" ") else text


class IncrementalDetokenizer:
    """The text of one output while its tokens arrive."""

    __slots__ = ("_held", "_matched_pieces", "_pieces", "_tail", "_texts")

    def __init__(self, table: PieceTable, skip_special: bool) -> None:
        self._matched_pieces, _ = table.columns(skip_special=True)
        self._pieces, self._texts = table.columns(skip_special)
        self._held: list[int] = []
        self._tail = b""

    @property
    def num_held(self) -> int:
        """How many tokens wait for the rest of a character."""
        return len(self._held)

    def feed(self, token_ids: list[int]) -> tuple[list[int], str]:
        """Takes the output's next tokens.

        Returns:
            The tokens up to the last whole character, those held back before included, and their text.
        """
        if len(token_ids) == 1 and not self._held:
            text = self._texts[token_ids[0]]
            if text is not None:
                return token_ids, text
        return self._feed_any(token_ids)

    def finish(self, token_ids: list[int], trim_bytes: int = 0) -> tuple[list[int], str]:
        """Takes the output's last tokens.

        Args:
            token_ids: the tokens that came with the end; may be none.
            trim_bytes: how many bytes to cut from the end; special tokens count as none, and those within what is cut go with it.

        Returns:
            These tokens and those held back, and their text.
        """
        rest = self._held + token_ids
        self._held, self._tail = [], b""
        return rest, b"".join(self._trimmed(rest, trim_bytes)).decode("utf-8", errors="replace")

    def _feed_any(self, token_ids: list[int]) -> tuple[list[int], str]:
        rows = self._held + token_ids if self._held else token_ids
        first_new, boundary, tail = len(self._held), 0, self._tail
        for row in range(first_new, len(rows)):
            piece = self._pieces[rows[row]]
            if tail and piece and not _continues(tail, piece[:1]):
                boundary = row  # what waited is no character's beginning after all
            tail += piece
            _, consumed = codecs.utf_8_decode(tail, "replace", False)
            tail = tail[consumed:]
            if not tail:
                boundary = row + 1
        self._tail = tail
        self._held = rows[boundary:]
        if boundary == 0:
            return _EMPTY, ""
        released = rows[:boundary]
        return released, b"".join([self._pieces[token] for token in released]).decode("utf-8", errors="replace")

    def num_trimmed(self, token_ids: list[int], trim_bytes: int) -> int:
        """Returns how many of the last tokens have the bytes that `finish` cuts."""
        for num_tokens, token in enumerate(reversed(token_ids)):
            if trim_bytes <= 0:
                return num_tokens
            trim_bytes -= len(self._matched_pieces[token])
        return len(token_ids)

    def _trimmed(self, token_ids: list[int], trim_bytes: int) -> list[bytes]:
        """Returns the tokens' bytes, less what the engine cut: it matches stop strings on the text without special tokens."""
        pieces = [self._pieces[token] for token in token_ids]
        for row in range(len(token_ids) - 1, -1, -1):
            if trim_bytes <= 0:
                break
            num_bytes = len(self._matched_pieces[token_ids[row]])
            pieces[row] = pieces[row][: max(0, num_bytes - trim_bytes)]
            trim_bytes -= num_bytes
        return pieces


def _continues(tail: bytes, byte: bytes) -> bool:
    """Whether a byte adds to the character that the non-empty `tail` begins, rather than showing that it never ends."""
    text, consumed = codecs.utf_8_decode(tail + byte, "replace", False)
    return consumed == 0 or (consumed > len(tail) and len(text) == 1)


def _whole_texts(pieces: Sequence[bytes]) -> list[str | None]:
    """Returns per piece its text; None if it begins or ends within a character."""
    return [_text_or_none(piece) for piece in pieces]


def _text_or_none(piece: bytes) -> str | None:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return None
