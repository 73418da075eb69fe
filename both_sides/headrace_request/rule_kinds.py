"""The kinds of rule that a value of a request may have to keep, and their words.

A caller hears of a broken rule in these words.

Owns kinds and words; which field keeps which rule is `rules`' table.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace_request import limits
from headrace_request.sampling import Sampling
from headrace_request.stop import Stop

# Entries of one column that are named one by one.
_MAX_NAMED = 4
TOKEN_BYTES = 4


class Violation(NamedTuple):
    """One broken rule.

    `field` is its path in headrace.v1, such as "spec.sampling.top_p"; `description` is the rule
    with its limit.
    """

    field: str
    description: str


class Bounds(NamedTuple):
    """Limits that the model and its configuration set.

    Attributes:
        vocabulary_size: Token ids are below it.
        max_context_tokens: Most tokens of prompt and output together.
        max_outputs: Largest n.
        end_of_text_token_ids: Stop tokens that do not count as the request's own.
        max_drafts: Most drafted tokens that a step verifies for an output; 0: nothing is drafted.
    """

    vocabulary_size: int
    max_context_tokens: int
    max_outputs: int
    end_of_text_token_ids: frozenset[int] = frozenset()
    max_drafts: int = 0


Found = Sequence[Violation]


class Rule(Protocol):
    """What one value must be."""

    def broken(self, field: str, value: Any, bounds: Bounds) -> Found:
        """Returns how the value breaks the rule; nothing if it keeps it."""


def float32(value: float) -> float:
    """Returns a number as a wire of 4 bytes has it."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def unknown_tokens(field: str, wrong: Sequence[int], vocabulary_size: int) -> Found:
    """Returns a violation for each of the first few tokens that the vocabulary lacks."""
    return _named(field, wrong, f"must be below the vocabulary size, {vocabulary_size}") if wrong else ()


def _named(field: str, entries: Sequence[int], description: str) -> list[Violation]:
    return [Violation(f"{field}[{entry}]", description) for entry in entries[:_MAX_NAMED]]


class Range:
    """A finite number in a range. Bounds count as rounded to float32, as callers' wires have them.

    A comparison with NaN is false, so that NaN is in no range.
    """

    def __init__(self, low: float, high: float, *, above_low: bool = False, zero: str = "") -> None:
        """Takes the bounds.

        Args:
            low: Smallest number.
            high: Largest number.
            above_low: Whether `low` itself is outside.
            zero: What 0 means, where it is allowed besides the range.
        """
        self._low, self._high = float32(low), float32(high)
        self._above_low = above_low
        self._zero = bool(zero)
        least = f"{'above' if above_low else 'at least'} {low:g}"
        self._text = f"must be {f'0 ({zero}), or ' if zero else ''}{least} and at most {high:g}"

    def broken(self, field: str, value: float, bounds: Bounds) -> Found:
        """Returns how the number breaks the rule; nothing if it keeps it."""
        if (self._low < value if self._above_low else self._low <= value) and value <= self._high:
            return ()
        if self._zero and value == 0:
            return ()
        return (Violation(field, self._text),)


class Whole:
    """A whole number in a range, of which the upper end may be one of the bounds."""

    def __init__(self, low: int, high: int | Callable[[Bounds], int], *, unsigned: bool = False) -> None:
        """Takes the bounds.

        Args:
            low: Smallest number.
            high: Largest number, or where it stands.
            unsigned: Whether no caller can send a number below `low`, so that no message mentions
                it.
        """
        self._low = low
        self._high = high if callable(high) else lambda bounds: high
        self._unsigned = unsigned

    def broken(self, field: str, value: int, bounds: Bounds) -> Found:
        """Returns how the number breaks the rule; nothing if it keeps it."""
        high = self._high(bounds)
        if self._low <= value <= high:
            return ()
        return (Violation(field, f"must be {'' if self._unsigned else f'at least {self._low} and '}at most {high}"),)


class MaxDrafts:
    """A number of drafts that a step may verify; -1: as many as the server has; 0: none.

    A number above the server's own is no more than a limit that does not apply. Where nothing is
    drafted any number is refused: whoever asks for speculation is to know that there is none.
    """

    def broken(self, field: str, value: int, bounds: Bounds) -> Found:
        """Returns how the number breaks the rule; nothing if it keeps it."""
        if not -1 <= value <= limits.MAX_DRAFTS:
            return (Violation(field, f"must be at least 1 and at most {limits.MAX_DRAFTS}"),)
        if value > 0 and not bounds.max_drafts:
            return (Violation(field, f"is {value}, and this server drafts nothing: it was started without speculate"),)
        return ()


class ByteLength:
    """Bytes of at most a length."""

    def __init__(self, most: int) -> None:
        """Takes the limit."""
        self._most = most

    def broken(self, field: str, value: bytes, bounds: Bounds) -> Found:
        """Returns how the bytes break the rule; nothing if they keep it."""
        return () if len(value) <= self._most else (Violation(field, f"must have at most {self._most} bytes"),)


