"""Gate and up products with the activation in them, by our kernel for sm_90.

It is emulated without a GPU, run on one, and asked which weights it is for.
"""

from __future__ import annotations

import pytest
import torch
from tests.kernels.linear.test_dense_small_batch import Product
from tests.support.gluon_emulation import emulating, launch_control
from tests.support.kernel_case import ROUNDING

from headrace_kernels import card
from headrace_kernels.linear.gated import dense_sm90
from headrace_kernels.linear.gated.dense_sm90 import GatedTile, multiply_gated, takes_gated
from headrace_kernels.swiglu import Activation

# Rows, outputs, inputs, tile: one, two and three pieces, rows and outputs that fill no tile, more
# slots than steps.
CASES = (
    (9, 80, 192, GatedTile(64, (32, 16, 0), 4, 3)),
    (70, 112, 256, GatedTile(64, (64, 32, 16), 4, 2)),
    (5, 40, 320, GatedTile(64, (16, 0, 0), 4, 4)),
    (130, 120, 128, GatedTile(128, (64, 32, 16), 8, 5)),
)


class Case(Product):
    """A product whose sums pass through either activation."""

    def gated_expected(self, bias: bool, activation: Activation) -> torch.Tensor:
        """The result in fp64."""
        gate, up = self._products(False, bias).chunk(2, dim=-1)
        slope = gate if activation == "silu" else 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return gate / (1 + torch.exp(-slope)) * up


def run(case: Case, tile: GatedTile, bias: bool, activation: Activation) -> torch.Tensor:
    out = torch.full_like(case.residual, float("nan"))
    multiply_gated(case.x, case.weight, case.bias if bias else None, out, tile, activation)
    return out


def emulated(
    case: Case,
    tile: GatedTile,
    bias: bool = False,
    activation: Activation = "silu",
    eager: bool = False,
    careless: str | None = None,
) -> torch.Tensor:
    with emulating(dense_sm90, "_gated_kernel", launch_control, eager, careless):
        return run(case, tile, bias, activation)


def check(case: Case, found: torch.Tensor, bias: bool = False, activation: Activation = "silu") -> None:
    """Sums of fp32 are rounded once, behind the activation."""
    expected = case.gated_expected(bias, activation)
    row_size = expected.square().mean(1, keepdim=True).sqrt()
    allowed = 1.01 * ROUNDING[found.dtype] * (expected.abs() + row_size)
    error = (found.double() - expected).abs()
    assert bool((error <= allowed).all()), f"{float((error / allowed).nan_to_num(torch.inf).max())} times"


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "tile"), CASES)
def test_what_the_kernel_says_agrees_with_fp64(
    rows: int, outputs: int, inputs: int, tile: GatedTile, eager: bool
) -> None:
    case = Case(rows, outputs, inputs, torch.float16, "cpu", True)
    check(case, emulated(case, tile, eager=eager))
    check(case, emulated(case, tile, True, "gelu_tanh", eager), True, "gelu_tanh")


@pytest.mark.parametrize("careless", ["copies", "products"])
def test_a_wait_that_is_missing_shows(careless: str) -> None:
    """The check of the checks."""
    case = Case(9, 48, 512, torch.float16, "cpu", True)
    with pytest.raises(AssertionError, match="times"):
        check(case, emulated(case, GatedTile(64, (32, 16, 0), 4, 3), eager=careless == "products", careless=careless))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    case = Case(12, 40, 256, torch.float16, "cpu", True)
    tile = GatedTile(64, (32, 16, 0), 4, 3)
    together = emulated(case, tile)
    case.x[:3], case.x[6:] = float("nan"), float("inf")
    apart = emulated(case, tile)
    assert torch.equal(together[3:6], apart[3:6]) and not bool(apart[:3].isfinite().any())


def test_the_kernel_takes_16_bits_and_whole_steps_on_its_own_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.empty(24, 1024, dtype=torch.bfloat16)
    assert not takes_gated(weight)  # CPU
    monkeypatch.setattr(card, "has_warpgroup_instructions", lambda device: True)
    assert takes_gated(weight)
    assert not takes_gated(weight.float())
    assert not takes_gated(torch.empty(24, 1024 + 32, dtype=torch.bfloat16))
    assert not takes_gated(torch.empty(1024, 24, dtype=torch.bfloat16).t())
    assert not takes_gated(torch.empty(25 * 1024, dtype=torch.bfloat16)[1:].view(-1)[: 24 * 1024].view(24, 1024))
