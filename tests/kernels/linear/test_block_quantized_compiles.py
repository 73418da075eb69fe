"""The kernels of weights in blocks compile for other GPUs, within their limits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.support.compiling import compiled

from headrace_kernels.weight_formats.block_weight import BlockKind

_KINDS = len(BlockKind)


# As in test_quantized_compiles.
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_fit_the_card_whichever_two_of_card_kind_and_launch_meet(arch: int) -> None:
    check(compiled("compiled_kernels", "blocks", arch), of_each=1)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90])
def test_all_kernels_fit_the_card(arch: int) -> None:
    """All three at once, which the test above has two of."""
    check(compiled("compiled_kernels", "blocks_all", arch), of_each=2)


def check(kernels: list[dict[str, Any]], of_each: int) -> None:
    # For each kind one or two classes of few rows; dequantized rows, rows looked up, or both.
    count = of_each * _KINDS
    assert Counter(kernel["name"] for kernel in kernels) == {"_small_batch_kernel": count, "_dequantize_kernel": count}
    assert all(kernel["shared_bytes"] <= kernel["shared_limit"] for kernel in kernels)
    # Registers spilled inside a loop cost bandwidth; some kinds keep up to six addresses on the
    # stack.
    assert all(kernel["stack_bytes"] <= 32 for kernel in kernels)