class Texts:
    """A number of texts in UTF-8, none of them empty, each of at most a length."""

    def __init__(self, most: int, most_bytes: int) -> None:
        """Takes the limits: of texts, and of the bytes of each."""
        self._most = most
        self._most_bytes = most_bytes

    def broken(self, field: str, value: Sequence[bytes], bounds: Bounds) -> Found:
        """Returns how the texts break the rule; nothing if they keep it."""
        if len(value) > self._most:
            return (Violation(field, f"must have at most {self._most} entries"),)
        rule = f"must have at least 1 and at most {self._most_bytes} bytes"
        lengths = [
            Violation(f"{field}[{index}]", rule)
            for index, text in enumerate(value)
            if not 1 <= len(text) <= self._most_bytes
        ]
        return lengths or [
            Violation(f"{field}[{index}]", "must be UTF-8") for index, text in enumerate(value) if not _is_utf8(text)
        ]


class TokenIds:
    """A column of token ids of the vocabulary."""

    def __init__(self, most: int | None = None) -> None:
        """Takes the limit of entries that are no end-of-text tokens.

        With None, the number is checked elsewhere.
        """
        self._most = most

    def broken(self, field: str, value: bytes, bounds: Bounds) -> Found:
        """Returns how the column breaks the rule; nothing if it keeps it."""
        if not value:
            return ()
        if len(value) % TOKEN_BYTES:
            return (Violation(field, f"has {len(value)} bytes; token ids take {TOKEN_BYTES} bytes each"),)
        ids = np.frombuffer(value, "<u4")
        if self._most is not None and ids.size > self._most:
            num_own = sum(token not in bounds.end_of_text_token_ids for token in ids.tolist())
            if num_own > self._most:
                return (Violation(field, f"must have at most {self._most} entries"),)
        if int(ids.max()) < bounds.vocabulary_size:
            return ()
        return unknown_tokens(field, np.flatnonzero(ids >= bounds.vocabulary_size).tolist(), bounds.vocabulary_size)


class TokenSequences:
    """A number of sequences of token ids, none of them empty, each of at most a length."""

    def __init__(self, most: int, most_tokens: int) -> None:
        """Takes the limits: of sequences, and of the tokens of each."""
        self._most = most
        self._most_tokens = most_tokens
        self._ids = TokenIds()

    def broken(self, field: str, value: Sequence[bytes], bounds: Bounds) -> Found:
        """Returns how the sequences break the rule; nothing if they keep it."""
        if len(value) > self._most:
            return (Violation(field, f"must have at most {self._most} token sequences"),)
        found: list[Violation] = []
        for index, sequence in enumerate(value):
            if 1 <= len(sequence) <= self._most_tokens * TOKEN_BYTES:
                found += self._ids.broken(f"{field}[{index}]", sequence, bounds)
            else:
                rule = f"must have at least 1 and at most {self._most_tokens} tokens"
                found.append(Violation(f"{field}[{index}]", rule))
        return found


class LogitBias:
    """Biases of tokens of the vocabulary, each named once."""

    def __init__(self, most: int, largest: float) -> None:
        """Takes the limits: of entries, and of a bias's absolute value."""
        self._most = most
        self._largest = largest

    def broken(self, field: str, value: Sampling, bounds: Bounds) -> Found:
        """Returns how the biases break the rule; nothing if they keep it."""
        if not value.logit_bias_ids and not value.logit_bias_values:
            return ()
        if len(value.logit_bias_ids) % TOKEN_BYTES or len(value.logit_bias_ids) != len(value.logit_bias_values):
            return (Violation(field, f"must have as many ids as values, of {TOKEN_BYTES} bytes each"),)
        ids, biases = np.frombuffer(value.logit_bias_ids, "<u4"), np.frombuffer(value.logit_bias_values, "<f4")
        if ids.size > self._most:
            return (Violation(field, f"must have at most {self._most} entries"),)
        vocabulary_size, largest = bounds.vocabulary_size, self._largest
        keys, range_ = ids[ids >= vocabulary_size], ids[~(np.abs(biases) <= largest)]
        found = [
            *_named(field, keys.tolist(), f"key must be below the vocabulary size, {vocabulary_size}"),
            *_named(field, range_.tolist(), f"must be at least {-largest:g} and at most {largest:g}"),
        ]
        if np.unique(ids).size != ids.size:
            found.append(Violation(field, "must not name a token twice"))
        return found


class MinTokens:
    """At most as many tokens as an output may have."""

    def broken(self, field: str, value: Stop, bounds: Bounds) -> Found:
        """Returns how the number breaks the rule; nothing if it keeps it."""
        if 0 <= value.min_tokens <= max(value.max_tokens, 0):
            return ()
        return (Violation(field, f"must be at most {value.max_tokens}"),)
