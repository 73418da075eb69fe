"""AWQ's search, and scales that cancel."""

from __future__ import annotations

import pathlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.quantize.quantize_parts import Bench
from tests.quantize.test_gptq import INT4, WITH_ZEROS, correlated

from headrace_quantize.folding import Folding
from headrace_quantize.rounding import awq
from headrace_quantize.rounding.numbers import NumberFormat, round_to_nearest
from headrace_quantize.rounding.statistics import InputStatistics, output_error
from headrace_quantize.stages import num_inputs, of_source, stages_of, tie

FAMILIES = ["llama", "llama-biases", "llama-mha", "llama-group-8", "mistral-window", "qwen2", "qwen3"]


def seen(x: torch.Tensor) -> InputStatistics:
    found = InputStatistics(x.shape[1], x.device)
    found.add(x)
    return found


@settings(max_examples=15)
@given(st.sampled_from([INT4, WITH_ZEROS]), st.sampled_from([32, None]), st.integers(0, 1 << 30))
def test_outputs_are_as_near_as_by_rounding_to_nearest_or_nearer(
    form: NumberFormat, group: int | None, seed: int
) -> None:
    x, weight = correlated(200, 64, seed), torch.randn(10, 64, generator=torch.Generator().manual_seed(seed))
    x[:, 5] *= 30
    known = seen(x)
    scales = awq.search_scales([weight], known.mean_sizes(), known.gram, form, group, lambda values: values)
    found = round_to_nearest(weight * scales, form, group).dequantized() / scales
    nearest = round_to_nearest(weight, form, group).dequantized()
    assert output_error(weight - found, known.gram).sum() <= output_error(weight - nearest, known.gram).sum() * 1.0001


def test_an_input_that_matters_gets_finer_numbers() -> None:
    x, weight = torch.randn(400, 64), torch.randn(10, 64)
    x[:, 5] *= 100
    known = seen(x)
    scales = awq.search_scales([weight], known.mean_sizes(), known.gram, INT4, 32, lambda values: values)
    assert scales[5] == scales.max() > 2 * scales.median()


@settings(max_examples=15)
@given(st.sampled_from([32, None]), st.integers(0, 1 << 30))
def test_ranges_that_are_searched_are_no_worse_where_groups_do_not_go_together(group: int | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, gram = torch.randn(8, 96, generator=generator), torch.diag(torch.rand(96, generator=generator))
    weight[0, 0] = 9.0
    found = awq.round_within_ranges(weight, gram, INT4, group).dequantized()
    nearest = round_to_nearest(weight, INT4, group).dequantized()
    assert (output_error(weight - found, gram) <= output_error(weight - nearest, gram) * 1.0001).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_cancel(tmp_path: pathlib.Path, family: str) -> None:
    """A layer with random scales folded into it, and nothing rounded, gives what it gave."""
    bench = Bench(tmp_path, family, method="awq", group_size="channel")
    layer, hidden = bench.passes.load(0), bench.passes.embed(bench.pieces, bench.source)
    expected = hidden.clone()
    bench.passes.run(layer.module, expected)
    folding, sizes = Folding(), bench.job.model.config
    for stage in stages_of(sizes.description.layers[0]):
        scales = tie(stage, sizes)(torch.rand(num_inputs(stage, sizes.description.layers[0])) + 0.5)
        folding.add("model.layers.0.", stage, scales, sizes)
    before = {name: target.tensor.clone() for name, target in layer.targets.items()}
    for name, target in layer.targets.items():
        target.tensor.copy_(folding.applied(name, target.tensor))
    bench.passes.run(layer.module, hidden)
    # fp32 over sums of at most 128 products.
    assert torch.allclose(hidden, expected, atol=1e-4, rtol=1e-4)
    for name in bench.job.quantized:
        if name.startswith("model.layers.0."):
            dequantized = folding.undone(name, layer.targets[f"{name}.weight"].tensor)
            assert torch.allclose(dequantized, before[f"{name}.weight"], atol=1e-6, rtol=1e-5)


def test_heads_that_share_a_value_head_share_scales(tmp_path: pathlib.Path) -> None:
    sizes = Bench(tmp_path, "llama", method="rtn", group_size="channel").job.model.config
    output = stages_of(sizes.description.layers[0])[1]
    attention = sizes.description.attention
    scales = tie(output, sizes)(torch.rand(attention.num_heads * attention.head_dim))
    heads = scales.view(attention.num_heads, attention.head_dim)
    group = attention.num_heads // attention.num_kv_heads
    for head in range(attention.num_heads):
        assert torch.equal(heads[head], heads[head // group * group])
    assert len(of_source(output, sizes, scales)) == attention.num_kv_heads * attention.head_dim
