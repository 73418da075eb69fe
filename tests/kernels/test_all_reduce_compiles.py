"""The kernels of `all_reduce` compile for the oldest and the newest card that we know, once per type (and width, with the norm): whole vectors between cards, which no cache keeps from being seen, and numbers that stay in their threads."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support.compiling import compiled


@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_is_compiled_once(arch: int) -> None:
    kernels = compiled("compiled_all_reduce", arch)
    assert Counter(kernel["name"] for kernel in kernels) == {
        "one_shot_kernel": 2,
        "one_shot_norm_kernel": 4,
        "two_shot_kernel": 2,
    }
    for kernel in kernels:
        shots = 2 if kernel["name"] == "two_shot_kernel" else 1
        is_normed = kernel["name"] == "one_shot_norm_kernel"
        assert kernel["stack_bytes"] == 0 and kernel["shared_bytes"] <= kernel["shared_limit"]
        # To each other rank once a shot, and from each rank's slot.
        assert kernel["sent"] == 3 * shots and kernel["awaited"] == 4 * shots
        # What is sent; with the norm the row, the stream and the weight; with two shots what is sent to each other rank, and what is not sent.
        assert kernel["vector_loads"] == (4 if is_normed or shots == 2 else 1)
        # Threads change numbers for the sum of squares only.
        assert kernel["layout_changes"] == 0 and bool(kernel["shared_bytes"]) is is_normed
