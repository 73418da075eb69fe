"""The kernels of sampling compile for the oldest and the newest GPU that we know.

They spill little and compile once: neither a batch's size nor a column's address compiles anew.
"""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support.compiling import compiled


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_every_kernel_is_compiled_once_per_type_of_logits(arch: int) -> None:
    kernels = compiled("compiled_sampling", arch)
    assert Counter(kernel["name"] for kernel in kernels) == {
        "summarize_blocks_kernel": 3,
        "choose_tokens_kernel": 3,
        "summarize_rows_kernel": 3,
        "report_rows_kernel": 3,
        "penalize_rows_kernel": 1,
    }
    for kernel in kernels:
        assert kernel["shared_bytes"] <= kernel["shared_limit"]
        # A row that truncates holds more than two rows' registers on a multiprocessor, a little;
        # not in its loops' innermost part.
        assert kernel["stack_bytes"] <= (32 if kernel["name"] == "choose_tokens_kernel" else 0)
