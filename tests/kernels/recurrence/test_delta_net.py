"""Linear attention between its projections: decodes in a launch are the operations one by one."""

from __future__ import annotations

import pytest
import torch
from tests.support.kernel_case import DEVICES, DTYPES, ROUNDING, kernels_on, poisoned_memory
from tests.support.recurrent_case import RecurrentCase

from headrace_kernels.recurrence.delta_net import DeltaWeights, ProjectedTokens, delta_net, delta_net_reference
from headrace_kernels.recurrence.gated_delta import DeltaHeads
from headrace_kernels.recurrence.pending import RowStates

KERNEL = 4
# Value heads that share a key, and sizes of no power of two.
HEADS = [DeltaHeads(2, 4, 12, 20), DeltaHeads(1, 3, 16, 8)]
# Rows that begin, that have seen less than the convolution sees, and padding.
STARTS = [0, 1, 2, 3, 4, 0, 9, 10, 11]
COUNTS = [1, 1, 1, 1, 1, 0, 1, 1, 1]


def states_of(case: RecurrentCase, heads: DeltaHeads) -> RowStates:
    """Matrices and kept inputs; those before a sequence's first token are NaN."""
    tails = case.states(KERNEL, heads.num_channels).clone()
    for row, start in zip(case.rows, case.starts, strict=True):
        tails[row, [place for place in range(KERNEL) if place >= start]] = torch.nan
    return RowStates(case.states(*heads[1:]), tails)


def check(case: RecurrentCase, heads: DeltaHeads, device: str) -> None:
    """The step as operations compute it, on a card kernels too, which know nothing of decodes."""
    numbers, width = case.numbers, heads.num_value_heads * heads.value_dim
    # One product's views, as a layer has them.
    sizes = (heads.num_channels, width, heads.num_value_heads, heads.num_value_heads)
    tokens = ProjectedTokens(*numbers.randn(case.num_tokens, sum(sizes)).split(sizes, dim=1))
    gates = case.gates(heads)
    weights = DeltaWeights(
        numbers.randn(heads.num_channels, KERNEL),
        gates.log_decay,
        gates.decay_bias,
        numbers.randn(heads.value_dim),
        1e-6,
    )
    states = states_of(case, heads)
    entries = case.entries._replace(only_decodes=max(case.counts) == 1)
    wanted = RowStates(states.matrices.clone(), states.tails.clone())
    expected = delta_net_reference(tokens, weights, wanted, case.entries, heads)
    with kernels_on(device), poisoned_memory(device):
        found = delta_net(tokens, weights, states, entries, heads)
    # The output is rounded, normed, rounded, gated and rounded: sums in another order may round
    # each otherwise.
    tolerance = 1e-4 + 6 * ROUNDING[tokens.mixed.dtype]
    torch.testing.assert_close(
        found[: case.num_filled].float(), expected[: case.num_filled].float(), atol=tolerance, rtol=tolerance
    )
    torch.testing.assert_close(states.tails, wanted.tails, atol=0, rtol=0, equal_nan=True)
    # Inputs of the rule are rounded to the type.
    torch.testing.assert_close(states.matrices, wanted.matrices, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", HEADS)
def test_decodes_in_one_launch_agree_with_the_operations(heads: DeltaHeads, device: str) -> None:
    check(RecurrentCase(COUNTS, STARTS, torch.float32, device), heads, device)


@pytest.mark.parametrize("device", DEVICES)
def test_decodes_beside_longer_entries_agree_with_the_operations(device: str) -> None:
    """Entries of two tokens, of chunks and of none stand between them."""
    case = RecurrentCase([1, 2, 1, 20, 0, 1, 15, 1], [0, 3, 2, 0, 0, 9, 1, 5], torch.float32, device)
    check(case, HEADS[0], device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_of_models_agree_with_the_operations(dtype: torch.dtype) -> None:
    for counts in ([1] * 64 + [0], [1] * 64 + [200]):
        check(RecurrentCase(counts, [40, 0] * 32 + [0], dtype, "cuda"), DeltaHeads(16, 32, 128, 128), "cuda")
