"""The gated delta rule: each value head of a row keeps a matrix S [key_dim, value_dim], in fp32.

    S <- exp(g) S;  u = beta (v - S' k);  S <- S + k u';  out = S' q

for each token in turn, with q and k of length 1 (q over the root of key_dim besides),
beta = sigmoid(correction) and g = -exp(log_decay) * softplus(decay + decay_bias).

In chunks of C tokens the same: with G the running sum of g in the chunk, and S what was before it,

    (I + A) U = beta (V - exp(G) K S)          A[i, j] = beta_i exp(G_i - G_j) k_i' k_j for j < i
    out = exp(G) Q S + M U                     M[i, j] = exp(G_i - G_j) q_i' k_j for j <= i
    S <- exp(G_C) S + (exp(G_C - G) K)' U

so that a chunk costs a triangular system and a few products instead of C small steps. Exponents are
at most 0. Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, section 3.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace_kernels.recurrence.chunk_kernels import LEAST_TOKENS, launch_chunks, takes_chunks
from headrace_kernels.recurrence.entries import HostEntries, RecurrentEntries
from headrace_kernels.recurrence.gated_delta_kernels import launch_gated_delta
from headrace_kernels.triton_runtime import uses_triton

# Tokens of a chunk.
_CHUNK = 64
# Added to the square of a query's or key's length.
LENGTH_EPS = 1e-6


class DeltaHeads(NamedTuple):
    """Numbers and sizes of heads. Consecutive value heads share a query and a key."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_channels(self) -> int:
        """Elements of a token's queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


class DeltaGates(NamedTuple):
    """What decides how a head's matrix changes."""

    # [num_tokens, num_value_heads] each, views with strides allowed.
    correction: Tensor
    decay: Tensor
    # fp32 [num_value_heads] each.
    log_decay: Tensor
    decay_bias: Tensor


class _Wide(NamedTuple):
    """Tokens in fp32: [n, num_value_heads, dim], and gates [n, num_value_heads]."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    log_decay: Tensor

    def part(self, first: int, end: int) -> _Wide:
        """Tokens `first` up to `end`."""
        return _Wide(*(column[first:end] for column in self))


def gated_delta_reference(
    mixed: Tensor, gates: DeltaGates, matrices: Tensor, entries: RecurrentEntries, heads: DeltaHeads
) -> Tensor:
    """Token by token, as the rule says. The specification; see `gated_delta`."""
    wide, out = _widened(mixed, gates, heads), _empty_output(mixed, heads)
    for (first, end), row, start, num_drafts in zip(*HostEntries.of(entries), strict=True):
        state = matrices[row].clone() if start else torch.zeros_like(matrices[row])
        for token in range(first, end):
            result, states = _step(wide.part(token, token + 1), state[None])
            out[token], state = result[0], states[0]
            if token == end - num_drafts - 1:
                matrices[row] = state
    return out


def gated_delta_chunked(
    mixed: Tensor, gates: DeltaGates, matrices: Tensor, entries: RecurrentEntries, heads: DeltaHeads
) -> Tensor:
    """Entries of one token side by side, longer ones in chunks. See `gated_delta`."""
    wide, out, host = _widened(mixed, gates, heads), _empty_output(mixed, heads), HostEntries.of(entries)
    singles: list[int] = []
    for index, ((first, end), row, start, num_drafts) in enumerate(zip(*host, strict=True)):
        if end == first + 1:
            singles.append(index)
            continue
        state = matrices[row] if start else torch.zeros_like(matrices[row])
        kept = end - num_drafts
        for begin in range(first, kept, _CHUNK):
            stop = min(begin + _CHUNK, kept)
            out[begin:stop], state = _chunk(wide.part(begin, stop), state)
        matrices[row] = state
        if num_drafts:
            out[kept:end], _ = _chunk(wide.part(kept, end), state)
    if singles:
        _single_tokens(singles, host, wide, matrices, out)
    return out


def _single_tokens(singles: list[int], host: HostEntries, wide: _Wide, matrices: Tensor, out: Tensor) -> None:
    tokens = torch.tensor([host.spans[index][0] for index in singles])
    rows = torch.tensor([host.rows[index] for index in singles])
    states = matrices[rows]
    states[torch.tensor([not host.starts[index] for index in singles])] = 0.0
    result, states = _step(_Wide(*(column[tokens] for column in wide)), states)
    out[tokens] = result.to(out.dtype)
    matrices[rows] = states


def _step(token: _Wide, states: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of n rows.

    Takes their states [n, heads, key_dim, value_dim], and returns outputs [n, heads, value_dim] and
    the states after it.
    """
    states = states * token.log_decay.exp()[..., None, None]
    found = torch.einsum("nhkv,nhk->nhv", states, token.key)
    update = token.beta[..., None] * (token.value - found)
    states = states + token.key[..., None] * update[..., None, :]
    return torch.einsum("nhkv,nhk->nhv", states, token.query), states


