"""The bits of one mask: bit t % 32 of word t // 32 says whether token t may be drawn."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

BITS = 32
# int32 [num_words]
Words = npt.NDArray[np.int32]


def add(words: Words, tokens: Collection[int]) -> None:
    """Allows some tokens, whatever the mask says of them."""
    places, bits = _places(tokens)
    np.bitwise_or.at(words.view(np.uint32), places, bits)


def remove(words: Words, tokens: Collection[int]) -> None:
    """Allows some tokens no more."""
    places, bits = _places(tokens)
    np.bitwise_and.at(words.view(np.uint32), places, ~bits)


def allows(words: Words, token: int) -> bool:
    """Whether a token may be drawn."""
    return bool(int(words[token // BITS]) >> token % BITS & 1)


def only(words: Words) -> int | None:
    """The token that is the only one allowed; None: none is, or several are."""
    bits = words.view(np.uint32)
    if int(np.bitwise_count(bits).sum()) != 1:
        return None
    place = int(bits.argmax())
    return place * BITS + int(bits[place]).bit_length() - 1


def _places(tokens: Collection[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    ids = np.fromiter(tokens, np.int64, len(tokens))
    return ids // BITS, np.uint32(1) << (ids % BITS).astype(np.uint32)
