"""The lookup's kernels compile for the newest GPU that we know, once, and spill next to nothing."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support.compiling import compiled


@pytest.mark.slow  # Launched on a GPU; elsewhere its results are tested.
def test_every_kernel_is_compiled_once() -> None:
    kernels = compiled("compiled_suffix", 90)
    # The lookup once in rows, and once in memories.
    assert Counter(kernel["name"] for kernel in kernels) == {
        "find_suffix_kernel": 2,
        "copy_suffix_kernel": 1,
        "remember_kernel": 1,
    }
    for kernel in kernels:
        # A word, outside of the lookup's loop.
        assert kernel["stack_bytes"] <= 8 and kernel["shared_bytes"] <= kernel["shared_limit"]
