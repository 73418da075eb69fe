"""Mixtures of experts read from GGUF files: the numbers that their bits stand for, or a refusal."""

from __future__ import annotations

import pathlib

import pytest
import safetensors.torch
import torch
import transformers
from tests.models.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.support.gguf_numbers import quantize
from tests.support.gguf_writer import Gguf, from_folder
from tests.support.model_builds import load_model, weight_memory
from tests.support.rank_threads import on_ranks

from headrace_backend.config import EngineConfig
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization.expert_weight import BlockExpertWeight
from headrace_backend.quantization.summaries import StoredSummary
from headrace_backend.tp_rules import unsuitable_tp
from headrace_backend.weights.placement import ALONE, Shard
from headrace_model_folder import InvalidModelFolder, ModelFolder

CPU = torch.device("cpu")
PROMPT = [17 * index % VOCAB_SIZE for index in range(40)]


# Types of gates and ups, and of down projections, by what files are called.
FILES = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q8_0"), "Q4_1": ("Q4_1", "F16")}


def kind_of(kind: str, name: str) -> str:
    """Routers are in F32, as llama.cpp writes them; what is no expert may be in any blocks."""
    if ".experts." in name:
        return FILES.get(kind, (kind, kind))["down_proj" in name]
    return "F32" if name.endswith("mlp.gate.weight") else "Q5_0"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """All of whose layers have experts, as all of the architecture's files have."""
    path = tmp_path_factory.mktemp("source")
    write_checkpoint(path, "qwen3-moe-wide")
    return path


@pytest.fixture(scope="module")
def long_source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder whose inputs are 256 and more, of one layer."""
    path = tmp_path_factory.mktemp("long")
    write_checkpoint(path, "qwen3-moe-long")
    return path


def written(source: pathlib.Path, path: pathlib.Path, kind: str) -> tuple[Gguf, pathlib.Path]:
    """A GGUF file, and a plain folder with the numbers that it stands for."""
    gguf, exact = from_folder(source, lambda name, _: kind_of(kind, name))
    plain = path / "exact"
    plain.mkdir()
    (plain / "config.json").write_text((source / "config.json").read_text())
    safetensors.torch.save_file(exact, plain / "model.safetensors", metadata={"format": "pt"})
    gguf.write(path / "model.gguf")
    return gguf, plain


def read(file: pathlib.Path, shard: Shard = ALONE) -> CausalLM:
    folder = ModelFolder.open(file)
    return load_model(folder, folder.config, torch.float32, CPU, "folder", 0, lambda *_: None, shard=shard)


def logits(model: CausalLM) -> torch.Tensor:
    return torch.cat(PagedDriver(model).step([Row(PROMPT)], [len(PROMPT)]))


@pytest.mark.parametrize("kind", ["Q8_0", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Q4_0", "F16"))])
def test_experts_are_those_that_transformers_has(source: pathlib.Path, tmp_path: pathlib.Path, kind: str) -> None:
    _, plain = written(source, tmp_path, kind)
    model = read(tmp_path / "model.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    # The same numbers, summed in another order.
    found = logits(model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-3)
    experts = [weight for weight in model.low_bit_weights.values() if isinstance(weight, BlockExpertWeight)]
    assert len(experts) == (0 if kind == "F16" else 2 * 2)
    assert isinstance(model.quantization, StoredSummary)
    assert set(model.quantization.scheme.split("+")) == {"Q5_0", kind} - {"F16"}
    check_ranks(tmp_path, found)


@pytest.mark.parametrize(
    "kind", ["Q4_K_M", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Q5_K_M", "Q4_1"))]
)
def test_blocks_of_any_type_stay_as_they_are(long_source: pathlib.Path, tmp_path: pathlib.Path, kind: str) -> None:
    _, plain = written(long_source, tmp_path, kind)
    model = read(tmp_path / "model.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    found = logits(model)
    # The same numbers, summed in another order.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-3)
    assert isinstance(model.quantization, StoredSummary)
    assert set(model.quantization.scheme.split("+")) == {"Q5_0", *FILES[kind]} - {"F16"}
    check_ranks(tmp_path, found)


def check_ranks(path: pathlib.Path, found: torch.Tensor) -> None:
    """Memory is planned as it is taken, and ranks compute what one does."""
    folder = ModelFolder.open(path / "model.gguf")
    model = read(path / "model.gguf")
    assert model.parameter_count == folder.parameter_count
    assert weight_memory(folder.config, torch.float32, None, CPU, records=folder.tensors).weights == model.weight_bytes
    for whole_experts in (False, True):
        engine = EngineConfig(model=path, device="cpu", tp=2, expert_parallel=whole_experts)
        assert unsuitable_tp(engine, folder.config) is None
        parts = on_ranks(2, lambda shard, whole=whole_experts: logits(read(path / "model.gguf", _part(shard, whole))))
        torch.testing.assert_close(parts[0], found, rtol=1e-4, atol=2e-3)


def _part(shard: Shard, whole_experts: bool) -> Shard:
    return Shard(shard.rank, shard.world_size, shard.collectives, whole_experts)


def refusal(gguf: Gguf, path: pathlib.Path) -> str:
    with pytest.raises(InvalidModelFolder) as error:
        ModelFolder.open(gguf.write(path / "bad.gguf"))
    assert "\n" not in str(error.value)
    return str(error.value)


UP = "blk.1.ffn_up_exps.weight"


def test_what_can_not_be_is_refused_by_name(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    gguf, _ = written(source, tmp_path, "Q8_0")
    kept = dict(gguf.tensors)
    kind, shape, data = kept[UP]
    floats = torch.zeros(shape).flatten(0, 1).numpy()
    for tensor, message in (
        (None, f"tensor '{UP}' is missing"),
        ((kind, (shape[0] - 1, *shape[1:]), data[: len(data) // shape[0] * (shape[0] - 1)]), "expected from the"),
        (("Q4_0", shape, quantize("Q4_0", floats).tobytes()), "has type Q4_0, blk.1.ffn_gate_exps.weight Q8_0"),
    ):
        gguf.tensors = {name: each for name, each in kept.items() if name != UP} | (
            {} if tensor is None else {UP: tensor}
        )
        assert message in refusal(gguf, tmp_path)
    gguf.tensors = kept
    for key, value in (
        ("expert_count", 0),
        ("expert_used_count", 9),
        ("expert_shared_count", 1),
        ("expert_gating_func", 2),
        ("expert_weights_norm", False),
        ("expert_weights_scale", 2.5),
    ):
        original = dict(gguf.metadata)
        gguf.metadata = {**original, f"qwen3moe.{key}": value}
        message = refusal(gguf, tmp_path)
        assert key in message or "num_experts_per_tok" in message
        gguf.metadata = original
    ModelFolder.open(gguf.write(tmp_path / "good.gguf"))
