"""Keys of prefixes: a hash chain over full blocks, salted per tenant.

Owns how a key is made. A key names a block's tokens *and everything before them* and the salt, so
that equal keys mean equal KV content for callers that may share it. Keys are 128 bits of BLAKE2b
under a secret drawn per engine: nobody outside can look for two prompts that collide, so one
tenant's prefix can't be made to stand for another's.
"""

from __future__ import annotations

import hashlib
import secrets

_KEY_BYTES = 16


class PrefixKeys:
    """Makes keys of one engine."""

    __slots__ = ("_root",)

    def __init__(self) -> None:
        """Draws the secret."""
        self._root = hashlib.blake2b(digest_size=_KEY_BYTES, key=secrets.token_bytes(32))

    def salt(self, tenant: str, cache_salt: bytes) -> bytes:
        """The chain's first link: prefixes are shared within equal tenant and salt only."""
        name = tenant.encode()
        digest = self._root.copy()
        # The length keeps ("ab", "c") apart from ("a", "bc").
        digest.update(len(name).to_bytes(8, "little") + name + cache_salt)
        return digest.digest()

    def extend(self, parent: bytes, token_bytes: bytes) -> bytes:
        """The key of a block of tokens (int32 little-endian) after its parent."""
        digest = self._root.copy()
        digest.update(parent + token_bytes)
        return digest.digest()
