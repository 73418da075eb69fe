"""A step of few tokens on a GPU fuses norms, activation and additions into products.

Logits and cache are the same, one row after another.
"""

import pathlib

import pytest
import torch
from tests.models.checkpoints import VOCAB_SIZE, load, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row

from headrace_backend.layers.decoder_layer import DecoderLayer
from headrace_backend.models.causal_lm import CausalLM
from headrace_kernels.linear import dense_small_batch
from headrace_kernels.linear.dense_small_batch_kernels import Tile
from headrace_kernels.triton_runtime import INTERPRETED, forced

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")

# fp32 sums in another order over three layers; logits are of order 10.
TOLERANCE = 2e-4
NUM_LAYERS = 3
PROMPT = torch.arange(1, 8).tolist()


NAMES = ["llama", "llama-biases", "qwen2", "qwen3-tied-bias", "phi3-partial", "qwen3.5-order-tied"]


# Of the mixture, a shared expert's inner elements are those of the stream before experts are added.
@pytest.fixture(scope="module", params=[*NAMES, pytest.param("glm4-moe", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """Tiny, with its weights in the order in memory that they have on a GPU."""
    path: pathlib.Path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(path, request.param)
    ours = load(path)
    for parameter in ours.parameters():
        parameter.data = parameter.data.contiguous()
    return ours


@pytest.fixture(autouse=True)
def wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for a program, whatever it computes."""
    monkeypatch.setattr(
        dense_small_batch, "launch_rule", lambda *_, **__: Tile("vector", block_n=64, block_k=128, num_warps=4)
    )


class FusedCalls:
    """Counts the layers that ran fused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = DecoderLayer.forward_fused

        def counted(*args: object) -> None:
            self.count += 1
            original(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(DecoderLayer, "forward_fused", counted)


@pytest.mark.one_in(2)
def test_fused_layers_equal_the_others(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = FusedCalls(monkeypatch)
    separate, fused = PagedDriver(model), PagedDriver(model)
    rows = Row(list(PROMPT)), Row(list(PROMPT))
    for driver, row in zip((separate, fused), rows, strict=True):
        driver.step([row], [len(PROMPT)])
    for step in range(2):
        for row in rows:
            row.tokens.append((11 * step + 5) % VOCAB_SIZE)
        (expected,) = separate.step([rows[0]], [1])
        assert calls.count == step * NUM_LAYERS
        with forced():
            (found,) = fused.step([rows[1]], [1])
        assert calls.count == (step + 1) * NUM_LAYERS
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    for ours, theirs in zip(fused.kv_caches, separate.kv_caches, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0, equal_nan=True)


def test_layers_with_other_norms_are_computed_one_operation_after_another(tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path, "olmo2")
    ours = load(tmp_path)
    for parameter in ours.parameters():
        parameter.data = parameter.data.contiguous()
    separate, forced_on = PagedDriver(ours), PagedDriver(ours)
    expected = separate.step([Row(list(PROMPT))], [len(PROMPT)])
    with forced():
        assert not ours.model.fuses(1)
        found = forced_on.step([Row(list(PROMPT))], [len(PROMPT)])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_only_steps_of_one_token_on_one_rank_fuse(model: CausalLM) -> None:
    layer = model.model.layers[0]
    assert isinstance(layer, DecoderLayer)
    assert not layer.fuses(1)
    with forced():
        assert layer.fuses(1)
        assert not layer.fuses(2)
        layer._is_whole = False
        assert not layer.fuses(1)
    layer._is_whole = True
