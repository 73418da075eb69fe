"""Every family by the same measure: shared by two ranks, rounded to any bits, begun by a prefix.

Against transformers in fp32 they are held in `test_against_transformers`, GGUF files in
`test_gguf_families`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import pytest
import torch
from tests.models.checkpoints import CONFIGS, VOCAB_SIZE, ignore_progress, make_model, randomize_vectors
from tests.models.paged_driver import PagedDriver, Row
from tests.models.test_nf4_loading import numbers as nf4_numbers
from tests.support.engine_on_runner import EngineOnRunner, greedy, layout_of
from tests.support.model_builds import load_model
from tests.support.rank_threads import on_ranks

from headrace_backend.config import EngineConfig
from headrace_backend.engine.scheduling import checkpoint_places
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization.summaries import QuantizationSummary
from headrace_backend.quantize_rules import unsuitable_quantization
from headrace_backend.tp_rules import unsuitable_tp
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.weights.scheme import Scheme
from headrace_kernels.weight_formats.quantized_weight import dequantize
from headrace_model_folder import ModelFolder

CPU = torch.device("cpu")
PROMPT = [17 * index % VOCAB_SIZE for index in range(40)]
# fp32 with sums in another order; logits are of order 10, and states add up what was rounded.
TOLERANCE = {"atol": 1e-3, "rtol": 1e-3}
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "phi3-blocks", "smollm3", "olmo2", "olmo3", "glm4", "gemma3", "gemma4",
    "qwen3.5-wide", "qwen3-moe-wide", "mixtral-wide", "glm4-moe-wide", "gemma4-moe-wide", "gpt-oss-wide",
    "qwen3.5-moe-wide", "seed-oss", "exaone4", "ministral3-part", "qwen3-vl-part",
)  # fmt: skip
# Whose layers differ most from each other; the others in the slow part.
EVERYDAY = ("olmo2", "gemma3", "qwen3.5-moe-wide", "gpt-oss-wide")
# One with windows and one with states.
EVERY_DAY_PREFIXES = ("gemma3", "qwen3.5-moe-wide")
BITS = {name: Scheme.named(name, 32) for name in ("int8", "fp8", "int4", "nf4")}


def each_family(everyday: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrizes `path`; families that are not of every day are in the slow part."""
    marked = [pytest.param(name, marks=() if name in everyday else pytest.mark.slow) for name in FAMILIES]
    return pytest.mark.parametrize("path", marked, indirect=True)


families = each_family(EVERYDAY)


@pytest.fixture(scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A random model of the family, of inner sizes that blocks of 64 divide."""
    made: pathlib.Path = tmp_path_factory.mktemp(request.param)
    config = CONFIGS[request.param]()
    text = config.get_text_config()
    if getattr(text, "intermediate_size", 128) % 64:
        text.intermediate_size = 128
    torch.manual_seed(0)
    model = make_model(config)
    randomize_vectors(model)
    model.save_pretrained(made)
    return made


def loaded(path: pathlib.Path, scheme: Scheme | None = None, shard: Shard = ALONE) -> CausalLM:
    folder = ModelFolder.open(path)
    return load_model(
        folder, folder.config, torch.float32, CPU, "folder", 0, ignore_progress, scheme=scheme, shard=shard
    )


def logits(model: CausalLM) -> torch.Tensor:
    return torch.cat(PagedDriver(model).step([Row(PROMPT)], [len(PROMPT)]))


@families
def test_two_ranks_compute_what_one_does(path: pathlib.Path) -> None:
    config = EngineConfig(model=path, device="cpu", tp=2)
    assert unsuitable_tp(config, ModelFolder.open(path).config) is None
    for found in on_ranks(2, lambda shard: logits(loaded(path, shard=shard))):
        torch.testing.assert_close(found, logits(loaded(path)), **TOLERANCE)


@families
@pytest.mark.parametrize("bits", BITS)
def test_rounded_weights_compute_what_their_numbers_do(path: pathlib.Path, bits: str) -> None:
    config = EngineConfig(model=path, device="cpu", quantize=bits, quantize_group=32 if bits == "int4" else 128)
    refusal = unsuitable_quantization(config, ModelFolder.open(path).config)
    if bits == "nf4" and "gpt-oss" in path.name:
        assert refusal is not None and "experts with biases can't be multiplied" in refusal
        return
    assert refusal is None
    model, plain = loaded(path, BITS[bits]), loaded(path)
    before = logits(plain)
    numbers = nf4_numbers(model) | {
        name: dequantize(weight.quantized, torch.empty(weight.num_outputs, weight.num_inputs))
        for name, weight in model.low_bit_weights.items()
    }
    assert numbers and isinstance(model.quantization, QuantizationSummary)
    for name, rounded in numbers.items():
        # A plain product may have more outputs, of projections that keep the model's type.
        plain.get_submodule(name).get_parameter("tensor")[: len(rounded)].copy_(rounded)
    found = logits(model)
    torch.testing.assert_close(found, logits(plain), **TOLERANCE)
    assert float((found - before).norm()) > 1e-3 * float(before.norm())


@each_family(EVERY_DAY_PREFIXES)
def test_answers_are_the_same_behind_a_prefix(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a shared prompt and behind an answer; free blocks are full of NaN."""
    monkeypatch.setattr(checkpoint_places, "LEAST_STOP_TOKENS", 16)
    monkeypatch.setattr(checkpoint_places, "LEAST_MOVE_TOKENS", 16)
    model, layout = loaded(path), layout_of(ModelFolder.open(path).config)
    knowing = EngineOnRunner(model, layout, 60, num_checkpoints=8)
    fresh = EngineOnRunner(model, layout, 60, enable_prefix_cache=False)
    shared, answer, found = (PROMPT * 2)[:52], [], []
    for own in ([1, 2], [3, 4, 5], [3, 4, 5, "answer", 6]):
        prompt = shared + [token for part in own for token in (answer if part == "answer" else [part])]
        before = knowing.engine._scheduler.stats.num_prefix_hit_tokens
        [[answer]] = knowing.outputs([greedy(prompt, 12)])
        found.append(knowing.engine._scheduler.stats.num_prefix_hit_tokens - before)
        assert [[answer]] == fresh.outputs([greedy(prompt, 12)])
    assert found == [0, 48, 64]
