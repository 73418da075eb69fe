"""The choice of each row's next token from its logits.

It is greedy, or a draw after temperature, top-n-sigma, top-k, min-p and top-p.

Owns the choice. Bias, bans and penalties happened before (`penalties`, the worker's sampler); the
noise is `philox`'s.

A draw is Gumbel-max: the token with the highest logit / temperature + noise is a sample of the
softmax, and no sum over the vocabulary rounds differently in another batch. A row's result depends
on its own logits, parameters and keys only. For that, whatever compares with a sum is computed in
one order per row: `torch.softmax` reduces each row alone, and cumulative sums run over the row's
tokens in their order (`ordering`).

Rows that truncate work on candidates, their most likely tokens in order, because what top-n-sigma,
top-k, min-p and top-p keep is always a prefix of those. The first 128 (or the largest top-k) nearly
always hold the whole prefix; rows for which they don't try again with sixteen times as many. So
only flat distributions with top-p ever sort a vocabulary, and noise is computed for candidates
only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from headrace_kernels.sampling.choice_triton import sample_rows_triton
from headrace_kernels.sampling.ordering import top_tokens_reference
from headrace_kernels.sampling.parameters import (
    MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_N_SIGMA,
    TOP_P,
    read_floats,
    read_noise_keys,
)
from headrace_kernels.sampling.philox import NoiseKeys, gumbel_noise_at_reference, gumbel_noise_reference
from headrace_kernels.triton_runtime import uses_triton

_FIRST_CANDIDATES = 128
_MORE_CANDIDATES = 16
_BLOCK = 128
# Below, the extra calls cost more than they save.
_MIN_BLOCKED_ELEMENTS = 1 << 15


class Truncation(NamedTuple):
    """Which tokens a row may draw, in the order of application. Columns of [num_rows]."""

    # float32; keeps logits at most so many standard deviations of the row's finite logits below the
    # highest one, 0 all.
    top_n_sigma: torch.Tensor
    # int64; keeps so many of the most likely tokens, 0 all.
    top_k: torch.Tensor
    # float32; keeps tokens at least so likely relative to the most likely one, 0 all.
    min_p: torch.Tensor
    # float32; keeps the smallest set of most likely tokens whose share of what the others left
    # reaches this; 1 all.
    top_p: torch.Tensor

    def select(self, indices: torch.Tensor | slice) -> Truncation:
        """The parameters of some rows."""
        return Truncation(*(column[indices] for column in self))


def choose_greedy_reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row, and whether the row is finite.

    Args:
        logits: float32 [num_rows, vocab_size].

    Returns:
        Tokens, int64 [num_rows]: the lowest id where several are equal. Finiteness, bool
        [num_rows]: false where a logit is NaN or +inf, or all are -inf.
    """
    peaks, tokens = logits.max(dim=1)
    return tokens, peaks.isfinite()


def draw_reference(logits: torch.Tensor, temperature: torch.Tensor, keys: NoiseKeys) -> torch.Tensor:
    """Draws from the whole softmax.

    Args:
        logits: float32 [num_rows, vocab_size].
        temperature: float32 [num_rows], above 0.
        keys: Keys of the rows' noise.

    Returns:
        int64 [num_rows].
    """
    noise = gumbel_noise_reference(keys, logits.shape[1])
    return noise.add_(logits / temperature[:, None]).argmax(dim=1)


def draw_truncated_reference(
    logits: torch.Tensor, temperature: torch.Tensor, truncation: Truncation, keys: NoiseKeys
) -> torch.Tensor:
    """Draws from what top_n_sigma, top_k, min_p and top_p keep.

    Args:
        logits: float32 [num_rows, vocab_size].
        temperature: float32 [num_rows], above 0.
        truncation: Parameters of the rows.
        keys: Keys of the rows' noise.

    Returns:
        int64 [num_rows].
    """
    scaled = logits / temperature[:, None]
    candidates, num_kept, complete = kept_tokens_reference(
        scaled, truncation, _first_candidates(truncation.top_k, logits.shape[1])
    )
    tokens = _draw_prefix(scaled, candidates, num_kept, keys)
    while not complete.all():
        rows = (~complete).nonzero()[:, 0]
        num_candidates = min(logits.shape[1], candidates.shape[1] * _MORE_CANDIDATES)
        candidates, num_kept, complete_now = kept_tokens_reference(
            scaled[rows], truncation.select(rows), num_candidates
        )
        tokens[rows] = _draw_prefix(scaled[rows], candidates, num_kept, keys.select(rows))
        complete[rows] = complete_now
    return tokens


def _first_candidates(top_k: torch.Tensor, vocab_size: int) -> int:
    """Enough for every top_k, and for nearly every row without one."""
    smallest, largest = (int(bound) for bound in top_k.aminmax())
    return min(vocab_size, largest if smallest > 0 else max(largest, _FIRST_CANDIDATES))


