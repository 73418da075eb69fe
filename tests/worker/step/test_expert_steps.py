"""Steps of a mixture of experts by the GPU's way: the CPU's tokens, exact or padded."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Iterator

import pytest
import torch
from tests.models.checkpoints import randomize_vectors
from tests.models.gpt_oss_folders import quantize_folder
from tests.worker.conftest import load
from tests.worker.driver import execute
from tests.worker.step.test_gpu_runner import DEVICES, cpu_runner, gpu_runner, mixed_plans

from headrace_backend.layers import expert_mlp
from headrace_backend.models.causal_lm import CausalLM
from headrace_kernels.triton_runtime import forced


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> functools.partial[CausalLM]:
    """A Qwen3-MoE of one dense and one sparse layer, loaded once for each device."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = tmp_path_factory.mktemp("models") / "tiny-experts"
    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=97,
        max_position_embeddings=256,
        eos_token_id=2,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return functools.partial(_loaded, path)


@functools.cache
def _loaded(path: pathlib.Path, device: str) -> CausalLM:
    return load(path, device)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """On a CPU the kernels run in the interpreter."""
    with forced() if request.param == "cpu" else contextlib.nullcontext():
        yield request.param


@pytest.fixture(scope="module")
def expected(loaded: functools.partial[CausalLM]) -> list[list[int]]:
    """What the CPU's path draws."""
    runner = cpu_runner(loaded("cpu"))
    return [execute(runner, plan).tokens.tolist() for plan in mixed_plans()]


@pytest.mark.parametrize(
    ("batch_sizes", "at_once"),
    [pytest.param((), False, marks=pytest.mark.slow), ((1, 2, 4, 8), True)],
    ids=["exact, experts chosen by themselves", "padded, experts chosen in one launch with norm and router"],
)
def test_tokens_are_those_of_the_cpu(
    expected: list[list[int]],
    loaded: functools.partial[CausalLM],
    device: str,
    batch_sizes: tuple[int, ...],
    at_once: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expert_mlp, "chooses_at_once", lambda num_tokens, router: at_once)
    runner = gpu_runner(loaded(device), device, batch_sizes)
    assert [execute(runner, plan).tokens.tolist() for plan in mixed_plans()] == expected


# `tests/models` and `tests/kernels` cover its parts.
@pytest.mark.slow
def test_gpt_oss_draws_the_tokens_of_the_cpu(device: str, tmp_path: pathlib.Path) -> None:
    """Sinks, a window in the first layer, biases, clamped gates; two experts in MXFP4."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        hidden_size=32,
        intermediate_size=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=5,
        vocab_size=97,
        max_position_embeddings=256,
        eos_token_id=2,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )
    torch.manual_seed(0)
    model = GptOssForCausalLM(config)
    randomize_vectors(model)
    model.save_pretrained(tmp_path)
    quantize_folder(tmp_path)
    whole = load(tmp_path, "cpu")
    expected = cpu_runner(whole)
    model = whole if device == "cpu" else load(tmp_path, device)
    # A card's kernels of MXFP4 take 16 bits. In fp32 PyTorch multiplies, whose launches follow the
    # routing.
    assert model.can_be_captured == (device == "cpu")
    runner = gpu_runner(model, device, (1, 2, 4, 8) if model.can_be_captured else ())
    for plan, again in zip(mixed_plans(), mixed_plans(), strict=True):
        assert execute(runner, plan).tokens.tolist() == execute(expected, again).tokens.tolist()
