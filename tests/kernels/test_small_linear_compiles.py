"""The kernels of few rows' products compile for cards that this machine may not have, within their limits, once per size of model and class of rows."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support.compiling import compiled


@pytest.mark.parametrize("arch", [80, 86, 90])
def test_all_kernels_fit_the_card(arch: int) -> None:
    kernels = compiled("compiled_kernels", "small_linear", arch)
    # One row: five products of a large model streamed, a short one not. Two rows and eight: six products each, with the same tiles.
    assert Counter(kernel["name"] for kernel in kernels) == {
        "_stream_kernel": 5,
        "_vector_kernel": 1,
        "_tile_kernel": 12,
    }
    assert all(kernel["shared_bytes"] <= kernel["shared_limit"] for kernel in kernels)
    # Registers spilled inside a loop cost bandwidth.
    assert not any(kernel["stack_bytes"] for kernel in kernels)
