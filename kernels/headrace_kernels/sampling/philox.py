"""Random bits that are a function of where they are used.

Philox-4x32-10 makes them, and the Gumbel noise of sampling is made from them.

Owns the generator and the mapping from (seed, output, position, token) to noise. There is no state:
the same token of the same output draws the same noise in any batch, on any device, after any
restart. The integer part is exact everywhere; a Triton kernel that computes the same ten rounds
gets the same bits, and differs at most in the last places of the logarithms.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section
3.3 and the published test vectors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW = 0xFFFFFFFF
_ROUNDS = 10
# Elements of one pass over the noise of whole vocabularies: the dozen int64 temporaries then stay
# in the caches.
_CHUNK_ELEMENTS = 1 << 15

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class NoiseKeys(NamedTuple):
    """What keys the noise of each sampled token, besides the token itself.

    All int64, [num_samples].
    """

    # The 64 bits of the request's seed.
    seeds: torch.Tensor
    # Which output of the request.
    output_indices: torch.Tensor
    # Position of the token in its output.
    positions: torch.Tensor

    def select(self, indices: torch.Tensor | slice) -> NoiseKeys:
        """The keys of some samples."""
        return NoiseKeys(*(column[indices] for column in self))


def philox_4x32_reference(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Ten Philox rounds.

    Args:
        counter: Four int64 tensors with values below 2**32 that broadcast against each other.
        key: Two of the same kind.

    Returns:
        Four int64 tensors with values below 2**32: four random words per counter.
    """
    c0, c1, c2, c3 = counter
    round_indices = torch.arange(_ROUNDS, device=c0.device).view(-1, *(1,) * key[0].dim())
    keys_0 = ((key[0] + round_indices * _WEYL_0) & _LOW).unbind(0)
    keys_1 = ((key[1] + round_indices * _WEYL_1) & _LOW).unbind(0)
    for key_0, key_1 in zip(keys_0, keys_1, strict=True):
        # The products overflow int64, but wrap to the right 64 bits; the mask drops what the signed
        # shift brought in.
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) ^ (c1 ^ key_0)).bitwise_and_(_LOW)
        c2 = ((product_0 >> 32) ^ (c3 ^ key_1)).bitwise_and_(_LOW)
        c1 = product_1.bitwise_and_(_LOW)
        c3 = product_0.bitwise_and_(_LOW)
    return c0, c1, c2, c3


def _words(keys: NoiseKeys, groups: torch.Tensor) -> Words:
    """The words of groups of four tokens.

    `groups` int64 [1 or num_samples, num_groups]; each word [num_samples, num_groups].
    """
    seeds = keys.seeds[:, None]
    # The fourth counter word is left for other uses of the same seed (speculation draws its own
    # numbers).
    counter = (groups, keys.positions[:, None], keys.output_indices[:, None], torch.zeros_like(seeds))
    return philox_4x32_reference(counter, (seeds & _LOW, (seeds >> 32) & _LOW))


def _gumbel(words: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise from 32 random bits each, float32.

    -log(E) with E exponential. E is made as -log(1 - u), because large noise (small E) decides the
    draw and floats are densest near u = 0; the largest noise is 22.9. u stays below 1, so that the
    noise is always finite.
    """
    uniform = words.to(torch.float32).mul_(2.0**-32).add_(2.0**-33).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def gumbel_noise_at_reference(keys: NoiseKeys, token_ids: torch.Tensor) -> torch.Tensor:
    """Noise of some tokens.

    Args:
        keys: Keys of num_samples samples.
        token_ids: int64 [num_samples, num_tokens].

    Returns:
        float32 [num_samples, num_tokens].
    """
    words = torch.stack(_words(keys, token_ids >> 2))
    return _gumbel(words.gather(0, (token_ids & 3)[None])[0])


def gumbel_noise_reference(keys: NoiseKeys, vocab_size: int) -> torch.Tensor:
    """Noise of all tokens: float32 [num_samples, vocab_size].

    Token t takes word t % 4 of counter t // 4.
    """
    num_samples = keys.seeds.shape[0]
    groups = torch.arange(-(-vocab_size // 4), device=keys.seeds.device)[None]
    noise = torch.empty(num_samples, groups.shape[1], 4, device=keys.seeds.device)
    rows = max(1, _CHUNK_ELEMENTS // groups.shape[1])
    columns = max(1, _CHUNK_ELEMENTS // min(rows, num_samples))
    for row in range(0, num_samples, rows):
        some_keys = NoiseKeys(*(column[row : row + rows] for column in keys))
        for start in range(0, groups.shape[1], columns):
            words = _words(some_keys, groups[:, start : start + columns])
            for index, word in enumerate(words):
                noise[row : row + rows, start : start + columns, index] = _gumbel(word)
    return noise.flatten(1)[:, :vocab_size]
