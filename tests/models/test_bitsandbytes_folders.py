"""Folders in bitsandbytes' NF4.

Served as the numbers that their bits stand for, and refused by file, tensor and rule where they
contradict themselves.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from tests.models.checkpoints import load, write_checkpoint
from tests.models.test_gguf_models import logits
from tests.models.test_pinned_loader import load_late
from tests.support.bitsandbytes_folder import write
from tests.support.model_builds import load_model, weight_memory
from tests.support.rank_threads import on_ranks

from headrace_backend.config import EngineConfig
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization.summaries import StoredSummary
from headrace_backend.quantize_rules import unsuitable_quantization
from headrace_backend.weights.block_records import block_kinds
from headrace_backend.weights.placement import Placement
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_model_folder import InvalidModelFolder, ModelFolder

CPU = torch.device("cpu")
FILE = "model.safetensors"
DOWN = "model.layers.1.mlp.down_proj.weight"
STATE = ".quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("wide")
    write_checkpoint(made, "llama-wide")
    return made


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("skip", [(), ("v_proj", "layers.0.mlp")])
def test_logits_are_those_of_the_numbers(
    source: pathlib.Path, tmp_path: pathlib.Path, double: bool, skip: tuple[str, ...]
) -> None:
    """Also where some layers were left as they are.

    64 blocks of a tensor share a nested scale with no other's.
    """
    exact = write(source, tmp_path / "nf4", double, skip)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text((source / "config.json").read_text())
    safetensors.torch.save_file(exact, plain / FILE)
    model = load(tmp_path / "nf4")
    torch.testing.assert_close(logits(model), logits(load(plain)), atol=3e-4, rtol=0)
    summary = model.quantization
    assert isinstance(summary, StoredSummary) and summary.scheme == ("NF4" if double else "NF4_SINGLE")
    assert 4.1 < summary.bits_per_weight < (4.3 if double else 4.6)
    folder = ModelFolder.open(tmp_path / "nf4")
    assert model.parameter_count == folder.parameter_count
    assert weight_memory(folder.config, torch.float32, None, CPU, records=folder.tensors).weights == model.weight_bytes


def test_projections_that_share_a_tensor_have_their_rows_of_its_scales(tmp_path: pathlib.Path) -> None:
    """Linear attention's queries, keys and values, also on two ranks: each begins with a scale."""
    write_checkpoint(tmp_path / "source", "qwen3.5-wide")
    exact = write(tmp_path / "source", tmp_path / "nf4", True, ("conv1d", "in_proj_a", "in_proj_b"))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text((tmp_path / "source" / "config.json").read_text())
    safetensors.torch.save_file(exact, tmp_path / "plain" / FILE)
    expected = logits(load(tmp_path / "plain"))
    torch.testing.assert_close(logits(load(tmp_path / "nf4")), expected, atol=3e-4, rtol=0)
    folder = ModelFolder.open(tmp_path / "nf4")
    about = (folder, folder.config, torch.float32, CPU, "folder", 0, lambda *_: None)
    ranks = on_ranks(2, lambda shard: logits(load_model(*about, shard=shard)))
    for found in ranks:
        torch.testing.assert_close(found, expected, atol=3e-4, rtol=0)


@pytest.mark.parametrize("piece_bytes", [50, 1 << 20])
def test_a_cards_loader_gives_the_same_numbers(source: pathlib.Path, tmp_path: pathlib.Path, piece_bytes: int) -> None:
    write(source, tmp_path)
    folder, direct = ModelFolder.open(tmp_path), load(tmp_path)
    kinds = block_kinds(folder.tensors)
    late = CausalLM(folder.config.description, Placement(torch.float32, CPU, blocks=kinds), 16)
    load_late(tmp_path, late.weight_targets(), piece_bytes, 3)
    for path, weight in direct.block_weights.items():
        for found, expected in zip(late.block_weights[path].blocks, weight.blocks, strict=True):
            assert found.nibbles is not None and expected.nibbles is not None
            assert torch.equal(found.nibbles, expected.nibbles)


def changed(folder: pathlib.Path, change: Callable[[dict[str, Any]], object]) -> pathlib.Path:
    tensors = dict(safetensors.numpy.load_file(folder / FILE))
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / FILE)
    return folder


def _state(**changes: Any) -> Callable[[dict[str, Any]], object]:
    def change(tensors: dict[str, Any]) -> None:
        values = {**json.loads(tensors[DOWN + STATE].tobytes()), **changes}
        tensors[DOWN + STATE] = np.frombuffer(json.dumps(values).encode(), np.uint8)

    return change


