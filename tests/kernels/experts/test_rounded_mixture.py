"""Experts whose FP8 weights multiply rows of e4m3, in the interpreter.

On a GPU `test_mixture` has them at the sizes of models.
"""

from __future__ import annotations

import pytest
import torch
from tests.kernels.experts.test_mixture import OUTPUTS_FIRST, PAIR, Case
from tests.support.kernel_case import kernels_on, poisoned_memory

from headrace_kernels.experts import mixture_kernels
from headrace_kernels.experts.mixture import mixture, mixture_reference, rounds, rounds_to
from headrace_kernels.experts.mixture_kernels import combine_pairs, multiply_pairs, round_rows
from headrace_kernels.experts.routing import sort_pairs_reference
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rounded_tokens import round_tokens_reference
from headrace_kernels.weight_formats.quantized_weight import Arrangement, QuantKind

E4M3 = torch.float8_e4m3fn


# Whole rows, and blocks; inner elements are rounded on the way to the second product as well.
@pytest.mark.parametrize(("group", "arrangement"), [(0, Arrangement()), (128, Arrangement(scale_outputs=8))])
def test_fp8_multiplies_rows_of_e4m3_as_the_reference_says(
    group: int, arrangement: Arrangement, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter's cast to e4m3 halves what rounds up to a power of two.
    monkeypatch.setattr(mixture_kernels, "round_tokens", round_tokens_reference)
    # Rows that end within what is loaded at a time, too.
    last = (6, 4, 2, 128, 256) if group else (6, 4, 2, 80, 48)
    cases = ((5, 3, 1, 128, 128), PAIR, False), ((7, 5, 2, 256, 128), OUTPUTS_FIRST, True), (last, PAIR, True)
    for sizes, pair, has_biases in cases:
        case = Case(sizes, QuantKind.FP8, torch.float32, "cpu", has_biases=has_biases)
        if group:
            case.arrange(group, arrangement)
        case.x[3] = 0
        pairs = sort_pairs_reference(case.choice.experts, case.num_experts, None)
        out = torch.full_like(case.x, float("nan"))
        with kernels_on("cpu"), poisoned_memory("cpu"):
            rows = round_rows(case.x, case.gate_up)
            given = (rows, case.choice, pairs, case.gate_up, case.down, (pair, pair))
            combine_pairs(multiply_pairs(*given, rounds_inner=True), case.choice, case.down, out)
        expected = mixture_reference(case.x, case.choice, case.gate_up, case.down, rounded=(True, True))
        # The two sum in another order, and an inner element between two numbers may become either.
        assert float((out - expected).norm() / expected.norm()) < 2e-3
        plain = mixture_reference(case.x, case.choice, case.gate_up, case.down)
        assert 1e-2 < float((out - plain).norm() / plain.norm()) < 6e-2


@pytest.mark.parametrize(("kind", "group", "arrangement", "dtype", "taken"), [
    (QuantKind.FP8, 0, Arrangement(), torch.bfloat16, True),
    (QuantKind.FP8, 128, Arrangement(scale_outputs=8), torch.float16, True),
    (QuantKind.FP8, 0, Arrangement(keeps_activations=True), torch.bfloat16, False),
    (QuantKind.FP8, 0, Arrangement(), torch.float32, False),
    (QuantKind.INT8, 0, Arrangement(), torch.bfloat16, False),
])  # fmt: skip
def test_fp8_takes_rounded_rows_of_more_than_one_token(
    kind: QuantKind, group: int, arrangement: Arrangement, dtype: torch.dtype, taken: bool
) -> None:
    case = Case((1, 3, 1, 128, 128), kind, dtype, "cpu")
    case.arrange(group, arrangement)
    with kernels_on("cpu"):
        assert [rounds(count, case.gate_up, case.down) for count in (1, 2)] == [(False, False), (taken, taken)]
        # What makes the tokens rounds them with as many scales as a block's inputs ask for.
        rounding = InputRounding(E4M3, group) if taken else None
        assert [rounds_to(count, case.gate_up, case.down) for count in (1, 2)] == [None, rounding]
    assert rounds(5, case.gate_up, case.down) == (False, False)
    assert rounds_to(5, case.gate_up, case.down) is None


@pytest.mark.parametrize("group", [0, 128], ids=["outputs", "blocks"])
def test_tokens_may_be_rounded_by_what_makes_them(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture_kernels, "round_tokens", round_tokens_reference)
    case = Case((5, 3, 2, 256, 128), QuantKind.FP8, torch.bfloat16, "cpu")
    if group:
        case.arrange(group, Arrangement(scale_outputs=8))
    tokens, others = (round_tokens_reference(case.x, InputRounding(E4M3, size)) for size in (group, 128 - group))
    with kernels_on("cpu"), poisoned_memory("cpu"):
        found, behind = (mixture(x, case.choice, case.gate_up, case.down) for x in (tokens, case.x))
        with pytest.raises(AssertionError, match="other numbers or groups"):
            mixture(others, case.choice, case.gate_up, case.down)
    assert found.dtype is torch.bfloat16 and torch.equal(found, behind)
