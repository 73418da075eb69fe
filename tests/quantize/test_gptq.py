"""GPTQ against rounding to nearest, and inputs that say nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_quantize.checks import QuantizeRefused
from headrace_quantize.rounding import gptq
from headrace_quantize.rounding.numbers import NumberFormat, round_to_nearest
from headrace_quantize.rounding.statistics import InputStatistics, output_error

INT4 = NumberFormat(4, True, False, torch.float32)
WITH_ZEROS = NumberFormat(4, False, False, torch.float32)


def correlated(tokens: int, inputs: int, seed: int) -> torch.Tensor:
    """Inputs of different sizes that go together, as a model's do."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    return mixed * torch.rand(inputs, generator=generator).exp()


def gram_of(x: torch.Tensor) -> torch.Tensor:
    seen = InputStatistics(x.shape[1], x.device)
    seen.add(x)
    return seen.gram


@settings(max_examples=25)
@given(
    st.sampled_from([INT4, WITH_ZEROS]), st.sampled_from([32, None]), st.booleans(), st.integers(16, 400),
    st.integers(0, 1 << 30)
)  # fmt: skip
def test_outputs_are_nearer_than_by_rounding_to_nearest(
    form: NumberFormat, group: int | None, act_order: bool, tokens: int, seed: int
) -> None:
    x, weight = correlated(tokens, 160, seed), torch.randn(12, 160, generator=torch.Generator().manual_seed(seed))
    gram = gram_of(x)
    found = gptq.quantize(weight, gram, form, group, 0.01, act_order, "layer").dequantized()
    nearest = round_to_nearest(weight, form, group).dequantized()
    # Of all outputs together; a single one may come out worse by chance.
    assert output_error(weight - found, gram).sum() <= output_error(weight - nearest, gram).sum()
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("act_order", [False, True])
def test_inputs_that_do_not_go_together_are_rounded_to_nearest(act_order: bool) -> None:
    weight, gram = torch.randn(5, 96), torch.diag(torch.rand(96) + 0.1)
    found = gptq.quantize(weight, gram, WITH_ZEROS, 32, 0.01, act_order, "layer")
    nearest = round_to_nearest(weight, WITH_ZEROS, 32)
    assert torch.equal(found.numbers, nearest.numbers)
    assert torch.equal(found.scales, nearest.scales)


@pytest.mark.parametrize("act_order", [False, True])
def test_inputs_that_were_never_seen_are_rounded_to_nearest(act_order: bool) -> None:
    x = correlated(200, 64, 3)
    x[:, 32:] = 0
    weight = torch.randn(6, 64)
    found = gptq.quantize(weight, gram_of(x), INT4, 32, 0.01, act_order, "layer")
    assert torch.equal(found.numbers[:, 32:], round_to_nearest(weight, INT4, 32).numbers[:, 32:])


def test_no_inputs_at_all_are_rounded_to_nearest() -> None:
    weight = torch.randn(6, 64)
    found = gptq.quantize(weight, torch.zeros(64, 64), INT4, 32, 0.01, False, "layer")
    assert torch.equal(found.numbers, round_to_nearest(weight, INT4, 32).numbers)


def test_inputs_that_repeat_each_other_get_more_damping() -> None:
    """With one token repeated fp32 finds the Gram matrix indefinite unless much is added."""
    x = torch.randn(1, 64).expand(1000, 64) * 1e3
    upper = gptq.inverse_factor(gram_of(x), 1e-9, "layer")
    assert torch.isfinite(upper).all()
    found = gptq.quantize(torch.randn(6, 64), gram_of(x), INT4, 32, 1e-9, False, "layer")
    assert torch.isfinite(found.dequantized()).all()


def test_a_hessian_that_is_none_is_refused_by_name() -> None:
    gram = -torch.ones(4, 4) + 3 * torch.eye(4)
    gram[0, 1] = gram[1, 0] = 1e9
    with pytest.raises(QuantizeRefused, match=r"--damping: the Hessian of model\.layers\.3\.mlp\.down_proj"):
        gptq.inverse_factor(gram, 0.01, "model.layers.3.mlp.down_proj")


def test_the_factor_is_that_of_the_inverse() -> None:
    gram = gram_of(correlated(300, 40, 7))
    upper = gptq.inverse_factor(gram, 0.01, "layer").double()
    damped = (gram + 0.01 * gram.diagonal().mean() * torch.eye(40)).double()
    # fp32, condition about 1e5.
    assert torch.allclose(upper.t() @ upper @ damped, torch.eye(40, dtype=torch.float64), atol=0.05)


def test_what_one_group_gets_wrong_the_next_makes_up_for() -> None:
    """Two inputs that are always equal.

    The second takes over what the first lost, across the border of groups.
    """
    x = torch.randn(500, 1).expand(500, 64)
    weight = torch.full((1, 64), 0.3)
    weight[0, ::2] = 1.0
    gram = gram_of(x + 0.01 * torch.randn(500, 64))
    found = gptq.quantize(weight, gram, INT4, 32, 1e-4, False, "layer").dequantized()
    nearest = round_to_nearest(weight, INT4, 32).dequantized()
    assert abs(float((found - weight).sum())) < 0.2 * abs(float((nearest - weight).sum()))