def kept_tokens_reference(
    scaled: torch.Tensor, truncation: Truncation, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What top_n_sigma, top_k, min_p and top_p keep, as a prefix of the row's most likely tokens.

    Args:
        scaled: float32 [num_rows, vocab_size], logits after temperature.
        truncation: Parameters of the rows.
        num_candidates: How many of the most likely tokens to look at: at least the largest top_k,
            at most vocab_size.

    Returns:
        Candidates, int64 [num_rows, num_candidates], most likely first. How many of them are kept,
        int64 [num_rows], at least 1. Whether that is certain, bool [num_rows]: if not, more
        candidates are needed. It always is with vocab_size of them.
    """
    candidates = top_tokens_reference(scaled, num_candidates)
    values = scaled.gather(1, candidates)
    probabilities = torch.softmax(scaled, dim=1).gather(1, candidates).double()
    ranks = torch.arange(num_candidates, device=scaled.device)
    limit = torch.where(truncation.top_k > 0, truncation.top_k, scaled.shape[1])[:, None]
    threshold = torch.maximum(
        values[:, 0] + truncation.min_p.log(), top_n_sigma_threshold_reference(scaled, truncation.top_n_sigma)
    )
    survives = (ranks < limit) & (values >= threshold[:, None])
    num_survivors = survives.sum(dim=1)
    survivors_known = (
        (num_survivors < num_candidates) | (limit[:, 0] <= num_candidates) | (num_candidates == scaled.shape[1])
    )

    cumulative = probabilities.cumsum(dim=1)
    # Where nothing else truncates, the total is 1 without adding anything up.
    nothing_before = (truncation.top_k <= 0) & (truncation.min_p <= 0) & (truncation.top_n_sigma <= 0)
    total = cumulative.gather(1, (num_survivors - 1).clamp_(min=0)[:, None])[:, 0].masked_fill_(nothing_before, 1.0)
    # A token stays if those before it don't reach the share. The first always does.
    target = (total * truncation.top_p).masked_fill_(truncation.top_p >= 1, torch.inf)
    num_reaching = 1 + (cumulative[:, :-1] < target[:, None]).sum(dim=1)
    reached = nothing_before & (cumulative[:, -1] >= target)
    num_kept = torch.minimum(num_reaching, num_survivors).clamp_(min=1)
    return candidates, num_kept, survivors_known | reached


def top_n_sigma_threshold_reference(logits: torch.Tensor, top_n_sigma: torch.Tensor) -> torch.Tensor:
    """The lowest logit that top_n_sigma keeps: the highest one less so many standard deviations.

    The deviation is that of the row's finite logits (of the population: their number divides), so
    banned tokens do not count. A temperature divides logits and threshold alike, so that the tokens
    which are kept do not depend on it.

    Args:
        logits: float32 [num_rows, vocab_size], before or after temperature.
        top_n_sigma: float32 [num_rows]; 0 keeps all.

    Returns:
        float32 [num_rows]; -inf where all are kept.
    """
    threshold = torch.full_like(top_n_sigma, -torch.inf)
    rows = (top_n_sigma > 0).nonzero()[:, 0]
    if rows.numel():
        chosen = logits[rows].double()
        finite = chosen.isfinite()
        count = finite.sum(dim=1)
        # Sums in the order of tokens: the same in any batch.
        mean = chosen.masked_fill(~finite, 0).cumsum(dim=1)[:, -1] / count
        squares = (chosen - mean[:, None]).square_().masked_fill_(~finite, 0)
        deviation = (squares.cumsum(dim=1)[:, -1] / count).sqrt_()
        threshold[rows] = (chosen.amax(dim=1) - top_n_sigma[rows] * deviation).float()
    return threshold


def _draw_prefix(
    scaled: torch.Tensor, candidates: torch.Tensor, num_kept: torch.Tensor, keys: NoiseKeys
) -> torch.Tensor:
    """Draws from the first `num_kept` candidates of each row."""
    candidates = candidates[:, : int(num_kept.max())]
    dropped = torch.arange(candidates.shape[1], device=scaled.device) >= num_kept[:, None]
    perturbed = scaled.gather(1, candidates) + gumbel_noise_at_reference(keys, candidates)
    best = perturbed.masked_fill_(dropped, -torch.inf).argmax(dim=1, keepdim=True)
    return candidates.gather(1, best)[:, 0]


def choose_greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose_greedy_reference`, by the best implementation for the device."""
    if logits.device.type == "cpu" and logits.shape[1] % _BLOCK == 0 and logits.numel() >= _MIN_BLOCKED_ELEMENTS:
        return _choose_greedy_by_blocks(logits)
    return choose_greedy_reference(logits)


def most_likely_part(logits: torch.Tensor, first_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of a part of the vocabulary, for `best_candidates`.

    Args:
        logits: float32 [num_rows, part], of the tokens from `first_token` on.
        first_token: Token of column 0.

    Returns:
        Tokens, int64 [num_rows], counted in the whole vocabulary: the lowest id where several are
        equal. Their logits, float32 [num_rows]: NaN where the part holds one.
    """
    tokens, _ = choose_greedy(logits)
    return tokens + first_token, logits.gather(1, tokens[:, None])[:, 0]


def best_candidates(candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose_greedy_reference` of the whole vocabulary from the best of its parts.

    Args:
        candidates: float64 [num_parts, num_rows, 2], logit and token of each part's best, parts in
            the order of their tokens.

    Returns:
        As `choose_greedy_reference`.
    """
    peaks, parts = candidates[:, :, 0].max(dim=0)
    tokens = candidates[:, :, 1].gather(0, parts[None])[0]
    return tokens.to(torch.int64), peaks.isfinite()


def _choose_greedy_by_blocks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token by blocks.

    First comes the highest value of each block, then the place in the first block that has the
    highest of all.

    On a CPU three to five times as fast: torch vectorises a maximum without its place, but not one
    with it. A NaN is the highest value to both.
    """
    blocks = logits.reshape(logits.shape[0], -1, _BLOCK)
    peaks, best = blocks.amax(dim=2).max(dim=1)
    places = blocks[torch.arange(blocks.shape[0]), best].argmax(dim=1)
    return best * _BLOCK + places, peaks.isfinite()


def draw(logits: torch.Tensor, temperature: torch.Tensor, keys: NoiseKeys) -> torch.Tensor:
    """`draw_reference`, by the best implementation for the device."""
    return draw_reference(logits, temperature, keys)


def draw_truncated(
    logits: torch.Tensor, temperature: torch.Tensor, truncation: Truncation, keys: NoiseKeys
) -> torch.Tensor:
    """`draw_truncated_reference`, by the best implementation for the device."""
    return draw_truncated_reference(logits, temperature, truncation, keys)


def sample_rows_reference(
    logits: torch.Tensor, rows: torch.Tensor, output_positions: torch.Tensor, parameters: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, as the row's parameters say.

    Args:
        logits: bf16, fp16 or fp32 [num_samples, vocab_size].
        rows: int32 or int64 [num_samples], rows of the matrix.
        output_positions: int32 or int64 [num_samples], positions of the drawn tokens in their
            outputs.
        parameters: int32 [num_rows + 1, 16], see `sampling.parameters`.

    Returns:
        Tokens, int64 [num_samples]: 0 where the row is not finite. Finiteness, bool [num_samples]:
        false where a logit is NaN or +inf, or all are -inf.
    """
    logits = logits.float()
    tokens, finite = choose_greedy(logits)
    chosen = parameters.index_select(0, rows)
    temperature = read_floats(chosen, TEMPERATURE)
    truncation = _truncation_of(chosen, logits.shape[1])
    random = temperature > 0
    truncates = random & (
        (truncation.top_n_sigma > 0) | (truncation.top_k > 0) | (truncation.min_p > 0) | (truncation.top_p < 1)
    )
    keys = read_noise_keys(chosen, output_positions)
    for mask in (random & ~truncates, truncates):
        indices = mask.nonzero()[:, 0]
        if not indices.numel():
            continue
        # Views instead of copies where all rows are of one kind, as they mostly are.
        samples = slice(None) if indices.numel() == logits.shape[0] else indices
        inputs = logits[samples], temperature[samples]
        if mask is truncates:
            tokens[samples] = draw_truncated(*inputs, truncation.select(samples), keys.select(samples))
        else:
            tokens[samples] = draw(*inputs, keys.select(samples))
    return tokens.masked_fill_(~finite, 0), finite


def _truncation_of(rows: torch.Tensor, vocab_size: int) -> Truncation:
    """What rows of the parameter matrix keep."""
    top_k = rows[:, TOP_K].to(torch.int64)
    return Truncation(
        read_floats(rows, TOP_N_SIGMA),
        top_k.masked_fill_(top_k >= vocab_size, 0),
        read_floats(rows, MIN_P),
        read_floats(rows, TOP_P),
    )


def sample_rows(
    logits: torch.Tensor, rows: torch.Tensor, output_positions: torch.Tensor, parameters: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample_rows_reference`, by the best implementation for the device."""
    if uses_triton(logits):
        return sample_rows_triton(logits, rows, output_positions, parameters)
    return sample_rows_reference(logits, rows, output_positions, parameters)
