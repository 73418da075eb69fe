"""The kernels of sampling compile for the oldest and the newest GPU that we know.

They spill little and compile once: neither a batch's size nor a column's address compiles anew.
"""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support.compiling import compiled

ALL = ("float32", "float16", "bfloat16")


# A kernel takes half a second or more to compile: everyday runs do with one type, which penalties
# take too.
@pytest.mark.parametrize(
    ("arch", "types"), [(90, ("float32",)), *(pytest.param(arch, ALL, marks=pytest.mark.slow) for arch in (80, 90))]
)
def test_every_kernel_is_compiled_once_per_type_of_logits(arch: int, types: tuple[str, ...]) -> None:
    kernels = compiled("compiled_sampling", arch, *types)
    assert Counter(kernel["name"] for kernel in kernels) == {
        "summarize_blocks_kernel": len(types),
        "choose_tokens_kernel": len(types),
        "summarize_rows_kernel": len(types),
        "report_rows_kernel": len(types),
        "penalize_rows_kernel": 1,
        "mask_rows_kernel": 1,
    }
    for kernel in kernels:
        assert kernel["shared_bytes"] <= kernel["shared_limit"]
        # A row that truncates holds more than two rows' registers on a multiprocessor, a little;
        # not in its loops' innermost part.
        assert kernel["stack_bytes"] <= (32 if kernel["name"] == "choose_tokens_kernel" else 0)