def _tensor(end: str, value: np.ndarray) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({DOWN + end: value})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(DOWN + ".absmax"), f"tensor '{DOWN}.absmax' is missing"),
        (lambda t: t.pop(DOWN + ".nested_absmax"), f"tensor '{DOWN}.nested_absmax' is missing"),
        (lambda t: t.pop(DOWN + ".quant_map"), f"tensor '{DOWN}.quant_map' is missing"),
        (lambda t: t.pop(DOWN + STATE), f"tensor '{DOWN}' has shape [4096, 1], [64, 128] expected"),
        (lambda t: t.pop(DOWN), f"tensor '{DOWN}' is missing"),
        (_tensor(".absmax", np.zeros(127, np.uint8)), "has 127 numbers, 128 expected"),
        (_tensor(".absmax", np.zeros(128, np.float16)), "has dtype F16, one of U8, F32 expected"),
        (_tensor(".nested_absmax", np.zeros(2, np.float32)), "has 2 numbers, 1 expected"),
        (_tensor("", np.zeros((100, 1), np.uint8)), f"tensor '{DOWN}' has 100 numbers, 4096 expected"),
        (_tensor(STATE, np.frombuffer(b"{", np.uint8)), "is not valid JSON"),
        (_state(quant_type="fp4"), "quant_type must be 'nf4', is 'fp4'"),
        (_state(blocksize=128), "blocksize must be 64, is 128"),
        (_state(nested_blocksize=128), "must have a nested_blocksize of 256, has 128"),
        (_state(nested_offset=float("1e40")), "nested_offset must be a number"),
        (_state(shape=[64]), "must have a shape of 2 sizes"),
        (_state(shape=[128, 64]), f"tensor '{DOWN}' has shape [128, 64], [64, 128] expected"),
        (lambda t: t.update({DOWN.replace("weight", "weight.quant_state.bitsandbytes__fp4"): np.zeros(2, np.uint8)}),
         "only NF4 is read"),
    ],
)  # fmt: skip
def test_folders_that_contradict_themselves_are_refused(
    source: pathlib.Path, tmp_path: pathlib.Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    write(source, tmp_path)
    with pytest.raises(InvalidModelFolder) as error:
        ModelFolder.open(changed(tmp_path, change))
    assert str(error.value).startswith(FILE) and said in str(error.value)


@pytest.mark.parametrize("table", [".quant_map", ".nested_quant_map"])
def test_another_table_is_refused(source: pathlib.Path, tmp_path: pathlib.Path, table: str) -> None:
    write(source, tmp_path)

    def turn(tensors: dict[str, Any]) -> None:
        tensors[DOWN + table] = tensors[DOWN + table][::-1].copy()

    with pytest.raises(InvalidModelFolder, match=rf"{FILE}: tensor '{DOWN}{table}' is another table than NF4's"):
        load(changed(tmp_path, turn))


@pytest.mark.parametrize(("end", "double"), [(".nested_absmax", True), (".absmax", False)])
def test_a_scale_that_is_not_finite_is_refused(
    source: pathlib.Path, tmp_path: pathlib.Path, end: str, double: bool
) -> None:
    write(source, tmp_path, double)

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[DOWN + end] = np.where(np.arange(len(tensors[DOWN + end])) == 0, np.float32("nan"), tensors[DOWN + end])

    with pytest.raises(QuantizationRefused, match=f"tensor '{DOWN}' holds a scale that is not finite"):
        load(changed(tmp_path, spoil))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"load_in_4bit": False}, "quantization_config.load_in_4bit must be True"),
        ({"load_in_8bit": True}, "quantization_config.load_in_8bit must be false"),
        ({"bnb_4bit_quant_type": "fp4"}, "quantization_config.bnb_4bit_quant_type must be 'nf4'"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "quantization_config.bnb_4bit_quant_storage must be 'uint8'"),
    ],
)
def test_what_else_bitsandbytes_does_is_refused(
    source: pathlib.Path, tmp_path: pathlib.Path, changes: dict[str, Any], said: str
) -> None:
    write(source, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidModelFolder, match="config.json") as error:
        ModelFolder.open(tmp_path)
    assert said in str(error.value)


def test_config_and_tensors_must_agree(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    write(source, tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(InvalidModelFolder, match="has dtype U8|has shape|is surplus"):
        ModelFolder.open(tmp_path)
    (tmp_path / "config.json").write_text(config)
    (tmp_path / FILE).write_bytes((source / FILE).read_bytes())
    with pytest.raises(InvalidModelFolder, match="has no tensor that ends in"):
        ModelFolder.open(tmp_path)


def test_such_a_folder_is_not_quantized_again(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    write(source, tmp_path)
    folder = ModelFolder.open(tmp_path)
    said = unsuitable_quantization(EngineConfig(model=tmp_path, quantize="int8"), folder.config)
    assert said == "quantize is int8, and the folder is quantized already (bitsandbytes); quantize off works"
    assert unsuitable_quantization(EngineConfig(model=tmp_path), folder.config) is None
    said = unsuitable_quantization(EngineConfig(model=tmp_path, load="dummy"), folder.config)
    assert (
        said is not None and "load is dummy, and config.json says that the folder is quantized (bitsandbytes)" in said
    )
