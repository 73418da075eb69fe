"""Text through one layer at a time comes out as it does through the whole model."""

from __future__ import annotations

import math
import pathlib

import pytest
import torch
from tests.models.checkpoints import CONFIGS
from tests.quantize.quantize_parts import LENGTH, Bench

from headrace_quantize.evaluation import Quality, compare
from headrace_quantize.stages import num_inputs, stages_of

# `headrace quantize` refuses Gemma with vision, which has other parts, gpt-oss, whose experts lie
# in one tensor, and layers with states.
FAMILIES = [name for name in CONFIGS if name != "gemma3-part" and not name.startswith(("gpt-oss", "qwen3.5", "gemma4"))]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_layer_by_layer_gives_what_transformers_gives(tmp_path: pathlib.Path, family: str) -> None:
    bench = Bench(tmp_path, family, method="rtn", group_size="channel")
    hidden = bench.passes.embed(bench.pieces, bench.source)
    for index in range(len(bench.job.model.config.description.layers)):
        bench.passes.run(bench.passes.load(index).module, hidden)
    theirs = bench.theirs(torch.tensor(bench.pieces), output_hidden_states=True)
    ours = bench.passes.norm(bench.job.model.config.description.norm, bench.source)(hidden)
    # fp32 through three layers of random weights with standard deviation 0.2.
    assert torch.allclose(ours, theirs.hidden_states[-1], atol=2e-3, rtol=1e-3)


@torch.no_grad()
def test_a_model_beside_itself_differs_by_nothing(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, "qwen2", method="rtn", group_size="channel")
    hidden = bench.passes.embed(bench.pieces, bench.source)
    for index in range(len(bench.job.model.config.description.layers)):
        bench.passes.run(bench.passes.load(index).module, hidden)
    norm = bench.job.model.config.description.norm
    quality = compare(bench.pieces, hidden, hidden, bench.source, bench.passes, False, norm)
    ids = torch.tensor(bench.pieces)
    logits = bench.theirs(ids).logits[:, :-1].flatten(0, 1)
    surprise = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    assert quality.tokens == ids.numel() - len(ids)
    assert quality.perplexity_before == quality.perplexity_after == pytest.approx(float(surprise.exp()), rel=1e-3)
    assert quality.divergence == 0.0 and quality.same_choice == 1.0
    assert quality.surprise_change == quality.surprise_change_interval == quality.divergence_interval == 0.0


@torch.no_grad()
def test_intervals_are_over_pieces(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, "qwen2", method="rtn", group_size="channel")
    hidden = bench.passes.embed(bench.pieces, bench.source)
    other = hidden + 0.3 * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    norm = bench.job.model.config.description.norm

    def of(count: int) -> Quality:
        return compare(bench.pieces[:count], hidden[:count], other[:count], bench.source, bench.passes, False, norm)

    alone = [
        compare(
            [ids], *((side[index : index + 1]) for side in (hidden, other)), bench.source, bench.passes, False, norm
        )
        for index, ids in enumerate(bench.pieces)
    ]
    assert alone[0].surprise_change_interval is None and alone[0].divergence_interval is None
    whole, changes = of(len(bench.pieces)), torch.tensor([one.surprise_change for one in alone])
    assert whole.surprise_change == pytest.approx(float(changes.mean()), rel=1e-4)
    assert whole.surprise_change == pytest.approx(math.log(whole.perplexity_after / whole.perplexity_before), rel=1e-6)
    assert whole.surprise_change_interval == pytest.approx(1.96 * float(changes.std()) / len(changes) ** 0.5, rel=1e-3)
    divergences = torch.tensor([one.divergence for one in alone])
    assert whole.divergence_interval == pytest.approx(1.96 * float(divergences.std()) / len(alone) ** 0.5, rel=1e-3)


@torch.no_grad()
def test_the_inputs_that_are_taken_are_those_of_each_product(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, "llama-biases", method="rtn", group_size="channel")
    layer, hidden = bench.passes.load(0), bench.passes.embed(bench.pieces, bench.source)
    before = hidden.clone()
    sizes = bench.job.model.config
    stages = stages_of(sizes.description.layers[0])
    taken: dict[str, list[torch.Tensor]] = {stage.product: [] for stage in stages}
    bench.passes.inputs(layer.module, hidden, {product: rows.append for product, rows in taken.items()})
    assert torch.equal(hidden, before)
    for stage in stages:
        assert torch.cat(taken[stage.product]).shape == (
            len(bench.pieces) * LENGTH,
            num_inputs(stage, sizes.description.layers[0]),
        )
    normed = torch.nn.functional.rms_norm(hidden.flatten(0, 1), hidden.shape[-1:], eps=sizes.description.norm.eps)
    expected = normed * bench.source.read("model.layers.0.input_layernorm.weight")
    assert torch.allclose(torch.cat(taken["self_attn.qkv_proj"]), expected, atol=1e-4)


@torch.no_grad()
def test_what_is_behind_an_attention_that_was_kept_is_the_same_to_the_bit(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, "llama-biases", method="gptq", group_size="channel")
    layer, hidden = bench.passes.load(0).module, bench.passes.embed(bench.pieces, bench.source)
    stages = stages_of(bench.job.model.config.description.layers[0])
    kept, taken = bench.passes.heads(layer, hidden), []
    for heads in (None, kept):
        rows: dict[str, list[torch.Tensor]] = {stage.product: [] for stage in stages[1:]}
        bench.passes.inputs(layer, hidden, {product: each.append for product, each in rows.items()}, heads)
        after = hidden.clone()
        bench.passes.run(layer, after, heads)
        taken.append([after, *(torch.cat(each) for each in rows.values())])
    assert all(torch.equal(one, other) for one, other in zip(*taken, strict=True))
    assert torch.equal(taken[1][1], kept.flatten(0, 1))
