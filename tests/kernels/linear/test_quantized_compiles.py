"""The kernels of low bits compile for cards that this machine may not have, within their limits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.support.compiling import compiled


def counted(kernels: list[dict[str, Any]]) -> dict[str, int]:
    """Kernels by name.

    One more adds the sums of split inputs, where rules split some: as often as they like.
    """
    counts = Counter(kernel["name"] for kernel in kernels)
    assert counts.pop("_add_splits_kernel") > 0
    return counts


# A kernel takes half a second or more to compile: everyday runs compile for a card those of
# sampling alone, and compute all others in the interpreter.
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_fit_the_card_whichever_two_of_kind_product_and_rows_meet(arch: int) -> None:
    kernels = compiled("compiled_kernels", "low_bits", arch)
    # Three kinds, three products: 1 or 12 rows, 64 or 200 rows, and restoring; and restoring to
    # fp32.
    expected = {
        "_gemv_8bit_kernel": 4,
        "_gemv_int4_kernel": 1,
        "_small_batch_kernel": 4,
        "_gemm_kernel": 9,
        "_dequantize_kernel": 12,
    }
    if arch == 90:
        # Warp groups multiply where outputs and inputs are whole tiles.
        expected |= {"_gemm_sm90_kernel": 6, "_gemm_kernel": 3}
    assert counted(kernels) == expected
    check_resources(kernels, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 89, 90])
def test_all_kernels_fit_the_card(arch: int) -> None:
    """All three at once, which the test above has two of."""
    kernels = compiled("compiled_kernels", "low_bits_all", arch)
    expected = {
        "_gemv_8bit_kernel": 6,
        "_gemv_int4_kernel": 3,
        "_small_batch_kernel": 9,
        "_gemm_kernel": 18,
        "_dequantize_kernel": 12,
    }
    if arch == 90:
        expected |= {"_gemm_sm90_kernel": 12, "_gemm_kernel": 6}
    assert counted(kernels) == expected
    check_resources(kernels, arch)


def check_resources(kernels: list[dict[str, Any]], arch: int) -> None:
    assert all(kernel["shared_bytes"] <= kernel["shared_limit"] for kernel in kernels)
    # Few rows wait for memory, and registers spilled inside a loop cost bandwidth; the tile of 16
    # rows that is fastest on sm_90 spills ten there, and more before.
    assert not any(kernel["stack_bytes"] for kernel in kernels if kernel["name"] == "_gemv_8bit_kernel")
    # Without a loop, so that registers are spilled but once: 128 bytes on sm_90 by the tile of gate
    # and up that was the fastest of its sweep for all that, as more programs run at a time.
    assert all(kernel["stack_bytes"] <= 192 for kernel in kernels if kernel["name"] == "_gemv_int4_kernel")
    assert all(
        kernel["stack_bytes"] <= (64 if arch == 90 else 256)
        for kernel in kernels
        if kernel["name"] == "_small_batch_kernel"
    )
    if arch == 90:
        wide = [kernel for kernel in kernels if kernel["name"] in ("_gemm_kernel", "_gemm_sm90_kernel")]
        assert all(kernel["warpgroup_products"] for kernel in wide)
        groups = [kernel for kernel in kernels if kernel["name"] == "_gemm_sm90_kernel"]
        # A pointer or two may lie on the stack; sums may not.
        assert all(kernel["stack_bytes"] <= 16 for kernel in groups)
        # One wait for each of four products, and those at the ends: the assembler has not put one
        # after every instruction.
        assert all(4 <= kernel["waits_for_products"] <= 6 for kernel in groups)


@pytest.mark.slow
def test_some_rows_of_8_bits_keep_their_sums_in_registers() -> None:
    kernels = compiled("compiled_kernels", "few", 90)
    counts = Counter(kernel["name"] for kernel in kernels)
    # Two kinds, two products, four classes of rows; and what adds splits.
    assert counts["_small_batch_8bit_kernel"] == 16 and counts.keys() <= {"_small_batch_8bit_kernel", "_end_kernel"}
    # Some pointers may lie on the stack at 64 rows; sums may not.
    assert all(kernel["stack_bytes"] <= 32 for kernel in kernels)
    assert all(kernel["shared_bytes"] <= kernel["shared_limit"] for kernel in kernels)


@pytest.mark.slow
def test_streams_of_few_bits_keep_numbers_and_sums_in_registers() -> None:
    kernels = compiled("compiled_kernels", "bit_streams", 90)
    assert {kernel["name"] for kernel in kernels} == {"_bit_stream_kernel"} and len(kernels) > 18
    assert not any(kernel["stack_bytes"] for kernel in kernels)
    assert all(kernel["warpgroup_products"] >= 4 and kernel["tiles_copied"] >= 2 for kernel in kernels)
    assert all(kernel["shared_bytes"] <= kernel["shared_limit"] for kernel in kernels)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90])
def test_an_output_layer_of_8_bits_fits_the_card(arch: int) -> None:
    """Results in fp32, and no kernel rounds activations, also on GPUs with FP8 products."""
    kernels = compiled("compiled_kernels", "head", arch)
    # Two kinds; at least one version for up to 16 rows and one for more.
    wide = "_gemm_sm90_kernel" if arch == 90 else "_gemm_kernel"
    assert len(kernels) >= 4 and {wide} < {kernel["name"] for kernel in kernels}
    assert not any(kernel["name"].startswith(("_round", "_quantize", "_gemm_int8_")) for kernel in kernels)
    assert all(kernel["shared_bytes"] <= kernel["shared_limit"] for kernel in kernels)
    assert not any(kernel["stack_bytes"] for kernel in kernels if kernel["name"] == "_small_batch_kernel")


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "few", "many"), [(80, 4, 4), (90, 2, 8)])
def test_what_folders_of_other_tools_need_fits_the_card_whichever_two_meet(arch: int, few: int, many: int) -> None:
    """Any two of card, arrangement, product and rows."""
    kernels = compiled("compiled_kernels", "arranged", arch)
    # Six arrangements of 8 bits, two products: of each pair one of four classes of rows here,
    # another one there.
    expected = {"_gemv_8bit_kernel": few, "_small_batch_kernel": few, "_gemm_kernel": many, "_dequantize_kernel": 6}
    check_arranged(kernels, expected)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 89, 90])
def test_all_that_folders_of_other_tools_need_fits_the_card(arch: int) -> None:
    """All four at once, which the test above has two of."""
    kernels = compiled("compiled_kernels", "arranged_all", arch)
    check_arranged(
        kernels, {"_gemv_8bit_kernel": 12, "_small_batch_kernel": 12, "_gemm_kernel": 24, "_dequantize_kernel": 12}
    )


def check_arranged(kernels: list[dict[str, Any]], expected: dict[str, int]) -> None:
    assert counted(kernels) == expected | {"_gemm_int8_kernel": 1, "_take_kernel": 1}
    assert all(kernel["shared_bytes"] <= kernel["shared_limit"] for kernel in kernels)
    # Products of one row have no loop, so that a pair of registers is spilled but once.
    most = {"_gemv_8bit_kernel": 8}
    assert all(
        kernel["stack_bytes"] <= most.get(kernel["name"], 0) for kernel in kernels if kernel["name"] != "_gemm_kernel"
    )


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90])
def test_tokens_are_rounded_by_what_makes_them_in_registers(arch: int) -> None:
    kernels = compiled("compiled_kernels", "rounded", arch)
    # Two types, two widths; only cards with FP8 cores round to it, with a scale for each token or
    # group, on others the same weights take other paths.
    count = 12 if arch >= 89 else 4
    names = ("_rms_norm_kernel", "_add_rms_norm_kernel", "_rounded_swiglu_kernel")
    # The kernel of its own by scales of tokens and by a static one, SwiGLU with silu and with GELU,
    # the norm of a sum alone and beside the norm in its own type.
    twice = ("_round_kernel", "_rounded_swiglu_kernel", "_add_rms_norm_kernel")
    expected = {**dict.fromkeys(names, count), **dict.fromkeys(twice, 2 * count)}
    # A static scale is of no group.
    expected["_round_kernel"] -= 4 if arch >= 89 else 0
    # INT4 weights are rounded too where tokens are, but not in registers.
    weights = ["_round_to_e4m3_kernel"] if arch >= 89 else []
    assert Counter(kernel["name"] for kernel in kernels) == expected | dict.fromkeys(weights, 1)
    assert not any(kernel["stack_bytes"] for kernel in kernels)
    # A word for each warp's sums and largest numbers, and for each group's scale: rows keep their
    # layout from load to store, or they would pass through here.
    assert all(kernel["shared_bytes"] <= 1024 for kernel in kernels if kernel["name"] not in weights)
    assert all(kernel["shared_bytes"] <= kernel["shared_limit"] for kernel in kernels)
