"""Large steps of plain weights add products to the residual stream as they are made."""

from __future__ import annotations

import pathlib

import pytest
import torch
from tests.models.checkpoints import VOCAB_SIZE, load, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row

from headrace_backend.models.causal_lm import CausalLM
from headrace_kernels.linear import dense

# fp32 sums in another order over three layers; logits are of order 10.
TOLERANCE = 2e-4
PROMPT = [(7 * index + 3) % VOCAB_SIZE for index in range(24)]


def added_shapes(monkeypatch: pytest.MonkeyPatch, least: int) -> list[torch.Size]:
    """Has products of `least` rows and more added, as on a GPU; takes their outputs' shapes."""
    found: list[torch.Size] = []
    original = dense.linear_add

    def linear_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
        found.append(residual.shape)
        original(x, weight, residual)

    monkeypatch.setattr(dense, "adds", lambda num_rows, weight: num_rows >= least)
    monkeypatch.setattr(dense, "linear_add", linear_add)
    return found


def logits_of(model: CausalLM, chunks: list[int]) -> torch.Tensor:
    """Logits of all tokens of a prompt in chunks of so many."""
    driver, row = PagedDriver(model), Row(list(PROMPT))
    return torch.cat([logits for count in chunks for logits in driver.step([row], [count])])


@pytest.mark.parametrize(
    ("name", "adds"),
    [
        ("llama", True),
        ("qwen2", True),
        ("qwen3.5", True),
        # Output projections have biases; outputs are normed; experts have parts of an output.
        ("llama-biases", False),
        ("gemma3", False),
        ("qwen3-moe", False),
    ],
)
def test_logits_are_those_of_sums_behind_products(
    name: str, adds: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, name)
    model = load(tmp_path)
    chunks = [16, 8]
    expected = logits_of(model, chunks)
    shapes = added_shapes(monkeypatch, least=16)
    found = logits_of(model, chunks)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    # Both outputs of each layer, of the first chunk.
    assert shapes == [(16, model.hidden_size)] * (2 * model.num_layers if adds else 0)


def test_a_cpu_adds_behind_the_product() -> None:
    weight = torch.zeros(4, 4, dtype=torch.bfloat16)
    assert not dense.adds(1 << 20, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1024, 3000, 8192])
def test_a_product_is_added_within_its_rounding(dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, 512, device="cuda", dtype=dtype)
    weight = torch.randn(256, 512, device="cuda", dtype=dtype) / 16
    residual = torch.randn(num_rows, 256, device="cuda", dtype=dtype)
    assert dense.adds(num_rows, weight) and not dense.adds(64, weight) and not dense.adds(num_rows, weight.float())
    product = x.double() @ weight.double().t()
    exact = residual.double() + product
    dense.linear_add(x, weight, residual)
    # Half a step of the type between its numbers, for the sum and, where the library splits the few
    # inputs of these weights, for the product; and what fp32 sums add to that.
    bound = torch.finfo(dtype).eps * (0.51 * (exact.abs() + product.abs()) + 0.01)
    assert ((residual.double() - exact).abs() <= bound).all()
