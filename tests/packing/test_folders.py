"""Layers that are packed in another way than their folder says are named.

Correctly packed ones never are, trained or random, whatever their format.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.support.quantized_folders import AWQ_ORDER, Quantized, Recipe, quantize_folder
from tests.support.running_server import DEMO

from headrace_backend.packing.__main__ import examined
from headrace_backend.packing.faults import packing_faults
from headrace_backend.packing.layer_statistics import LayerStatistics

RECIPES = {
    "gptq": Recipe("gptq", group=64, ordered=True),
    "awq": Recipe("awq", group=64, symmetric=False),
    "packed": Recipe("packed", group=64, symmetric=False),
}
DOWN = "model.layers.3.mlp.down_proj"


@pytest.fixture(scope="module", params=list(RECIPES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """The trained demo model. Tests change its tensors and leave them as they were."""
    return quantize_folder(DEMO, tmp_path_factory.mktemp("demo"), RECIPES[request.param])


def suffixes(folder: Quantized) -> tuple[str, str, str]:
    """Suffixes of the names of numbers, scales and zero points."""
    if f"{DOWN}.qweight" in folder.tensors:
        return "qweight", "scales", "qzeros"
    return "weight_packed", "weight_scale", "weight_zero_point"


def found_in(folder: Quantized, change: Callable[[str, torch.Tensor], torch.Tensor]) -> str:
    kept = dict(folder.tensors)
    folder.tensors.update((name, change(name, value)) for name, value in kept.items())
    folder.rewrite()
    try:
        answer = examined(folder.path, "cpu")
        assert bool(answer.refused) != bool(answer.faults), "refused by a server, or by the doctor alone"
        return answer.refused + "\n".join(answer.faults)
    finally:
        folder.tensors.update(kept)
        folder.rewrite()


def reordered(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Nibble i of each word goes to place order[i]."""
    found, raw = np.zeros(words.shape, np.uint32), words.numpy().view(np.uint32)
    for place, target in enumerate(order):
        found |= ((raw >> np.uint32(4 * place)) & np.uint32(15)) << np.uint32(4 * target)
    return torch.from_numpy(found.view(np.int32).copy())


@pytest.mark.one_in(3)
def test_the_trained_model_is_let_pass(folder: Quantized) -> None:
    answer = examined(folder.path, "cpu")
    num_layers = sum(name.endswith(f".{suffixes(folder)[0]}") for name in folder.tensors)
    assert num_layers and (answer.num_layers, answer.faults, answer.refused) == (num_layers, [], "")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "order",
    [
        AWQ_ORDER,
        *(
            pytest.param(order, marks=pytest.mark.slow)
            for order in ((7, 6, 5, 4, 3, 2, 1, 0), (1, 0, 3, 2, 5, 4, 7, 6))
        ),
    ],
)
def test_nibbles_in_another_order_are_named_by_layer(folder: Quantized, order: tuple[int, ...]) -> None:
    numbers, _, _ = suffixes(folder)
    said = found_in(folder, lambda name, value: reordered(value, order) if name == f"{DOWN}.{numbers}" else value)
    # Some orders of nibbles are none of those that are tried: then scales are those of other
    # outputs.
    assert f"layer '{DOWN}'" in said and ("of a word are in another order" in said or "its scales are not" in said)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_scales_of_neighbours_are_named_by_layer(folder: Quantized, dim: int) -> None:
    _, scales, _ = suffixes(folder)
    said = found_in(folder, lambda name, value: value.roll(1, dim) if name == f"{DOWN}.{scales}" else value)
    assert f"layer '{DOWN}': its scales" in said


@pytest.mark.one_in(3)
def test_scales_of_another_layer_are_named_by_layer(folder: Quantized) -> None:
    _, scales, _ = suffixes(folder)
    kept = dict(folder.tensors)
    swap = {
        "model.layers.2.mlp.gate_proj": "model.layers.2.mlp.up_proj",
        "model.layers.2.mlp.up_proj": "model.layers.2.mlp.gate_proj",
    }

    def change(name: str, value: torch.Tensor) -> torch.Tensor:
        layer, _, suffix = name.rpartition(".")
        return kept[f"{swap[layer]}.{suffix}"] if layer in swap and suffix == scales else value

    assert "layer 'model.layers.2.mlp.gate_proj': its scales are not those of its numbers" in found_in(folder, change)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("by", [0x11111111, pytest.param(-0x11111111, marks=pytest.mark.slow)])
def test_zero_points_that_are_one_off_are_named_by_layer(folder: Quantized, by: int) -> None:
    _, _, zeros = suffixes(folder)
    said = found_in(folder, lambda name, value: value + by if name == f"{DOWN}.{zeros}" else value)
    rules = ("off their zero points", "not the middle of its range", "one above the middle of their range")
    assert DOWN in said and any(rule in said for rule in rules)


