"""The kernels of `all_reduce` compile for the oldest and the newest GPU that we know.

They compile once per dtype (and width, with the norm). Vectors go whole between GPUs, which no
cache keeps from being seen, and numbers stay in their threads.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.support.compiling import compiled


def check_rounded_norms(kernels: list[dict[str, Any]]) -> None:
    """The fused norm takes each row's mean square by the instructions of its own kernel.

    Numbers stay in their threads.
    """
    alone = {kernel["size"]: kernel["mean_squares"] for kernel in kernels if kernel["name"] == "_add_rms_norm_kernel"}
    assert len(alone) == 2
    for kernel in kernels:
        if kernel["name"] != "two_shot_norm_kernel":
            continue
        assert kernel["stack_bytes"] == 0 and kernel["layout_changes"] == 0
        # A row of each of four ranks. With each of a thread's two vectors, to each other rank
        # twice; from each slot's part, and from what each other rank added up.
        assert kernel["mean_squares"] == 4 * alone[kernel["size"]] and len(alone[kernel["size"]]) == 1
        assert kernel["sent"] == 2 * 6 and kernel["awaited"] == 2 * (4 + 3)


# What the kernels compute is proven in the interpreter.
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_is_compiled_once(arch: int) -> None:
    # Cards multiply e4m3 from sm_89 on: one type of 8 bits, or both, e4m3 in groups too.
    rounded = 4 if arch < 89 else 12
    kernels = compiled("compiled_all_reduce", arch)
    assert Counter(kernel["name"] for kernel in kernels) == {
        "one_shot_kernel": 2,
        "one_shot_norm_kernel": 4,
        "two_shot_kernel": 2,
        "two_shot_norm_kernel": rounded,
        "_add_rms_norm_kernel": rounded,
    }
    check_rounded_norms(kernels)
    for kernel in kernels:
        # Two vectors of its weight, which no kernel writes, are what the norm by itself asks for
        # before it waits. All-reduces, of which other ranks are a part, ask for nothing.
        is_alone = kernel["name"] == "_add_rms_norm_kernel"
        assert kernel["waits"] == (1 if arch >= 90 else 0)
        assert kernel["touched_early"] == (2 if is_alone and arch >= 90 else 0)
        if kernel["name"] in ("two_shot_norm_kernel", "_add_rms_norm_kernel"):
            continue
        shots = 2 if kernel["name"] == "two_shot_kernel" else 1
        is_normed = kernel["name"] == "one_shot_norm_kernel"
        assert kernel["stack_bytes"] == 0 and kernel["shared_bytes"] <= kernel["shared_limit"]
        # To each other rank once a shot, and from each rank's slot.
        assert kernel["sent"] == 3 * shots and kernel["awaited"] == 4 * shots
        # What is sent; with the norm the row, the stream and the weight; with two shots what is
        # sent to each other rank, and what is not sent.
        assert kernel["vector_loads"] == (4 if is_normed or shots == 2 else 1)
        # Threads change numbers for the sum of squares only.
        assert kernel["layout_changes"] == 0 and bool(kernel["shared_bytes"]) is is_normed
