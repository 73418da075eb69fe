"""Steps of rows with states, and the numbers that the operations of recurrent layers take."""

from __future__ import annotations

import itertools

import torch
from tests.support.kernel_case import Numbers

from headrace_kernels.recurrence.entries import RecurrentEntries
from headrace_kernels.recurrence.gated_delta import LENGTH_EPS, DeltaGates, DeltaHeads

# Elements of a row's line behind its matrices or kept inputs: states are views with a stride.
_BESIDE = 5


class RecurrentCase:
    """Entries with so many tokens each, behind so many; tokens behind the last are padding."""

    def __init__(
        self, counts: list[int], starts: list[int], dtype: torch.dtype, device: str, seed: int = 0, padding: int = 2
    ) -> None:
        """Entries have rows in another order; an entry of no tokens is padding, as in a graph."""
        self.numbers = Numbers(device, dtype, seed)
        self.counts, self.starts = counts, starts
        self.num_rows, self.num_filled = len(counts) + 2, sum(counts)
        self.num_tokens = self.num_filled + padding
        self.rows = torch.randperm(self.num_rows, generator=torch.Generator().manual_seed(seed)).tolist()[: len(counts)]
        ends = [start + count if count else 0 for start, count in zip(starts, counts, strict=True)]
        columns = ([0, *itertools.accumulate(counts)], ends, self.rows)
        self.entries = RecurrentEntries(*(torch.tensor(each, dtype=torch.int32, device=device) for each in columns))

    def states(self, *shape: int) -> torch.Tensor:
        """fp32 [num_rows, *shape]: NaN in rows that begin a sequence, and in those of nobody."""
        wide = torch.full((self.num_rows, torch.Size(shape).numel() + _BESIDE), torch.nan)
        filled = [row for row, start, count in zip(self.rows, self.starts, self.counts, strict=True) if start and count]
        wide[filled] = torch.randn(len(filled), wide.shape[1], generator=torch.Generator().manual_seed(1))
        return wide.to(self.numbers.device)[:, :-_BESIDE].unflatten(1, shape)

    def mixed(self, heads: DeltaHeads) -> torch.Tensor:
        return self.numbers.randn(self.num_tokens, heads.num_channels)

    def gates(self, heads: DeltaHeads) -> DeltaGates:
        wide = Numbers(self.numbers.device, torch.float32, 3)
        correction, decay = self.numbers.randn(self.num_tokens, 2 * heads.num_value_heads).tensor_split(2, dim=1)
        return DeltaGates(correction, decay, wide.randn(heads.num_value_heads), wide.randn(heads.num_value_heads))


def rule_in_fp64(
    case: RecurrentCase, mixed: torch.Tensor, gates: DeltaGates, states: torch.Tensor, heads: DeltaHeads
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule token by token in fp64, of all value heads at once.

    Returns outputs [num_filled, num_value_heads, value_dim] and the states behind the step, fp64.
    """
    group, keys = heads.num_value_heads // heads.num_key_heads, heads.num_key_heads * heads.key_dim
    query, key, value = mixed[: case.num_filled].double().tensor_split((keys, 2 * keys), dim=1)
    query, key = (part.unflatten(1, (heads.num_key_heads, heads.key_dim)) for part in (query, key))
    query, key = (part / (part.square().sum(-1, keepdim=True) + LENGTH_EPS).sqrt() for part in (query, key))
    query, key = (part.repeat_interleave(group, 1) for part in (query * heads.key_dim**-0.5, key))
    value = value.unflatten(1, (heads.num_value_heads, heads.value_dim))
    beta = gates.correction.double().sigmoid()
    softplus = torch.nn.functional.softplus(gates.decay.double() + gates.decay_bias.double())
    shrink = (-gates.log_decay.double().exp() * softplus).exp()
    out, after, token = torch.empty_like(value), states.double(), 0
    for row, start, count in zip(case.rows, case.starts, case.counts, strict=True):
        state = after[row].clone() if start else torch.zeros_like(after[row])
        for _ in range(count):
            state *= shrink[token, :, None, None]
            update = beta[token, :, None] * (value[token] - torch.einsum("hkv,hk->hv", state, key[token]))
            state += key[token, :, :, None] * update[:, None]
            out[token] = torch.einsum("hkv,hk->hv", state, query[token])
            token += 1
        if count:
            after[row] = state
    return out, after
