"""Protobuf's encoding of lengths, for messages that are joined from parts."""

from __future__ import annotations


def encode(number: int) -> bytes:
    """Returns a length as protobuf writes it.

    Seven bits a byte, lowest first, the top bit set on all but the last.
    """
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
