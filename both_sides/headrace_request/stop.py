"""When an output of a request ends.

Owns the values, with unit, range and default. Ranges are checked by `rules`; who watches an output
is the engine (`engine.stops`).
"""

from __future__ import annotations

import msgspec


class Stop(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Every value is resolved: none stands for a default that somebody else knows."""

    # Most tokens of an output. 1 to what the prompt leaves of the context.
    max_tokens: int
    # Fewest tokens of an output before anything but max_tokens may end it. 0 to max_tokens.
    min_tokens: int = 0
    # Texts that end an output where they are complete, UTF-8, 1 to 256 bytes each. At most 16.
    strings: tuple[bytes, ...] = ()
    # Tokens that end an output, uint32 little-endian: at most 64 of the request's own and, unless
    # it ignores these, the model's end-of-text tokens.
    token_ids: bytes = b""
    # Whether a matched string stays in the text.
    include_stop_string: bool = False
