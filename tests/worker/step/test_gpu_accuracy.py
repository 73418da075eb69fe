"""Logits of the whole GPU path, teacher-forced.

No further from fp32 than transformers' own logits in the same type.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_builds import load_model
from tests.worker.driver import BLOCK_SIZE, Entry, admission, execute, step

from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.step.buffers import StepLimits
from headrace_backend.worker.step.gpu_runner import GpuRunner
from headrace_backend.worker.step.kv_caches import allocate_kv_caches
from headrace_backend.worker.step.shape import AttentionSizes
from headrace_model_folder import ModelFolder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LENGTH = 192
# The prompt in chunks, then token by token.
CHUNKS = (100, 33, 5, 1, 22)
DEMO = pathlib.Path(__file__).parents[3] / "models" / "demo"


# Phi-3 rotates three quarters of each head. Families' own tokens are beyond this vocabulary.
_TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "SmolLM3": _TOKENS,
    "Olmo2": _TOKENS,
    "Olmo3": _TOKENS | {"sliding_window": 100},
    "Glm4": _TOKENS,
    "Gemma3": {"query_pre_attn_scalar": 48, "sliding_window": 100},
    "Phi3": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
        "pad_token_id": None,
        "eos_token_id": 2,
    },
}
# Of Gemma's other configuration text is a part.
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


class Recorder:
    """A model that keeps the logits it gave. Not for captured steps: a replay calls no Python."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.given: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *arguments: Any) -> torch.Tensor:
        hidden: torch.Tensor = self._model(*arguments)
        return hidden

    def write_logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        self._model.write_logits(hidden, out)
        self.given.append(out.cpu())


def random_model(family: str, path: pathlib.Path) -> pathlib.Path:
    import transformers

    sizes = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8, head_dim=64)
    sizes |= dict(num_key_value_heads=2, vocab_size=2000, max_position_embeddings=1024, initializer_range=0.05)
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**sizes, **OWN_FIELDS.get(family, {}))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def ours(path: pathlib.Path, ids: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
    """Logits after each chunk and each further token, and the positions they belong to."""
    folder, device = ModelFolder.open(path), torch.device("cuda:0")
    model = load_model(folder, folder.config, dtype, device, "folder", 0, lambda *_: None)
    recorder = Recorder(model)
    shape = (64, 2, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
    caches = allocate_kv_caches(model.num_layers, shape, dtype, device)
    sizes = AttentionSizes.of(model.num_heads, caches[0])
    runner = GpuRunner(recorder, Sampler(4, model.vocab_size, device), caches, StepLimits(4, 256, 1024), sizes)
    positions, start = [], 0
    counts = [*CHUNKS, *[1] * (LENGTH - sum(CHUNKS))]
    for number, count in enumerate(counts):
        known = step(
            [Entry(0, start, ids[start : start + count], (0,), number)],
            [admission(0)] if not start else [],
            {0: list(range(63, 63 - LENGTH // BLOCK_SIZE, -1))} if not start else None,
        )
        execute(runner, known)
        start += count
        positions.append(start - 1)
    return torch.cat(recorder.given), positions


def theirs(path: pathlib.Path, ids: list[int], positions: list[int], dtype: torch.dtype) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).cuda()
    with torch.inference_mode():
        return model(torch.tensor([ids], device="cuda")).logits[0, positions].float().cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Phi3", "SmolLM3", "Olmo2", "Olmo3", "Glm4", "Gemma3", "demo"])
def test_error_is_no_larger_than_that_of_transformers(family: str, dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    path = DEMO if family == "demo" else random_model(family, tmp_path / family)
    vocab_size = ModelFolder.open(path).config.vocab_size
    errors = []
    for seed in range(3):
        ids = [int(x) for x in np.random.default_rng(seed).integers(3, vocab_size, LENGTH)]
        logits, positions = ours(path, ids, dtype)
        exact = theirs(path, ids, positions, torch.float32)
        rounded = theirs(path, ids, positions, dtype)
        errors.append([float((x - exact).norm() / exact.norm()) for x in (logits, rounded)])
        largest = (logits - exact).abs().max()
        chosen = exact.gather(1, logits.argmax(1, keepdim=True))[:, 0]
        assert (exact.amax(1) - chosen <= 2 * largest).all()
    mean = np.mean(errors, axis=0)
    print(f"{family} {dtype}: ours {mean[0]:.2e}, transformers {mean[1]:.2e}")
    assert mean[0] <= 1.05 * mean[1]
