"""The gated delta rule: by chunks and by the kernel as by tokens, and these as its definition."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.support.kernel_case import DEVICES, DTYPES, ROUNDING, kernels_on, poisoned_memory
from tests.support.recurrent_case import RecurrentCase

from headrace_kernels.recurrence.gated_delta import (
    LENGTH_EPS,
    DeltaHeads,
    gated_delta,
    gated_delta_chunked,
    gated_delta_reference,
)

# Sizes of no power of two, and a value head for each key head.
HEADS = [DeltaHeads(2, 4, 12, 20), DeltaHeads(3, 3, 16, 33)]
# Decodes and chunks of sequences that begin and go on, and padding; chunks beyond 64 tokens below.
COUNTS, STARTS = [1, 11, 1, 0, 3], [4, 10, 0, 0, 0]


def test_the_reference_is_the_rule_in_fp64() -> None:
    heads = HEADS[0]
    case = RecurrentCase([9], [3], torch.float32, "cpu", padding=0)
    mixed, gates, states = case.mixed(heads), case.gates(heads), case.states(*heads[1:])
    found = gated_delta_reference(mixed, gates, after := states.clone(), case.entries, heads)
    keys = heads.num_key_heads * heads.key_dim
    for head in range(heads.num_value_heads):
        state, shared = states[case.rows[0], head].double(), head // 2
        for token, row in enumerate(mixed.double()):
            query, key = (
                row[first + shared * heads.key_dim :][: heads.key_dim] for first in (0, keys)
            )  # fmt: skip
            query, key = (each / (each @ each + LENGTH_EPS).sqrt() for each in (query, key))
            value = row[2 * keys + head * heads.value_dim :][: heads.value_dim]
            beta = torch.sigmoid(gates.correction[token, head].double())
            rate = gates.log_decay[head].double().exp()
            decay = (-rate * (1 + (gates.decay[token, head] + gates.decay_bias[head]).double().exp()).log()).exp()
            state = state * decay
            state = state + torch.outer(key, beta * (value - state.T @ key))
            torch.testing.assert_close(
                found[token, head].double(), state.T @ query / heads.key_dim**0.5, atol=1e-5, rtol=1e-5
            )
        torch.testing.assert_close(after[case.rows[0], head].double(), state, atol=1e-5, rtol=1e-5)


def check(case: RecurrentCase, heads: DeltaHeads, tolerance: float, device: str) -> None:
    mixed, gates, states = case.mixed(heads), case.gates(heads), case.states(*heads[1:])
    expected = gated_delta_reference(mixed, gates, wanted := states.clone(), case.entries, heads)
    with poisoned_memory(device):
        chunked = gated_delta_chunked(mixed, gates, by_chunks := states.clone(), case.entries, heads)
        with kernels_on(device):
            found = gated_delta(mixed, gates, by_kernel := states, case.entries, heads)
    rows = [row for row, count in zip(case.rows, case.counts, strict=True) if count]
    for result, after in ((chunked, by_chunks), (found, by_kernel)):
        torch.testing.assert_close(
            result[: case.num_filled].float(), expected[: case.num_filled].float(), atol=tolerance, rtol=tolerance
        )
        # fp32, whatever the tokens are in: sums in another order.
        torch.testing.assert_close(after[rows], wanted[rows], atol=1e-4, rtol=1e-4)
        others = sorted(set(range(case.num_rows)) - set(rows))
        assert after[others].isnan().all(), "a row that computes nothing keeps its state"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [HEADS[0], pytest.param(HEADS[1], marks=pytest.mark.slow)])
def test_chunks_and_kernel_agree_with_the_reference(heads: DeltaHeads, device: str) -> None:
    # On a card those of fp32 go token by token; `test_chunk_kernels` has other types.
    dtype = DTYPES[HEADS.index(heads)] if device == "cpu" else torch.float32
    # Outputs are rounded once.
    check(RecurrentCase(COUNTS, STARTS, dtype, device), heads, 1e-4 + 2 * ROUNDING[dtype], device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_models_agree_with_the_reference(dtype: torch.dtype) -> None:
    heads = DeltaHeads(16, 32, 128, 128)
    by_token = [([1] * 64, [40] * 64), ([15, 1, 2], [0, 9, 4096])]
    for counts, starts in [*by_token, ([700, 1, 129], [0, 9, 4096])] if dtype == torch.float32 else by_token:
        check(RecurrentCase(counts, starts, dtype, "cuda"), heads, 2e-3 + 2 * ROUNDING[dtype], "cuda")


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    counts=st.lists(st.integers(0, 90), min_size=1, max_size=4).filter(any),
    starts=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_chunks_of_any_length_agree_with_the_reference(
    counts: list[int], starts: list[int], seed: int, scale: float
) -> None:
    """Numbers may have any size: queries and keys get length 1, decays underflow without harm."""
    heads = DeltaHeads(1, 2, 4, 3)
    case = RecurrentCase(counts, starts[: len(counts)], torch.float32, "cpu", seed)
    mixed, gates, states = scale * case.mixed(heads), case.gates(heads), case.states(*heads[1:])
    gates = gates._replace(decay=scale * gates.decay)
    expected = gated_delta_reference(mixed, gates, wanted := states.clone(), case.entries, heads)
    found = gated_delta_chunked(mixed, gates, states, case.entries, heads)
    # A triangular system of 64 tokens, relative to the largest number.
    tolerance = 2e-4 * float(max(expected[: case.num_filled].abs().max(), 1e-3))
    torch.testing.assert_close(found[: case.num_filled], expected[: case.num_filled], atol=tolerance, rtol=0)
    torch.testing.assert_close(states, wanted, atol=10 * tolerance, rtol=1e-3, equal_nan=True)


@hypothesis.settings(max_examples=examples(40), deadline=None)
@hypothesis.given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_where_a_sequence_is_cut_changes_nothing(cuts: list[int], seed: int) -> None:
    heads = DeltaHeads(1, 2, 4, 3)
    whole = RecurrentCase([sum(cuts)], [0], torch.float32, "cpu", seed, padding=0)
    mixed, gates, states = whole.mixed(heads), whole.gates(heads), whole.states(*heads[1:])
    expected = gated_delta_chunked(mixed, gates, wanted := states.clone(), whole.entries, heads)
    first = 0
    for cut in cuts:
        part = RecurrentCase([cut], [first], torch.float32, "cpu", padding=0)
        entries = part.entries._replace(rows=whole.entries.rows)
        here = slice(first, first + cut)
        of_part = gates._replace(correction=gates.correction[here], decay=gates.decay[here])
        found = gated_delta_chunked(mixed[here], of_part, states, entries, heads)
        torch.testing.assert_close(found, expected[here], atol=1e-4, rtol=1e-3)
        first += cut
    torch.testing.assert_close(states, wanted, atol=1e-4, rtol=1e-3, equal_nan=True)
