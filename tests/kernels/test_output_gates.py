"""Gates of attention's heads in Triton: what PyTorch's operations take out, and gate."""

from __future__ import annotations

import pytest
import torch
from tests.support.kernel_case import DEVICES, DTYPES, ROUNDING, Numbers, kernels_on, poisoned_memory

from headrace_kernels.output_gates import (
    gate_heads,
    gate_heads_reference,
    without_gates,
    without_gates_reference,
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim", "beside"), [(1, 4, 256, 512), (5, 3, 20, 40)])
def test_gates_are_taken_out_and_open_their_heads(
    num_tokens: int, num_heads: int, head_dim: int, beside: int, dtype: torch.dtype, device: str
) -> None:
    numbers, size = Numbers(device, dtype), num_heads * head_dim
    # Lines with a stride, and gates that open and close altogether.
    projected = 20 * numbers.randn(num_tokens, 2 * size + beside + 8)[:, : 2 * size + beside]
    heads = numbers.randn(num_tokens, size)
    wanted, wanted_gates = without_gates_reference(projected, num_heads, head_dim)
    expected = gate_heads_reference(heads.clone(), wanted_gates)
    with kernels_on(device), poisoned_memory(device):
        found, gates = without_gates(projected, num_heads, head_dim)
        gated = gate_heads(heads, gates)
    assert found.is_contiguous() and torch.equal(found, wanted) and torch.equal(gates, wanted_gates)
    assert gated.data_ptr() == heads.data_ptr()
    # The sigmoid is rounded, and the product.
    rounding = 3 * ROUNDING[dtype]
    torch.testing.assert_close(gated, expected, atol=1e-6, rtol=rounding)
