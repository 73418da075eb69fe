"""Token ids to text, a few at a time, such that the pieces always add up to the text of the whole.

Owns the token -> bytes table as the service uses it, and the state of one output's text, which is
what the tokenizers library's decoder makes of all its tokens, however they arrive. There are two
kinds of tables. Where each token is some bytes (ByteLevel), the text is all bytes together with
what is no UTF-8 replaced, and a token whose bytes end within a character is held back, ids and text
together, until a later token completes the character or shows it to be broken (or the output ends).
Where tokens are text, and some stand for one byte (byte fallback), a run of the latter is held back
until it is decided (`byte_run`), at most `MAX_HELD_BYTE_TOKENS` and the rest of a character. Knows
nothing of streams or messages.

Outputs continue their prompt, so that a leading space (which SentencePiece tokenizers give to the
first word) is kept: prompt and output put together are the whole text. A text that stands alone
(`StandingText`) loses it, as the tokenizer's own decoder does.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Collection, Mapping, Sequence

from headrace_service.text.byte_run import ByteRun

# A character has up to four tokens of one byte; readers of a script that the vocabulary lacks get
# four to eight characters at once. What is held back leaves in one message.
MAX_HELD_BYTE_TOKENS = 16
_EMPTY: list[int] = []


class PieceTable:
    """What each token of a vocabulary is worth in bytes.

    Args:
        pieces: per token its bytes, special tokens as their text; None for ids without a token.
        special_ids: ids of special tokens, such as an end-of-turn mark.
        strips_leading_space: whether a text that stands alone loses the space that it begins with.
        vocabulary_size: ids that the model may sample; those beyond the tokenizer's have no text.
        fallback_ids: tokens that stand for one byte where all others are text; empty where all are
            bytes.
        beginnings: what tokens are worth as the first of a text that stands alone, where that
            differs.

    Attributes:
        pieces: per token its bytes; b"" for ids without a token.
        special_ids: ids of special tokens.
        fallback_ids: tokens of one byte among tokens of text.
        strips_leading_space: see above.
        beginnings: see above.
        max_piece_bytes: length of the longest piece.
    """

    def __init__(
        self,
        pieces: Sequence[bytes | None],
        special_ids: Collection[int],
        strips_leading_space: bool,
        vocabulary_size: int,
        *,
        fallback_ids: Collection[int] = (),
        beginnings: Mapping[int, bytes] | None = None,
    ) -> None:
        self.pieces = [piece or b"" for piece in pieces]
        # A model's logits may be wider than its tokenizer's vocabulary (padding); such tokens have
        # no text.
        self.pieces += [b""] * (vocabulary_size - len(self.pieces))
        self.special_ids = frozenset(special_ids)
        self.fallback_ids = frozenset(fallback_ids)
        self.strips_leading_space = strips_leading_space
        self.beginnings = beginnings or {}
        self.max_piece_bytes = max(map(len, self.pieces))
        self._visible = [b"" if token in self.special_ids else piece for token, piece in enumerate(self.pieces)]
        self._texts = [
            None if token in self.fallback_ids else _text_or_none(piece) for token, piece in enumerate(self.pieces)
        ]
        self._visible_texts = ["" if token in self.special_ids else text for token, text in enumerate(self._texts)]

    def __len__(self) -> int:
        return len(self.pieces)

    def columns(self, skip_special: bool) -> tuple[list[bytes], list[str | None]]:
        """Returns the bytes of each token, and its text if that depends on no other token."""
        return (self._visible, self._visible_texts) if skip_special else (self.pieces, self._texts)

    def text(self, token_ids: Sequence[int], skip_special: bool) -> str:
        """Returns the text of token ids that stand alone."""
        text = StandingText(self, skip_special)
        return text.feed(list(token_ids)) + text.finish()


class IncrementalDetokenizer:
    """The text of one output while its tokens arrive.

    Args:
        table: the model's tokens.
        skip_special: whether special tokens have no text.
        max_held: tokens of a run of byte tokens that wait at most for its end.
    """

    __slots__ = ("_held", "_is_whole", "_matched_pieces", "_pieces", "_run", "_tail", "_texts")

    def __init__(self, table: PieceTable, skip_special: bool, max_held: float = MAX_HELD_BYTE_TOKENS) -> None:
        self._matched_pieces, _ = table.columns(skip_special=True)
        self._pieces, self._texts = table.columns(skip_special)
        self._held: list[int] = []
        self._tail = b""
        # None where all tokens are bytes.
        self._run = ByteRun(max_held) if table.fallback_ids else None
        # Whether nothing that came before bears on the next token.
        self._is_whole = True

    @property
    def num_held(self) -> int:
        """How many tokens wait for the rest of a character, or of a run of byte tokens."""
        return len(self._held)

    def feed(self, token_ids: list[int]) -> tuple[list[int], str]:
        """Takes the output's next tokens.

        Returns:
            The tokens up to the last one whose text is decided, those held back before included,
            and their text.
        """
        if len(token_ids) == 1 and self._is_whole:
            text = self._texts[token_ids[0]]
            if text is not None:
                return token_ids, text
        return self._feed_any(token_ids)

    def _feed_any(self, token_ids: list[int]) -> tuple[list[int], str]:
        if self._is_whole:
            texts = [self._texts[token] for token in token_ids]
            if None not in texts:
                return token_ids, "".join(texts)  # type: ignore[arg-type]
        rows = self._held + token_ids if self._held else token_ids
        boundary, text = self._decide(rows) if self._run is None else self._decide_runs(rows, self._run)
        self._held = rows[boundary:]
        self._is_whole = not (self._held or (self._run is not None and self._run.is_open))
        return (rows[:boundary], text) if boundary else (_EMPTY, "")

    def finish(self, token_ids: list[int], trim_bytes: int = 0) -> tuple[list[int], str]:
        """Takes the output's last tokens.

        Args:
            token_ids: the tokens that came with the end; may be none.
            trim_bytes: how many bytes to cut from the end; special tokens count as none, and those
                within what is cut go with it.

        Returns:
            These tokens and those held back, and their text.
        """
        rest = self._held + token_ids
        self._held, self._tail, self._is_whole = [], b"", True
        pieces = self._trimmed(rest, trim_bytes)
        if self._run is None:
            return rest, b"".join(pieces).decode("utf-8", errors="replace")
        return rest, self._finish_runs(rest, pieces, self._run)

    def _decide(self, rows: list[int]) -> tuple[int, str]:
        """Returns how many tokens end a character, or break one, and their text.

        The first `num_held` rows were looked at before.
        """
        boundary, tail = 0, self._tail
        for row in range(len(self._held), len(rows)):
            piece = self._pieces[rows[row]]
            if tail and piece and not _continues(tail, piece[:1]):
                boundary = row  # what waited is no character's beginning after all
            tail += piece
            _, consumed = codecs.utf_8_decode(tail, "replace", False)
            tail = tail[consumed:]
            if not tail:
                boundary = row + 1
        self._tail = tail
        return boundary, b"".join([self._pieces[token] for token in rows[:boundary]]).decode("utf-8", errors="replace")

    def _decide_runs(self, rows: list[int], run: ByteRun) -> tuple[int, str]:
        """Returns how many tokens are outside of undecided runs of byte tokens, and their text.

        The first `num_held` rows were looked at before.
        """
        boundary, texts = 0, []
        is_undecided = bool(self._held)
        for row in range(len(self._held), len(rows)):
            text = self._texts[rows[row]]
            if text is None:
                decided = run.add(self._pieces[rows[row]])
                is_undecided = decided is None
                texts.append(decided or "")
            elif text:
                texts += run.end(), text
                is_undecided = False
            # A token without text neither ends a run nor is let go of before it.
            if not is_undecided:
                boundary = row + 1
        return boundary, "".join(texts)

    def _finish_runs(self, token_ids: list[int], pieces: list[bytes], run: ByteRun) -> str:
        run.again()
        texts = []
        for token, piece in zip(token_ids, pieces, strict=True):
            if piece and self._texts[token] is None:
                texts.append(run.add(piece) or "")
            elif piece:
                texts += run.end(), piece.decode("utf-8", errors="replace")
        return "".join([*texts, run.end()])

    def num_trimmed(self, token_ids: list[int], trim_bytes: int) -> int:
        """Returns how many of the last tokens have the bytes that `finish` cuts."""
        for num_tokens, token in enumerate(reversed(token_ids)):
            if trim_bytes <= 0:
                return num_tokens
            trim_bytes -= len(self._matched_pieces[token])
        return len(token_ids)

    def _trimmed(self, token_ids: list[int], trim_bytes: int) -> list[bytes]:
        """Returns the tokens' bytes, less what the engine cut.

        It matches stop strings on the text without special tokens.
        """
        pieces = [self._pieces[token] for token in token_ids]
        for row in range(len(token_ids) - 1, -1, -1):
            if trim_bytes <= 0:
                break
            num_bytes = len(self._matched_pieces[token_ids[row]])
            pieces[row] = pieces[row][: max(0, num_bytes - trim_bytes)]
            trim_bytes -= num_bytes
        return pieces


class StandingText:
    """The text of tokens that stand alone, with nothing before them, while they arrive.

    Runs of byte tokens of any length are decided as a whole.
    """

    def __init__(self, table: PieceTable, skip_special: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(table, skip_special, max_held=math.inf)
        self._pieces, _ = table.columns(skip_special)
        self._strips_space = table.strips_leading_space
        # Looked up for the first token that has text.
        self._beginnings = table.beginnings

    def feed(self, token_ids: list[int]) -> str:
        """Takes the next tokens; returns text, not necessarily theirs."""
        beginning = ""
        if self._beginnings:
            first = next((row for row, token in enumerate(token_ids) if self._pieces[token]), None)
            if first is None:
                return ""
            if (piece := self._beginnings.get(token_ids[first])) is not None:
                beginning, token_ids = piece.decode("utf-8", errors="replace"), token_ids[first + 1 :]
            self._beginnings = {}
        return self._begun(beginning + self._detokenizer.feed(token_ids)[1])

    def finish(self) -> str:
        """Returns the rest of the text."""
        return self._begun(self._detokenizer.finish([])[1])

    def _begun(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


def _continues(tail: bytes, byte: bytes) -> bool:
    """Returns whether a byte continues the character that the non-empty `tail` begins.

    If not, that character never ends.
    """
    text, consumed = codecs.utf_8_decode(tail + byte, "replace", False)
    return consumed == 0 or (consumed > len(tail) and len(text) == 1)


def _text_or_none(piece: bytes) -> str | None:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return None
