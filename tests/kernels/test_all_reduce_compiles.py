"""The kernels of `all_reduce` compile for the oldest and the newest card that we know, once per type (and width, with the norm), with whole vectors between cards and marks that order memory for all cards."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support.compiling import compiled


@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_is_compiled_once(arch: int) -> None:
    kernels = compiled("compiled_all_reduce", arch)
    assert Counter(kernel["name"] for kernel in kernels) == {
        "push_kernel": 2,
        "push_norm_kernel": 4,
        "two_shot_kernel": 2,
    }
    for kernel in kernels:
        assert kernel["stack_bytes"] == 0 and kernel["shared_bytes"] <= kernel["shared_limit"]
        if kernel["name"] == "two_shot_kernel":
            # This rank's tensor, and four of the ranks; what is copied, and what comes out.
            assert kernel["vector_loads"] >= 5 and kernel["vector_stores"] >= 2
            # Of each rank one look, and one that is repeated, in both meetings.
            assert kernel["releases"] == 8 and kernel["acquires"] == 16
            continue
        # To each other rank once, and from each rank's slot.
        assert kernel["sent"] == 3 and kernel["awaited"] == 4
        assert kernel["releases"] == kernel["acquires"] == 0
        # Numbers change hands between threads for the sum of squares only.
        assert kernel["layout_changes"] == 0
        is_normed = kernel["name"] == "push_norm_kernel"
        assert kernel["vector_loads"] == (4 if is_normed else 1)
        assert bool(kernel["shared_bytes"]) is is_normed
