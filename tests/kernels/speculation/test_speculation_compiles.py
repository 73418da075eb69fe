"""The kernels of speculation compile for the oldest and the newest GPU that we know.

Neither a batch's size nor a column's address compiles anew.
"""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support.compiling import compiled


# Kernels are compiled for a card in the slow part.
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_is_compiled_once(arch: int) -> None:
    kernels = compiled("compiled_speculation", arch)
    assert Counter(kernel["name"] for kernel in kernels) == {
        "resolve_tokens_kernel": 1,
        # For lengths of entries, and for places in outputs.
        "lower_bounds_kernel": 2,
        "accept_drafts_kernel": 1,
        "append_tokens_kernel": 1,
        "find_runs_kernel": 1,
        "copy_runs_kernel": 1,
        "store_drafts_kernel": 1,
        "penalize_rows_kernel": 1,
        "build_pass_inputs_kernel": 1,
        "keep_drawn_kernel": 1,
        # For the first pass of a step, by row, and for a step's tokens.
        "gather_states_before_kernel": 2,
    }
    for kernel in kernels:
        assert kernel["shared_bytes"] <= kernel["shared_limit"]
        assert kernel["stack_bytes"] == 0, kernel["name"]
