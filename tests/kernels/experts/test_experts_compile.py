"""The kernels of mixtures of experts compile for other GPUs, within their limits."""

from __future__ import annotations

import pytest
from tests.support.compiling import compiled


# The interpreter computes all in test_mixture, test_routing and test_tile_table, and what
# test_grouped_gemm_sm90 and test_mxfp4_gemm_sm90 have is emulated.
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90])
def test_all_kernels_fit_the_card(arch: int) -> None:
    kernels = compiled("compiled_kernels", "experts", arch)
    of_hopper = {
        "_streamed_gate_up_kernel", "_streamed_down_kernel", "_table_kernel", "_grouped_gemm_kernel",
        "_mxfp4_gemm_kernel",
    }  # fmt: skip
    assert {kernel["name"] for kernel in kernels} == (of_hopper if arch == 90 else set[str]()) | {
        "_choose_kernel", "_choose_scored_kernel", "_route_kernel", "_sort_kernel", "_count_kernel", "_place_kernel",
        "_vector_gate_up_kernel", "_vector_down_kernel", "_tile_kernel", "_block_tile_kernel",
        "_combine_kernel", "_few_gate_up_kernel", "_few_down_kernel", "_many_kernel",
    }  # fmt: skip
    assert all(kernel["shared_bytes"] <= kernel["shared_limit"] for kernel in kernels)
    # Threads of a warp that took them apart would wait for each other's products forever.
    assert not [each for each in kernels if each["thread_branches"]]
    # Registers spilled inside a loop cost bandwidth. A few are all the same, and on sm_90 those of
    # FP8 in blocks for 64 pairs and of MXFP4 for 128, which were the fastest there. Down of 8 bits
    # without a residual stream spills four for a fourth program on a multiprocessor.
    tiles = ("_tile_kernel", "_many_kernel", "_block_tile_kernel")
    most = {name: 64 if arch == 90 else 16 for name in tiles} | {"_streamed_down_kernel": 16}
    assert not [each for each in kernels if each["stack_bytes"] > most.get(each["name"], 0)]
    if arch == 90:
        assert all(
            kernel["warpgroup_products"]
            for kernel in kernels
            if kernel["name"] in ("_tile_kernel", "_many_kernel", "_grouped_gemm_kernel", "_mxfp4_gemm_kernel")
        )
        # Where the assembler doubts what registers a product reads, it waits for each of its parts.
        grouped = [kernel for kernel in kernels if kernel["name"] == "_mxfp4_gemm_kernel"]
        assert all(2 * kernel["waits_for_products"] < 3 * kernel["warpgroup_products"] for kernel in grouped)
