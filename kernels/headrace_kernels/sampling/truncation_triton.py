"""What a Triton program does for a row with top-n-sigma, top-k, min-p or top-p, without sorting it.

Owns that search as device functions; `sampling.choice_triton` launches it. What the four keep is
always a prefix of the row's tokens in their order (`ordering_triton`), and the draw is the token
with the highest score in that prefix. So the search goes by rejection:

    candidate = the highest score among the tokens before the bound; at first all of them
    kept?       by how many tokens, and how much mass, come before the candidate: one pass over the
                row
    if not      the prefix ends before the candidate, which becomes the new bound

The first kept candidate is the highest score of the prefix, exactly. A candidate is a draw of its
own: with top-p 0.9 nine of ten rows end with the first, and every further bound halves the mass on
average. Two candidates, the second under the assumption that the first is not kept, are looked at
in each pass. The winners of the blocks make further candidates cheap: only a block whose winner is
no longer before the bound is computed again. Passes skip tiles in which nothing can come before.

Min-p and top-n-sigma are one threshold, which for the latter takes two passes over the row.
Top-k starts with a bound that the blocks' peaks give. With top-p, which is a share of what top-k
leaves, its exact bound is searched first, by counting: for bf16 in at most eight passes.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from headrace_kernels.sampling.ordering_triton import LOWEST_KEY, NO_ID, best_of, comes_before, ordered_keys
from headrace_kernels.sampling.philox_triton import gumbel_noise

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(logits, offs_token, VOCAB: tl.constexpr):
    return tl.load(logits + offs_token, mask=offs_token < VOCAB, other=-float("inf")).to(tl.float32)


@triton.jit
def _tile_peak(peaks, tile, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The highest logit of a tile."""
    peak = tl.load(peaks + tile * (TILE // BLOCK))
    for block in tl.static_range(1, TILE // BLOCK):
        peak = tl.maximum(peak, tl.load(peaks + tile * (TILE // BLOCK) + block))
    return peak


@triton.jit
def _count_reaching(
    logits, peaks, low, middle, high,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, NUM_BLOCKS: tl.constexpr, KEY_SHIFT: tl.constexpr,
):  # fmt: skip
    """How many tokens have at least each of three keys, in ascending order."""
    reach_low = tl.zeros((TILE,), tl.int32)
    reach_middle = tl.zeros((TILE,), tl.int32)
    reach_high = tl.zeros((TILE,), tl.int32)
    for tile in range(NUM_BLOCKS * BLOCK // TILE):
        if ordered_keys(_tile_peak(peaks, tile, TILE, BLOCK), KEY_SHIFT) >= low:
            offs_token = tile * TILE + tl.arange(0, TILE)
            keys = ordered_keys(_load(logits, offs_token, VOCAB), KEY_SHIFT)
            # What lies behind the vocabulary reaches nothing.
            keys = tl.where(offs_token < VOCAB, keys, LOWEST_KEY)
            reach_low += (keys >= low).to(tl.int32)
            reach_middle += (keys >= middle).to(tl.int32)
            reach_high += (keys >= high).to(tl.int32)
    return tl.sum(reach_low, axis=0), tl.sum(reach_middle, axis=0), tl.sum(reach_high, axis=0)


@triton.jit
def _kth_peak(peak_keys, top_k, NUM_SLOTS: tl.constexpr):
    """A key that at least top_k tokens reach.

    As many blocks as tokens are kept have a peak at least so high.

    The lowest key if there are fewer blocks.
    """
    offs_slot = tl.arange(0, NUM_SLOTS)
    before = comes_before(peak_keys[None, :], offs_slot[None, :], peak_keys[:, None], offs_slot[:, None])
    ranks = tl.sum(before.to(tl.int32), axis=1)
    return tl.max(tl.where(ranks == top_k - 1, peak_keys, LOWEST_KEY), axis=0)


@triton.jit
def _top_k_key(
    logits, peaks, peak_keys, low_key, top_k,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, NUM_BLOCKS: tl.constexpr, KEY_SHIFT: tl.constexpr,
):  # fmt: skip
    """The highest key that at least top_k tokens reach, or a lower one that exactly top_k reach.

    At least top_k reach `low_key`.
    """
    banned = ordered_keys(tl.full((1,), -float("inf"), tl.float32), KEY_SHIFT)
    low = tl.maximum(low_key, tl.max(banned, axis=0)).to(tl.int64)
    high = tl.max(peak_keys, axis=0).to(tl.int64) + 1
    # At least top_k tokens reach `low`, fewer reach `high`.
    num_reaching = top_k + 1
    while (high - low > 1) & (num_reaching != top_k):
        quarter = low + (high - low) // 4
        half = low + (high - low) // 2
        three_quarters = low + (high - low) * 3 // 4
        reach_1, reach_2, reach_3 = _count_reaching(
            logits, peaks, quarter.to(tl.int32), half.to(tl.int32), three_quarters.to(tl.int32), VOCAB, BLOCK, TILE,
            NUM_BLOCKS, KEY_SHIFT,
        )  # fmt: skip
        if reach_3 >= top_k:
            low = three_quarters
            num_reaching = reach_3
        elif reach_2 >= top_k:
            low, high = half, three_quarters
            num_reaching = reach_2
        elif reach_1 >= top_k:
            low, high = quarter, half
            num_reaching = reach_1
        else:
            high = quarter
    return low.to(tl.int32)


@triton.jit
def _surviving_mass(
    logits, peaks, row_peak, temperature, top_k, top_k_key, threshold,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, NUM_BLOCKS: tl.constexpr, KEY_SHIFT: tl.constexpr,
):  # fmt: skip
    """Mass of what top_k and the threshold leave, relative to the most likely token."""
    masses = tl.zeros((TILE,), tl.float32)
    counts = tl.zeros((TILE,), tl.int32)
    # Mass of one token whose key is the bound's.
    border = tl.zeros((TILE,), tl.float32)
    for tile in range(NUM_BLOCKS * BLOCK // TILE):
        if ordered_keys(_tile_peak(peaks, tile, TILE, BLOCK), KEY_SHIFT) >= top_k_key:
            values = _load(logits, tile * TILE + tl.arange(0, TILE), VOCAB)
            keys = ordered_keys(values, KEY_SHIFT)
            mass = tl.exp2((values - row_peak) * (LOG2_E / temperature))
            mass = tl.where(values * (1.0 / temperature) >= threshold, mass, 0.0)
            masses += tl.where(keys > top_k_key, mass, 0.0)
            counts += (keys > top_k_key).to(tl.int32)
            border = tl.maximum(border, tl.where(keys == top_k_key, mass, 0.0))
    num_of_border = tl.where(top_k > 0, top_k - tl.sum(counts, axis=0), 0)
    return tl.sum(masses, axis=0) + num_of_border.to(tl.float32) * tl.max(border, axis=0)


@triton.jit
def _before_two(
    logits, peaks, row_peak, temperature, id_a, id_b,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """How many tokens come before each of two tokens, and their masses; b is before a, or a."""
    count_a = tl.zeros((TILE,), tl.int32)
    count_b = tl.zeros((TILE,), tl.int32)
    mass_a = tl.zeros((TILE,), tl.float32)
    mass_b = tl.zeros((TILE,), tl.float32)
    # Logits of finite rows sort as they are; only searches between them need keys.
    logit_a, logit_b = tl.load(logits + id_a).to(tl.float32), tl.load(logits + id_b).to(tl.float32)
    for tile in range(NUM_BLOCKS * BLOCK // TILE):
        if _tile_peak(peaks, tile, TILE, BLOCK) >= logit_a:
            offs_token = tile * TILE + tl.arange(0, TILE)
            values = _load(logits, offs_token, VOCAB)
            mass = tl.exp2((values - row_peak) * (LOG2_E / temperature))
            before_a = comes_before(values, offs_token, logit_a, id_a)
            before_b = comes_before(values, offs_token, logit_b, id_b)
            count_a += before_a.to(tl.int32)
            count_b += before_b.to(tl.int32)
            mass_a += tl.where(before_a, mass, 0.0)
            mass_b += tl.where(before_b, mass, 0.0)
    return tl.sum(count_a, axis=0), tl.sum(mass_a, axis=0), tl.sum(count_b, axis=0), tl.sum(mass_b, axis=0)


@triton.jit
def _next_candidate(
    logits, score, winner, winner_keys, peak_keys, bound_key, bound_id, temperature, seed_low, seed_high,
    output_index, position,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, NUM_SLOTS: tl.constexpr, KEY_SHIFT: tl.constexpr,
):  # fmt: skip
    """The token with the highest score before the bound, and the blocks' winners.

    Winners are computed again as far as they had to be.

    Returns:
        Whether there is one, its key and id (else the bound's); scores, winners and their keys.
    """
    offs_slot = tl.arange(0, NUM_SLOTS)
    score = tl.where(peak_keys < bound_key, -float("inf"), score)
    searching = True
    found = False
    key, id = bound_key, bound_id
    while searching:
        best, slot = best_of(score, offs_slot)
        is_slot = offs_slot == slot
        slot_id = tl.max(tl.where(is_slot, winner, 0), axis=0)
        slot_key = tl.max(tl.where(is_slot, winner_keys, LOWEST_KEY), axis=0)
        found = (best > -float("inf")) & comes_before(slot_key, slot_id, bound_key, bound_id)
        searching = (best > -float("inf")) & (found == 0)
        if found:
            key, id = slot_key, slot_id
        if searching:
            # The block's winner under the bound.
            offs_token = slot * BLOCK + tl.arange(0, BLOCK)
            values = _load(logits, offs_token, VOCAB)
            keys = ordered_keys(values, KEY_SHIFT)
            noise = gumbel_noise(slot * BLOCK, seed_low, seed_high, output_index, position, BLOCK)
            is_before = comes_before(keys, offs_token, bound_key, bound_id)
            new_score, new_id = best_of(
                tl.where(is_before, values * (1.0 / temperature) + noise, -float("inf")), offs_token
            )
            new_id = tl.minimum(new_id, VOCAB - 1)
            new_key = tl.max(tl.where(offs_token == new_id, keys, LOWEST_KEY), axis=0)
            score = tl.where(is_slot, new_score, score)
            winner = tl.where(is_slot, new_id, winner)
            winner_keys = tl.where(is_slot, new_key, winner_keys)
    return found, key, id, score, winner, winner_keys


@triton.jit
def _is_kept(logits, count, mass, id, temperature, top_k, threshold, target, VOCAB: tl.constexpr):
    """Whether a token with so much before it is kept. The first always is."""
    scaled = tl.load(logits + id).to(tl.float32) * (1.0 / temperature)
    within_k = (top_k == 0) | (count < top_k)
    return (count == 0) | (within_k & (mass < target) & (scaled >= threshold))


@triton.jit
def _deviation(logits, VOCAB: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr):
    """Standard deviation of the finite logits of a finite row, fp32: sqrt(mean((x - mean)^2))."""
    sums = tl.zeros((TILE,), tl.float32)
    counts = tl.zeros((TILE,), tl.float32)
    for tile in range(NUM_TILES):
        values = _load(logits, tile * TILE + tl.arange(0, TILE), VOCAB)
        finite = values > -float("inf")
        sums += tl.where(finite, values, 0.0)
        counts += tl.where(finite, 1.0, 0.0)
    count = tl.sum(counts, axis=0)
    mean = tl.sum(sums, axis=0) / count
    squares = tl.zeros((TILE,), tl.float32)
    for tile in range(NUM_TILES):
        values = _load(logits, tile * TILE + tl.arange(0, TILE), VOCAB)
        distance = tl.where(values > -float("inf"), values - mean, 0.0)
        squares += distance * distance
    return tl.sqrt(tl.sum(squares, axis=0) / count)


@triton.jit
def lowest_kept(
    logits, row_peak, temperature, min_p, top_n_sigma,
    VOCAB: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """The lowest logit / temperature of a row that min_p and top_n_sigma keep.

    It is -inf if they keep all. The row is finite.
    """
    threshold = row_peak * (1.0 / temperature) + tl.where(min_p > 0, tl.log(min_p), -float("inf"))
    if top_n_sigma > 0:
        lowest = row_peak - top_n_sigma * _deviation(logits, VOCAB, TILE, NUM_TILES)
        threshold = tl.maximum(threshold, lowest * (1.0 / temperature))
    return threshold


@triton.jit
def draw_truncated(
    logits, peaks, masses, peak, score, winner, temperature, top_k, threshold, top_p, seed_low, seed_high,
    output_index, position,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, NUM_BLOCKS: tl.constexpr, NUM_SLOTS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
):  # fmt: skip
    """The token of a finite row that truncates.

    Args:
        logits: The row's, [VOCAB].
        peaks: The row's blocks' highest logits, float32 [NUM_SLOTS] in memory.
        masses: The row's blocks' masses, likewise; there only if top_p < 1.
        peak: `peaks`, loaded; -inf where there is no block.
        score: Scores of the blocks' winners, loaded, likewise.
        winner: Their ids, loaded.
        temperature: Above 0.
        top_k: 0: all.
        threshold: `lowest_kept`; -inf: all.
        top_p: 1: all.
        seed_low: Lower half of the noise's key, int32.
        seed_high: Likewise.
        output_index: Likewise.
        position: Likewise.
        VOCAB: Tokens.
        BLOCK: Tokens of a block.
        TILE: Tokens of a step of a pass.
        NUM_BLOCKS: Blocks of the row.
        NUM_SLOTS: Number of entries, rounded up to a power of two.
        KEY_SHIFT: Low bits that are equal in all keys (`ordering_triton`).
    """
    offs_slot = tl.arange(0, NUM_SLOTS)
    row_peak = tl.max(peak, axis=0)
    peak_keys = ordered_keys(peak, KEY_SHIFT)
    winner_keys = ordered_keys(tl.load(logits + winner).to(tl.float32), KEY_SHIFT)
    bound_key, bound_id = tl.min(peak_keys, axis=0) * 0 + LOWEST_KEY, tl.min(winner, axis=0) * 0 + NO_ID
    if top_k > 0:
        bound_key = _kth_peak(peak_keys, top_k, NUM_SLOTS)
        if top_p < 1:
            bound_key = _top_k_key(
                logits, peaks, peak_keys, bound_key, top_k, VOCAB, BLOCK, TILE, NUM_BLOCKS, KEY_SHIFT
            )
    target = row_peak * 0 + float("inf")
    if top_p < 1:
        if (top_k > 0) | (threshold > -float("inf")):
            total = _surviving_mass(
                logits, peaks, row_peak, temperature, top_k, bound_key, threshold, VOCAB, BLOCK, TILE, NUM_BLOCKS,
                KEY_SHIFT,
            )  # fmt: skip
        else:
            mass = tl.load(masses + offs_slot, mask=offs_slot < NUM_BLOCKS, other=0.0)
            total = tl.sum(mass * tl.exp2((peak - row_peak) * (LOG2_E / temperature)), axis=0)
        target = total * top_p
    _, token = best_of(score, winner)
    searching = True
    while searching:
        found_a, key_a, id_a, score, winner, winner_keys = _next_candidate(
            logits, score, winner, winner_keys, peak_keys, bound_key, bound_id, temperature, seed_low, seed_high,
            output_index, position, VOCAB, BLOCK, NUM_SLOTS, KEY_SHIFT,
        )  # fmt: skip
        found_b, key_b, id_b, score, winner, winner_keys = _next_candidate(
            logits, score, winner, winner_keys, peak_keys, key_a, id_a, temperature, seed_low, seed_high,
            output_index, position, VOCAB, BLOCK, NUM_SLOTS, KEY_SHIFT,
        )  # fmt: skip
        # Scores of a finite row are finite, so something is always found; a token that overflows
        # must not hang the device all the same.
        searching = found_a != 0
        if searching:
            count_a, mass_a, count_b, mass_b = _before_two(
                logits, peaks, row_peak, temperature, id_a, id_b, VOCAB, BLOCK, TILE, NUM_BLOCKS
            )
            keeps_a = _is_kept(logits, count_a, mass_a, id_a, temperature, top_k, threshold, target, VOCAB)
            keeps_b = _is_kept(logits, count_b, mass_b, id_b, temperature, top_k, threshold, target, VOCAB)
            token = tl.where(keeps_a, id_a, id_b)
            searching = (keeps_a == 0) & (keeps_b == 0)
            bound_key, bound_id = key_b, id_b
    return token
