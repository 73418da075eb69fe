"""Request ids: unique without coordination, sorted by time, with the tag of their engine.

48 bits of milliseconds since the epoch, then 60 random bits and the 20 bits of the request's place,
in Crockford's base 32 (no I, L, O, U), a hyphen, and 20 bits: those of the SHA-256 of the model's
name, XOR the engine's number among the model's engines. Ids of one process keep their order within
a millisecond too: the random part then counts on. The tag lets any service process find the engine
that knows a request, without asking all of them. The place gives a request an order over the other
engines, in which they are asked once that one is lost; it is random, or that of the idempotency
key, so that whoever knows id or key comes to the same order. Replicas of one host have the numbers
0, 1 and so on; an engine that a service is started with has 20 bits of its address, so that its
number depends neither on the other engines nor on their order.
"""

from __future__ import annotations

import hashlib
import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_LENGTH = 26
_TAG_LENGTH = 4
_RANDOM_BITS = 60
_PLACE_LENGTH = 4
_PLACE_BITS = 5 * _PLACE_LENGTH


class RequestIds:
    """Source of the request ids of one process."""

    def __init__(self) -> None:
        self._last = 0

    def new(self, tag: str, place: str = "") -> str:
        """Returns an id larger than all this source gave before, for a model's tag.

        `place` is that of an idempotency key; "": a random one.
        """
        fresh = (time.time_ns() // 1_000_000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
        same_millisecond = fresh >> _RANDOM_BITS <= self._last >> _RANDOM_BITS
        self._last = self._last + 1 if same_millisecond else fresh
        beginning = _base32(self._last, _LENGTH - _PLACE_LENGTH)
        return f"{beginning}{place or _base32(secrets.randbits(_PLACE_BITS), _PLACE_LENGTH)}-{tag}"


def model_tag(name: str, number: int = 0) -> str:
    """Returns what the ids of the requests end with that one of a model's engines has.

    `number` is below 2**20.
    """
    return _base32(_tag_bits(name) ^ number, _TAG_LENGTH)


def key_place(tenant: str, idempotency_key: str) -> str:
    """Returns the place of the requests that a tenant sends under an idempotency key."""
    return _base32(_tag_bits(f"{tenant}/{idempotency_key}"), _PLACE_LENGTH)


def place_of(request_id: str) -> str:
    """Returns the place of a request; of what is no id of ours that of its last characters."""
    return request_id.rpartition("-")[0][-_PLACE_LENGTH:]


def number_in(tag: str, name: str) -> int | None:
    """Returns the number of the engine in a tag of this model; None for what is no tag."""
    if len(tag) != _TAG_LENGTH or any(character not in _ALPHABET for character in tag):
        return None
    bits = 0
    for character in tag:
        bits = bits << 5 | _ALPHABET.index(character)
    return bits ^ _tag_bits(name)


def number_of(address: str) -> int:
    """Returns the number of an engine that is known by its address: below 2**20."""
    return _tag_bits(address)


def tag_of(request_id: str) -> str:
    """Returns the tag of an id, "" if it has none."""
    return request_id.rpartition("-")[2] if "-" in request_id else ""


def _tag_bits(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:3], "big") & ((1 << 5 * _TAG_LENGTH) - 1)


def _base32(number: int, length: int) -> str:
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(5 * (length - 1), -1, -5))
