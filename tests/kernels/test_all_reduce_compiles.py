"""The kernels of `all_reduce` compile for the oldest and the newest card that we know, once per type (and width, with the norm), with whole vectors between cards and marks that order memory for all cards."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support.compiling import compiled


@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_is_compiled_once(arch: int) -> None:
    kernels = compiled("compiled_all_reduce", arch)
    assert Counter(kernel["name"] for kernel in kernels) == {
        "one_shot_kernel": 2,
        "two_shot_kernel": 2,
        "one_shot_norm_kernel": 4,
    }
    for kernel in kernels:
        assert kernel["stack_bytes"] == 0 and kernel["shared_bytes"] <= kernel["shared_limit"]
        # This rank's tensor, and four of the ranks; what is copied, and what comes out.
        assert kernel["vector_loads"] >= 5 and kernel["vector_stores"] >= 2
        meetings = 2 if kernel["name"] == "two_shot_kernel" else 1
        # Of each rank one look, and one that is repeated.
        assert kernel["releases"] == 4 * meetings and kernel["acquires"] == 8 * meetings
