"""Which products weights of 8 and 4 bits take on cards of each generation, by the rules.

FP8 is stored everywhere, and multiplied as such where the tensor cores take it: on an A100 (sm_80)
it is turned into the model's type, on an L40S (sm_89) a library multiplies it from some rows on, on
an H100 and an H200 (sm_90) from fewer, and there alone in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from headrace_kernels import card
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.linear import gemm_fp8, quantized
from headrace_kernels.linear.quantized import Path, input_rounding, path_rule, rounds_to
from headrace_kernels.weight_formats.quantized_weight import PLAIN, Arrangement, QuantizedWeight, QuantKind, allocate

ABILITIES = {
    "has_warpgroup_products": 90,
    "has_warpgroup_instructions": 90,
    "has_copy_engine": 90,
    "launches_early": 90,
    "has_fp8_products": 89,
}
ROWS = (1, 16, 48, 64, 65, 512, 4096)
FEW = (Path.SMALL_BATCH, Path.SMALL_BATCH)


@pytest.fixture(params=[80, 86, 89, 90])
def arch(request: pytest.FixtureRequest) -> Iterator[int]:
    """A card of this generation, as the rules see it."""
    found = int(request.param)
    with mock.patch.object(quantized, "uses_triton", lambda x: True):
        patches = [
            mock.patch.object(card, name, lambda _, least=least: found >= least) for name, least in ABILITIES.items()
        ]
        patches.append(mock.patch.object(card, "multiprocessors", lambda _: 132))
        patches.append(mock.patch.object(gemm_fp8, "has_block_products", lambda: True))
        for patch in patches:
            patch.start()
        yield found
        for patch in patches:
            patch.stop()


def paths(weight: QuantizedWeight) -> list[Path]:
    return [path_rule(rows, weight) for rows in ROWS]


def made(kind: QuantKind, group: int = 4096, arrangement: Arrangement = PLAIN) -> QuantizedWeight:
    return allocate(kind, 4096, 4096, group, torch.bfloat16, torch.device("cpu"), arrangement)


def test_fp8_is_multiplied_as_such_where_the_card_can(arch: int) -> None:
    weight = made(QuantKind.FP8)
    in_16_bits = [*FEW, *[Path.GEMM] * 3, Path.DEQUANTIZED, Path.DEQUANTIZED]
    by_library = [*FEW, Path.GEMM, Path.GEMM, *[Path.SCALED] * 3]
    by_kernel = [*FEW, *[Path.SCALED] * 5]
    found = paths(weight)
    assert found == {80: in_16_bits, 86: in_16_bits, 89: by_library, 90: by_kernel}[arch]
    # What makes the tokens rounds them for such products, and for no other.
    assert [rounds_to(rows, weight) for rows in ROWS] == [
        InputRounding(torch.float8_e4m3fn) if path is Path.SCALED else None for path in found
    ]


def test_blocks_of_fp8_are_multiplied_as_such_on_sm_90(arch: int) -> None:
    groups = InputRounding(torch.float8_e4m3fn, 128)
    for inputs in (None, groups):
        weight = made(QuantKind.FP8, 128, Arrangement(scale_outputs=128, inputs=inputs))
        is_scaled = [path is Path.SCALED for path in paths(weight)]
        assert is_scaled == ([False, False, *[True] * 5] if arch == 90 else [False] * 7)
        # By the product, or by what makes its tokens.
        for rule in (input_rounding, rounds_to):
            assert [rule(rows, weight) for rows in ROWS] == [groups if each else None for each in is_scaled]
    assert path_rule(17, weight) is (Path.SCALED if arch == 90 else Path.GEMM)


def test_other_weights_in_fp8_keep_their_tokens(arch: int) -> None:
    others = [
        # Narrow blocks, as ranks may cut them, and other groups of inputs than the blocks'.
        made(QuantKind.FP8, 128, Arrangement(scale_outputs=64)),
        made(QuantKind.FP8, 128, Arrangement(scale_outputs=128, inputs=InputRounding(torch.float8_e4m3fn))),
        # Schemes that say so, and output layers.
        made(QuantKind.FP8, 128, Arrangement(scale_outputs=128, keeps_activations=True)),
        made(QuantKind.FP8, arrangement=Arrangement(keeps_activations=True)),
        # A last block that is cut off.
        allocate(QuantKind.FP8, 4096, 4160, 128, torch.bfloat16, torch.device("cpu"), Arrangement(scale_outputs=128)),
    ]
    for weight in others:
        assert Path.SCALED not in paths(weight)


def test_int8_is_multiplied_as_such_by_every_card(arch: int) -> None:
    weight = made(QuantKind.INT8, arrangement=Arrangement(inputs=InputRounding(torch.int8)))
    assert set(paths(weight)[4:]) == {Path.SCALED}


def test_int4_by_fp8_is_for_cards_with_fp8_products(arch: int) -> None:
    per_token = InputRounding(torch.float8_e4m3fn)
    weight = made(QuantKind.INT4, 128, Arrangement(inputs=per_token))
    found = paths(weight)
    assert (set(found[4:]) == {Path.SCALED}) if arch >= 89 else (Path.SCALED not in found)
