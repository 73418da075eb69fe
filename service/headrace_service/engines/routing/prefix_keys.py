"""Keys of how a prompt begins: one 64-bit number for each of a few lengths of its beginning.

Owns at which lengths beginnings are compared, and the hash. Two prompts have the same key at a
length exactly where they can share cached blocks so far: their first tokens, their tenant and their
cache salt are equal. All services compute the same keys, in every life of theirs. The hash is
quick and no secret: whoever finds two prompts with one key makes them meet at one engine and gains
nothing, because the engine's own cache compares under a secret of its own.
"""

from __future__ import annotations

import bisect
import functools
import hashlib

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint64]

# Powers of two and their halves between: a beginning that two prompts share is known to three
# quarters of its length or better. Fewer than 64 tokens would be what a chat template puts before
# everything; what differs behind 32,768 tokens decides nothing.
LENGTHS = (64, *(length for power in range(6, 15) for length in (3 << (power - 1), 2 << power)))
_STARTS = np.array((0, *LENGTHS[:-1]))
_FACTORS = tuple(np.uint64(factor) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SHIFT = np.uint64(32)
_MOST_ROOTS = 4096


def mix(words: Words, shifted: Words | None = None) -> Words:
    """Mixes 64-bit words in place, one to one, and returns them.

    The upper bits of the outcome depend on all bits.

    Args:
        words: The words.
        shifted: Scratch memory of the same length; None: new memory.
    """
    words *= _FACTORS[0]
    words ^= np.right_shift(words, _SHIFT, out=shifted)
    words *= _FACTORS[1]
    return words


@functools.cache
def _coefficients() -> Words:
    """Returns an odd number for each position, so that one token changed always changes the sum."""
    return mix(mix(np.arange(1, LENGTHS[-1] + 1, dtype=np.uint64))) | np.uint64(1)


@functools.lru_cache(_MOST_ROOTS)
def root(tenant: str, cache_salt: bytes) -> int:
    """Returns what the keys of a tenant's prompts under a cache salt begin with."""
    name = tenant.encode()
    digest = hashlib.blake2b(len(name).to_bytes(8, "little") + name + cache_salt, digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def prefix_keys(token_ids: TokenIds, root_key: int) -> list[int]:
    """Returns the keys of a prompt's beginnings of those `LENGTHS` that it reaches.

    A prompt that reaches none has one key, of all its tokens.
    """
    count = bisect.bisect_right(LENGTHS, len(token_ids))
    end = LENGTHS[count - 1] if count else len(token_ids)
    if not end:
        return [root_key]
    # Quicker than one product of two types.
    products = token_ids[:end].astype(np.uint64)
    products *= _coefficients()[:end]
    sums = np.add.reduceat(products, _STARTS[: max(1, count)]).cumsum()
    sums ^= np.uint64(root_key)
    keys: list[int] = mix(sums).tolist()
    return keys
