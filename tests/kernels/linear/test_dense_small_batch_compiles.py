"""The kernels of small batches compile for other GPUs, within their limits.

They compile once per size of model and class of rows.
"""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support.compiling import compiled


# The interpreter computes all in test_dense_small_batch, and those of sampling are compiled every
# time.
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90])
def test_all_kernels_fit_the_card(arch: int) -> None:
    kernels = compiled("compiled_kernels", "small_linear", arch)
    # One row, two and eight: six products each. On sm_90 twelve and twenty-four: five each, for
    # the sixth is too short, and eight: three with a norm and a bias; seven of one row that are
    # launched early, and three of tens of rows with the activation.
    newer = {"_vector_kernel": 13, "_stream_kernel": 13, "_gated_kernel": 3}
    expected = {"_vector_kernel": 6, "_tile_kernel": 12} | (newer if arch == 90 else {})
    assert Counter(kernel["name"] for kernel in kernels) == expected
    assert all(kernel["tiles_copied"] for kernel in kernels if kernel["name"] in ("_stream_kernel", "_gated_kernel"))
    # Both sums of an output are in one thread.
    assert not any(kernel["exchanges"] for kernel in kernels if kernel["name"] == "_gated_kernel")
    assert all(kernel["shared_bytes"] <= kernel["shared_limit"] for kernel in kernels)
    # Registers spilled inside a loop cost bandwidth.
    assert not any(kernel["stack_bytes"] for kernel in kernels)