def _chunk(tokens: _Wide, state: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of one row that follow each other.

    Takes its state [heads, key_dim, value_dim], and returns outputs [n, heads, value_dim] and the
    state after them.
    """
    # [heads, n, dim] and [heads, n].
    query, key, value, beta, log_decay = (column.transpose(0, 1) for column in tokens)
    total = log_decay.cumsum(1)
    ages = (total[:, :, None] - total[:, None, :]).tril()
    decays = ages.exp().tril()
    shrunk = total.exp()[..., None]
    system = beta[..., None] * decays * (key @ key.transpose(1, 2))
    wanted = beta[..., None] * (value - shrunk * (key @ state))
    # The diagonal counts as 1, whatever stands there.
    update = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = shrunk * (query @ state) + (decays * (query @ key.transpose(1, 2))) @ update
    left = (total[:, -1:] - total).exp()[..., None]
    state = shrunk[:, -1:] * state + (left * key).transpose(1, 2) @ update
    return out.transpose(0, 1), state


def _widened(mixed: Tensor, gates: DeltaGates, heads: DeltaHeads) -> _Wide:
    keys = heads.num_key_heads * heads.key_dim
    query, key, value = mixed.float().tensor_split((keys, 2 * keys), dim=1)
    group = heads.num_value_heads // heads.num_key_heads
    query, key = (
        _of_length_one(part.view(-1, heads.num_key_heads, heads.key_dim)).repeat_interleave(group, dim=1)
        for part in (query, key)
    )
    softplus = torch.nn.functional.softplus(gates.decay.float() + gates.decay_bias)
    return _Wide(
        query * heads.key_dim**-0.5,
        key,
        value.view(-1, heads.num_value_heads, heads.value_dim),
        gates.correction.float().sigmoid(),
        -gates.log_decay.exp() * softplus,
    )


def _of_length_one(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt()


def _empty_output(mixed: Tensor, heads: DeltaHeads) -> Tensor:
    return mixed.new_empty(len(mixed), heads.num_value_heads, heads.value_dim)


def gated_delta(
    mixed: Tensor, gates: DeltaGates, matrices: Tensor, entries: RecurrentEntries, heads: DeltaHeads
) -> Tensor:
    """Applies the gated delta rule to a step's tokens, each after those of its row before it.

    Args:
        mixed: [num_tokens, heads.num_channels] contiguous: queries, keys and values of all heads.
        gates: What decides how matrices change.
        matrices: fp32 [num_rows, num_value_heads, key_dim, value_dim] of each row, changed in
            place. The dimensions behind the first are contiguous.
        entries: Entries of the step. Drafts have outputs, and leave no trace in a matrix; the
            kernels are given none.
        heads: Numbers and sizes of heads.

    Returns:
        [num_tokens, num_value_heads, value_dim] in the type of `mixed`. Tokens of no entry are not
        written.
    """
    if not uses_triton(mixed):
        return gated_delta_chunked(mixed, gates, matrices, entries, heads)
    return launch_by_length(mixed, gates, matrices, entries, heads)


def launch_by_length(
    mixed: Tensor, gates: DeltaGates, matrices: Tensor, entries: RecurrentEntries, heads: DeltaHeads, least: int = 1
) -> Tensor:
    """Launches the kernels of `gated_delta` for entries from a length on.

    Args:
        mixed: Queries, keys and values.
        gates: What decides how matrices change.
        matrices: States of all rows, changed in place.
        entries: Entries of the step.
        heads: Numbers and sizes of heads.
        least: Tokens of the shortest entries that are computed.

    Returns:
        [num_tokens, num_value_heads, value_dim]. Tokens of shorter entries are not written.
    """
    operands = (mixed, gates, matrices, entries, heads, out := _empty_output(mixed, heads), LENGTH_EPS)
    by_chunks = takes_chunks(heads, mixed.dtype) and not entries.only_decodes
    least_of_chunks = max(least, LEAST_TOKENS)
    launch_gated_delta(*operands, least, least_of_chunks - 1 if by_chunks else len(mixed))
    if by_chunks:
        launch_chunks(*operands, least=least_of_chunks)
    return out
