"""GGUF files of each family that llama.cpp writes, against transformers with the same numbers.

The files are written as its converters do: with other names, factors of norms that are whole, rows
that alternate, experts of a layer in one tensor each for gates, ups and downs.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from tests.models.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.support.gguf_writer import Gguf, from_folder
from tests.support.model_builds import load_model, weight_memory
from tests.support.rank_threads import on_ranks

from headrace_backend.config import EngineConfig
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization.summaries import StoredSummary
from headrace_backend.tp_rules import unsuitable_tp
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_model_folder import InvalidModelFolder, ModelFolder

CPU = torch.device("cpu")
PROMPT = [17 * index % VOCAB_SIZE for index in range(60)]
# fp32 with sums in another order; logits are of order 10.
TOLERANCE = 3e-4
# A model of each family and the type of its matrices; of gpt-oss those of experts, beside Q8_0.
FAMILIES = {
    "gpt-oss-wide": "MXFP4",
    "gpt-oss-order-tied": "F16",
    "mixtral-wide": "Q4_0",
    "gemma3-file": "Q5_1",
    "phi3-blocks": "Q4_0",
    "phi3-partial": "Q8_0",
    "glm4": "Q8_0",
    "smollm3-file": "Q4_1",
    "olmo2": "Q8_0",
    "olmo3": "Q8_0",
    "seed-oss": "Q8_0",
    "exaone4-file": "Q8_0",
    "exaone4-tied": "F16",
    "gemma4-small": "Q5_1",
    "gemma4-moe-wide": "Q8_0",
    "glm4-moe-wide": "Q4_0",
    "qwen3.5-wide": "Q4_K",
    "qwen3.5-order-tied": "Q8_0",
    "qwen3.5-moe-wide": "Q8_0",
}
# What they have is in others too.
SLOW = (
    "gpt-oss-order-tied", "phi3-blocks", "olmo2", "olmo3", "smollm3-file", "gemma3-file", "glm4", "gemma4-small",
    "qwen3.5-wide", "qwen3.5-order-tied", "seed-oss", "exaone4-tied",
)  # fmt: skip


def written(source: pathlib.Path, path: pathlib.Path, name: str) -> tuple[Gguf, pathlib.Path]:
    """A GGUF file, and a plain folder with the numbers that it stands for."""
    own = FAMILIES[name]

    def kind_of(tensor: str, _: tuple[int, ...]) -> str:
        if tensor.endswith((".router.weight", ".gate.weight", "router.proj.weight", "conv1d.weight", "_bias")):
            return "F32"
        return "Q8_0" if own == "MXFP4" and ".experts." not in tensor else own

    gguf, exact = from_folder(source, kind_of)
    plain = path / "exact"
    plain.mkdir()
    (plain / "config.json").write_text((source / "config.json").read_text())
    exact = {tensor: values.contiguous() for tensor, values in exact.items()}
    safetensors.torch.save_file(exact, plain / "model.safetensors", metadata={"format": "pt"})
    gguf.write(path / "model.gguf")
    return gguf, plain


def read(file: pathlib.Path, shard: Shard = ALONE) -> CausalLM:
    folder = ModelFolder.open(file)
    return load_model(folder, folder.config, torch.float32, CPU, "folder", 0, lambda *_: None, shard=shard)


def logits(model: CausalLM) -> torch.Tensor:
    return torch.cat(PagedDriver(model).step([Row(PROMPT)], [len(PROMPT)]))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in FAMILIES])
def test_a_file_is_what_transformers_has(tmp_path: pathlib.Path, name: str) -> None:
    write_checkpoint(tmp_path / "source", name)
    _, plain = written(tmp_path / "source", tmp_path, name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    folder, model = ModelFolder.open(tmp_path / "model.gguf"), read(tmp_path / "model.gguf")
    found = logits(model)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=1e-4)
    assert model.parameter_count == folder.parameter_count
    assert weight_memory(folder.config, torch.float32, None, CPU, records=folder.tensors).weights == model.weight_bytes
    if unsuitable_tp(EngineConfig(model=tmp_path, device="cpu", tp=2), folder.config) is None:
        parts = on_ranks(2, lambda shard: logits(read(tmp_path / "model.gguf", shard)))
        torch.testing.assert_close(parts[0], found, atol=TOLERANCE, rtol=1e-4)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Gguf, pathlib.Path]:
    path = tmp_path_factory.mktemp("gpt-oss")
    write_checkpoint(path / "source", "gpt-oss-wide")
    return written(path / "source", path, "gpt-oss-wide")[0], path


def test_experts_in_mxfp4_stay_in_4_bits_and_are_reported(gpt_oss: tuple[Gguf, pathlib.Path]) -> None:
    model = read(gpt_oss[1] / "model.gguf")
    assert isinstance(model.quantization, StoredSummary)
    assert set(model.quantization.scheme.split("+")) == {"MXFP4", "Q8_0"}
    assert len(model.mxfp4_weights) == 2 * 3


def refusal(gguf: Gguf, path: pathlib.Path) -> str:
    with pytest.raises(InvalidModelFolder) as error:
        ModelFolder.open(gguf.write(path / "bad.gguf"))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_can_not_be_is_refused_by_name(gpt_oss: tuple[Gguf, pathlib.Path], tmp_path: pathlib.Path) -> None:
    gguf, metadata, tensors = gpt_oss[0], dict(gpt_oss[0].metadata), dict(gpt_oss[0].tensors)
    gate, up, down = (f"blk.1.ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
    bias, query = "blk.1.ffn_up_exps.bias", "blk.0.attn_q.weight"

    def as_kind(name: str, kind: str, num_bytes: int) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        shape = tensors[name][1]
        blocks = shape[-1] // 32
        for size in shape[:-1]:
            blocks *= size
        return {name: (kind, shape, bytes(blocks * num_bytes))}

    try:
        for changes, message in (
            (as_kind(query, "MXFP4", 17), f"tensor '{query}' has type MXFP4, which projections of experts alone"),
            (as_kind(down, "Q8_0", 34), f"{down}' has type Q8_0, {gate} MXFP4: of a layer's experts all or none"),
            (as_kind(bias, "Q8_0", 34), f"{bias}' has type Q8_0, one of F32, F16, BF16 expected for biases"),
            (
                as_kind(gate, "Q5_0", 22) | as_kind(up, "Q5_0", 22) | as_kind(down, "Q5_0", 22),
                f"{gate}' has type Q5_0, one of F32, F16, BF16, Q8_0, Q4_0, MXFP4 expected for experts with biases",
            ),
        ):
            gguf.tensors = tensors | changes
            assert message in refusal(gguf, tmp_path)
        gguf.tensors = {name: tensor for name, tensor in tensors.items() if name != "blk.2.attn_sinks.weight"}
        assert "tensor 'blk.2.attn_sinks.weight' is missing" in refusal(gguf, tmp_path)
        gguf.tensors = tensors
        for changed, message in (
            ({"gpt-oss.attention.sliding_window": 0}, "attention.sliding_window is missing or 0"),
            ({"gpt-oss.attention.sliding_window_pattern": [True]}, "must be an array of 3 booleans or a period"),
            ({"gpt-oss.expert_count": 0}, "gpt-oss.expert_count must be at least 1"),
            ({"general.architecture": "qwen3", "qwen3.expert_count": 4}, "experts of this architecture are not"),
        ):
            gguf.metadata = metadata | changed
            assert message in refusal(gguf, tmp_path)
    finally:
        gguf.metadata, gguf.tensors = metadata, tensors


def test_what_layers_of_gemma_4_can_not_be_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path / "source", "gemma4-moe-wide")
    gguf, _ = written(tmp_path / "source", tmp_path, "gemma4-moe-wide")
    metadata, tensors = dict(gguf.metadata), dict(gguf.tensors)
    keys: list[tuple[dict[str, Any], str]] = [
        ({"attention.head_count_kv": [4, 2]}, "head_count_kv must be an integer from 1 on, or an array of 4"),
        ({"attention.shared_kv_layers": 4}, "shared_kv_layers must be an integer from 0 to 3"),
        ({"attention.sliding_window_pattern": [True]}, "must be an array of 4 booleans"),
        ({"attention.value_length_swa": 4}, "value_length_swa must be the length of a head's key"),
        ({"rope.dimension_count_swa": 4}, "dimension_count_swa must be 8"),
        ({"feed_forward_length": [128, 64, 64, 64]}, "feed_forward_length must be one number, or twice that from"),
        ({"expert_gating_func": 2}, "expert_gating_func must be 1 or absent"),
    ]
    for changed, message in keys:
        gguf.metadata = metadata | {f"gemma4.{key}": value for key, value in changed.items()}
        assert message in refusal(gguf, tmp_path)
    gguf.metadata = metadata
    still = "rope_freqs.weight"
    misplaced = ("F32", (8,), np.array([1e30, *[1.0] * 7], np.float32).tobytes())
    stored: list[tuple[dict[str, Any], str]] = [
        ({still: None}, "tensor 'rope_freqs.weight' must be there, and be 1 for the planes"),
        ({still: misplaced}, "tensor 'rope_freqs.weight' must be 1 for the first planes of a head and 1e+30"),
        ({"blk.1.layer_output_scale.weight": None}, "tensor 'blk.1.layer_output_scale.weight' is missing"),
        ({"blk.9.attn_q.weight": misplaced}, "tensor 'blk.9.attn_q.weight' is surplus"),
    ]
    for changes, message in stored:
        gguf.tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
        assert message in refusal(gguf, tmp_path)


def test_a_scale_above_2_is_refused_by_layer(gpt_oss: tuple[Gguf, pathlib.Path], tmp_path: pathlib.Path) -> None:
    gguf = gpt_oss[0]
    tensors, name = dict(gguf.tensors), "blk.1.ffn_down_exps.weight"
    kind, shape, data = tensors[name]
    gguf.tensors = tensors | {name: (kind, shape, b"\xff" + data[1:])}
    gguf.write(tmp_path / "model.gguf")
    gguf.tensors = tensors
    with pytest.raises(QuantizationRefused, match="layers.1.mlp.down_proj.*an MXFP4 scale above 2"):
        read(tmp_path / "model.gguf")