def statistics(
    recipe: Recipe,
    outputs: int,
    inputs: int,
    seed: int,
    spread: float = 0.0,
    shift: float = 0.0,
    deviations: float = 0.0,
) -> LayerStatistics:
    """Statistics of a Gaussian layer whose rows and columns may differ in size.

    Its mean may not be 0.

    Scales are of the largest of each group, or of so many standard deviations of it.
    """
    draw = np.random.default_rng(seed)
    weight = draw.normal(shift, 1.0, (outputs, inputs))
    weight *= np.exp(draw.normal(0, spread, (outputs, 1))) * np.exp(draw.normal(0, spread, (1, inputs)))
    count = inputs // recipe.group
    groups = weight.reshape(outputs, count, recipe.group)
    top, middle = (1 << recipe.bits) - 1, 1 << (recipe.bits - 1)
    if recipe.symmetric:
        largest = deviations * groups.std(2) if deviations else np.abs(groups).max(2)
        scales, zeros = largest / (middle if deviations else middle - 1), np.full((outputs, count), middle)
    else:
        low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
        scales = (high - low) / top
        zeros = np.round(-low / scales)
    numbers = np.clip(np.round(groups / scales[:, :, None]) + zeros[:, :, None], 0, top)
    found = LayerStatistics(recipe.bits, recipe.symmetric)
    found.add(torch.from_numpy(numbers - zeros[:, :, None]).float(), torch.from_numpy(scales).float())
    found.finish(None)
    return found


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128])
def test_gaussian_layers_are_let_pass(bits: int, group: int, symmetric: bool) -> None:
    recipe = Recipe("packed", bits=bits, group=group, symmetric=symmetric)
    for seed, (outputs, inputs, spread, shift) in enumerate(
        ((128, 512, 0.0, 0.0), (300, 1024, 0.3, 0.0), (64, 2048, 0.5, 0.05), (512, 256, 1.0, 0.0))
    ):
        found = statistics(recipe, outputs, inputs, seed, spread, shift).read()
        assert found is not None
        norms = {"model.layers.0.post_attention_layernorm.weight": torch.rand(inputs)}
        assert packing_faults({"model.layers.0.mlp.up_proj": found}, norms) == []
        if found.num_groups >= 500:
            assert found.correlations[0] < -0.4 and found.variation > 0.07


@pytest.mark.parametrize("deviations", [2.5, 3.0])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128])
def test_scales_that_come_from_the_scatter_of_their_groups_are_let_pass(
    bits: int, group: int, deviations: float
) -> None:
    """They cut off what is far out, and all groups of numbers scatter alike.

    Nothing can be said of whose they are.
    """
    recipe = Recipe("packed", bits=bits, group=group)
    found = statistics(recipe, 256, 1024, 0, deviations=deviations).read()
    assert found is not None and found.num_groups >= 500 and found.correlations[0] > -0.1
    assert packing_faults({"model.layers.0.self_attn.o_proj": found}, {}) == []


@pytest.mark.parametrize("factor", [-1.0, 1.0])
def test_scales_of_either_sign_are_let_pass(factor: float) -> None:
    """A group whose largest weight is negative may have a negative scale and negated numbers."""
    draw = np.random.default_rng(1)
    groups = draw.normal(0, 1, (256, 16, 32))
    scales = np.take_along_axis(groups, np.abs(groups).argmax(2)[:, :, None], 2)[:, :, 0] * factor / 8
    numbers = np.clip(np.round(groups / scales[:, :, None]) + 8, 0, 15)
    found = LayerStatistics(4, True)
    found.add(torch.from_numpy(numbers - 8).float(), torch.from_numpy(scales).float())
    found.finish(None)
    read = found.read()
    assert read is not None and read.num_groups == scales.size and read.correlations[0] < -0.4
    assert packing_faults({"model.layers.0.self_attn.o_proj": read}, {}) == []


def test_numbers_without_any_meaning_are_let_pass() -> None:
    """Files of random bits, as tests of formats have them: nothing can be said of them."""
    draw = torch.Generator().manual_seed(0)
    for bits in (4, 8):
        found = LayerStatistics(bits, False)
        groups = torch.randint(0, 1 << bits, (256, 16, 32), generator=draw)
        zeros = torch.randint(0, 1 << bits, (256, 16), generator=draw)
        found.add((groups - zeros[:, :, None]).float(), torch.rand(256, 16, generator=draw))
        found.finish(None)
        read = found.read()
        assert read is not None
        assert packing_faults({"model.layers.0.self_attn.o_proj": read}, {}) == []


def test_zeros_are_let_pass() -> None:
    found = LayerStatistics(4, True)
    found.add(torch.zeros(64, 16, 32), torch.ones(64, 16))
    found.finish(None)
    read = found.read()
    assert read is not None and read.num_groups == 0
    assert packing_faults({"model.layers.0.self_attn.o_proj": read}, {}) == []
