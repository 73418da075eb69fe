"""Request ids: 26 characters that are unique without coordination and sort by time of creation.

48 bits of milliseconds since the epoch, then 80 random bits, in Crockford's base 32 (no I, L, O, U). Ids of one process keep their order
within a millisecond too: the random part then counts on.
"""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_LENGTH = 26
_RANDOM_BITS = 80


class RequestIds:
    """Source of the request ids of one process."""

    def __init__(self) -> None:
        self._last = 0

    def new(self) -> str:
        """Returns an id larger than all this source gave before."""
        fresh = (time.time_ns() // 1_000_000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
        same_millisecond = fresh >> _RANDOM_BITS <= self._last >> _RANDOM_BITS
        self._last = self._last + 1 if same_millisecond else fresh
        return _base32(self._last)


def _base32(number: int) -> str:
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(5 * (_LENGTH - 1), -1, -5))
