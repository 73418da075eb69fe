"""Layers with weights of few bits.

A step gives what the dequantized weights would give, fused or not, whatever else is in the batch.
"""

from __future__ import annotations

import pathlib

import pytest
import torch
from tests.models.checkpoints import VOCAB_SIZE, ignore_progress, load, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.models.test_fused_layers import FusedCalls
from tests.support.model_builds import load_model

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization.linear_weight import PlainWeight
from headrace_backend.weights.scheme import Scheme
from headrace_kernels.triton_runtime import INTERPRETED, forced
from headrace_kernels.weight_formats.quantized_weight import dequantize
from headrace_model_folder import ModelFolder

# fp32 sums in another order over three layers; logits are of order 10.
TOLERANCE = 2e-4
NUM_LAYERS = 3
PROMPT = torch.arange(1, 8).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("wide")
    write_checkpoint(made, "llama-wide")
    return made


@pytest.fixture(params=[("int8", 128), ("fp8", 128), ("int4", 32)], ids=lambda setting: setting[0])
def model(request: pytest.FixtureRequest, path: pathlib.Path) -> CausalLM:
    folder, scheme = ModelFolder.open(path), Scheme.named(*request.param)
    cpu = torch.device("cpu")
    return load_model(folder, folder.config, torch.float32, cpu, "folder", 0, ignore_progress, scheme=scheme)


def restored(model: CausalLM, path: pathlib.Path) -> CausalLM:
    """A plain model with the numbers that a quantized one multiplies by."""
    plain = load(path)
    for name, weight in model.low_bit_weights.items():
        target = plain.get_submodule(name)
        assert isinstance(target, PlainWeight)
        target.tensor.copy_(dequantize(weight.quantized))
    return plain


def test_logits_are_those_of_the_dequantized_weights(model: CausalLM, path: pathlib.Path) -> None:
    rows = [[Row(list(PROMPT)), Row([9]), Row([3, 1, 4, 1, 5] * 8)] for _ in range(2)]
    found, expected = (
        PagedDriver(one).step(part, [7, 1, 40]) for one, part in zip((model, restored(model, path)), rows, strict=True)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    # And not those of the weights as they were.
    plain = PagedDriver(load(path)).step([Row(list(PROMPT))], [7])[0]
    assert (found[0] - plain).abs().max() > 10 * TOLERANCE


def test_a_cached_prefix_gives_what_the_whole_prompt_gives(model: CausalLM) -> None:
    tokens = [5 * i % VOCAB_SIZE for i in range(48)]
    whole = PagedDriver(model).step([Row(list(tokens))], [48])[0][-1]
    driver, row = PagedDriver(model), Row(list(tokens))
    for count in (32, 9, 7):
        (last,) = driver.step([row], [count])
    torch.testing.assert_close(last[-1], whole, atol=TOLERANCE, rtol=0)


@pytest.mark.one_in(3)
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_fused_layers_equal_the_others(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = FusedCalls(monkeypatch)
    separate, fused = PagedDriver(model), PagedDriver(model)
    rows = Row(list(PROMPT)), Row(list(PROMPT))
    for driver, row in zip((separate, fused), rows, strict=True):
        driver.step([row], [len(PROMPT)])
        row.tokens.append(5)
    (expected,) = separate.step([rows[0]], [1])
    assert calls.count == 0
    with forced():
        (found,) = fused.step([rows[1]], [1])
    assert calls.count == NUM_LAYERS
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
