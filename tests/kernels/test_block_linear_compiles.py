"""The kernels of weights in blocks compile for cards that this machine may not have, within their limits."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support.compiling import compiled

from headrace_kernels.low_bit.block_weight import BlockKind

_KINDS = len(BlockKind)


@pytest.mark.parametrize("arch", [80, 90])
def test_all_kernels_fit_the_card(arch: int) -> None:
    kernels = compiled("compiled_kernels", "blocks", arch)
    # Two classes of few rows; restored rows, and rows looked up.
    assert Counter(kernel["name"] for kernel in kernels) == {"_small_kernel": 2 * _KINDS, "_restore_kernel": 2 * _KINDS}
    assert all(kernel["shared_bytes"] <= kernel["shared_limit"] for kernel in kernels)
    # Registers spilled inside a loop cost bandwidth; some kinds keep up to six addresses on the stack.
    assert all(kernel["stack_bytes"] <= 32 for kernel in kernels)
