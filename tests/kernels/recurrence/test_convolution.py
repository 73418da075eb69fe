"""The convolution before a recurrence: PyTorch's over a whole row, however rows are cut."""

from __future__ import annotations

import pytest
import torch
from tests.support.kernel_case import DEVICES, DTYPES, ROUNDING, kernels_on, poisoned_memory
from tests.support.recurrent_case import RecurrentCase

from headrace_kernels.recurrence.convolution import causal_convolution, causal_convolution_reference
from headrace_kernels.recurrence.output_norm import gated_rms_norm

COUNTS, STARTS = [1, 19, 0, 2, 3], [4, 1, 0, 0, 20]
OTHERS = [(DTYPES[1], 2), (DTYPES[2], 3)]


@pytest.mark.parametrize("kernel", [2, 4])
def test_the_reference_is_pytorchs_convolution(kernel: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(50, 7), torch.randn(7, kernel)
    padded = torch.nn.functional.pad(x.T[None], (kernel - 1, 0))
    whole = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], groups=7))[0].T
    tails, found, first = torch.full((3, kernel, 7), torch.nan), [], 0
    for count in (1, 1, 20, 3, 25):
        case = RecurrentCase([count], [first], torch.float32, "cpu", padding=0)
        entries = case.entries._replace(rows=torch.tensor([2], dtype=torch.int32))
        found.append(causal_convolution_reference(x[first : first + count], weight, tails, entries))
        first += count
    torch.testing.assert_close(torch.cat(found), whole, atol=1e-6, rtol=1e-5)
    for position in range(50 - kernel, 50):
        torch.testing.assert_close(tails[2, position % kernel], x[position])


def check(case: RecurrentCase, channels: int, kernel: int, device: str) -> None:
    x, weight = case.numbers.randn(case.num_tokens, channels), case.numbers.randn(channels, kernel)
    tails = case.states(kernel, channels)
    expected = causal_convolution_reference(x, weight, wanted := tails.clone(), case.entries)
    with kernels_on(device), poisoned_memory(device):
        found = causal_convolution(x, weight, tails, case.entries)
    # Sums in another order, and rounded once.
    torch.testing.assert_close(
        found[: case.num_filled], expected[: case.num_filled], atol=1e-5, rtol=1e-5 + 2 * ROUNDING[x.dtype]
    )
    torch.testing.assert_close(tails, wanted, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "kernel"), [(DTYPES[0], 4), *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_the_kernels_agree_with_the_reference(dtype: torch.dtype, kernel: int, device: str) -> None:
    check(RecurrentCase(COUNTS, STARTS, dtype, device), 150, kernel, device)


@pytest.mark.gpu
def test_channels_of_models_agree_with_the_reference() -> None:
    for counts, starts in (([1] * 512, [7] * 512), ([1, 3000, 2, 1095], [9, 0, 1, 100])):
        check(RecurrentCase(counts, starts, torch.bfloat16, "cuda"), 8192, 4, "cuda")


def test_outputs_are_normed_and_then_gated() -> None:
    torch.manual_seed(0)
    x, gate, weight = torch.randn(5, 3, 8), torch.randn(5, 3, 8), torch.randn(8)
    expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6) * gate * gate.sigmoid()
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-6), expected)
