"""Seeded draws for the demo corpus, and the border between training and held-out material.

Owns: the random source, the made-up names and cities, and the rule that says which values and
phrasings a split may use. Does not own any sentence: the domains (`corpus_*.py`) bring those. A
domain asks a `Draw` for values and gets only those its split may see:

    train     values whose hash is not in the held-out tenth, phrasings written for training
    heldout   values whose hash is in the held-out tenth, phrasings written for training
    phrasing  held-out values and phrasings that training never sees
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from corpus_words import CITY_ENDINGS, CODAS, FIRST_NAMES, KNOWN_CITIES, NUCLEI, ONSETS

Split = Literal["train", "heldout", "phrasing"]
Value = TypeVar("Value")
HELD_OUT_SHARE = 10


@dataclass(frozen=True)
class Item:
    """One conversation (or one plain text) and how to judge its last turn.

    Attributes:
        domain: Name used for the mixture and for the score table.
        turns: `(role, text)` pairs; roles are system, user, assistant, `recited` for what the
            assistant said but training is not to teach, or `text` for a plain document.
        accepted: Right answers besides the last turn.
        mentions: Words that a free answer has to contain; empty where the answer must match
            exactly.
        is_json: Whether the answer is compared as a parsed JSON value.
    """

    domain: str
    turns: tuple[tuple[str, str], ...]
    accepted: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    is_json: bool = False

    @property
    def answer(self) -> str:
        """Text of the last turn."""
        return self.turns[-1][1]


@dataclass(frozen=True)
class Phrasings:
    """Ways to say one thing: those of the training split, and those kept back to test with."""

    train: tuple[str, ...]
    unseen: tuple[str, ...]


def is_held_out(*key: object) -> bool:
    """True for the tenth of all keys that training must not see, in every run and process."""
    return zlib.crc32("|".join(map(str, key)).encode()) % HELD_OUT_SHARE == 0


class Draw:
    """A random source that never hands a value to the wrong split."""

    def __init__(self, seed: int, split: Split) -> None:
        self.random = random.Random(f"{split}-{seed}")
        self.split = split

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self.random.random() < probability

    def choice(self, options: Sequence[Value]) -> Value:
        """One of the options, each as likely."""
        return options[int(self.random.random() * len(options))]

    def number(self, low: int, high: int) -> int:
        """An integer between low and high, both included."""
        return low + int(self.random.random() * (high - low + 1))

    def phrase(self, phrasings: Phrasings) -> str:
        """One phrasing that this split may use."""
        return self.choice(phrasings.unseen if self.split == "phrasing" else phrasings.train)

    def until_allowed(self, make: Callable[[], Value], kind: str) -> Value:
        """Calls `make` until its value belongs to this split."""
        while True:
            value = make()
            if is_held_out(kind, value) == (self.split != "train"):
                return value

    def invented_name(self) -> str:
        """A capitalised name of two or three random syllables."""
        return self.until_allowed(self._syllables, "name")

    def first_name(self) -> str:
        """A common first name, or an invented one."""
        if self.chance(0.4):
            return self.until_allowed(lambda: self.choice(FIRST_NAMES), "name")
        return self.invented_name()

    def full_name(self) -> str:
        """A first name, mostly followed by an invented family name."""
        first = self.first_name()
        return f"{first} {self.invented_name()}" if self.chance(0.7) else first

    def city(self) -> str:
        """A known city, or an invented one."""
        return self.until_allowed(self._any_city, "city")

    def _any_city(self) -> str:
        if self.chance(0.25):
            return self.choice(KNOWN_CITIES)
        return self._syllables() + (self.choice(CITY_ENDINGS) if self.chance(0.6) else "")

    def _syllables(self) -> str:
        count = 2 if self.chance(0.7) else 3
        parts = [self.choice(ONSETS) + self.choice(NUCLEI) for _ in range(count)]
        return ("".join(parts) + self.choice(CODAS)).capitalize()


def sentence_case(text: str) -> str:
    """The text with its first character in upper case and the rest untouched."""
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    """The noun with a or an before it."""
    return f"{'an' if noun[0] in 'aeiou' or noun.startswith('honest') else 'a'} {noun}"
