"""Opening whole folders.

What is missing, surplus, misshapen or elsewhere, shards, links, special files, speed, and that
torch stays out.
"""

import json
import os
import pathlib
import subprocess
import sys
import time
import tracemalloc
from typing import Any

import pytest
from tests.model_folder.folders import (
    CONFIG,
    header_of,
    write_folder,
    write_index,
    write_safetensors,
    write_sharded_folder,
)

from headrace_model_folder import InvalidModelFolder, ModelFolder, expected_tensors
from headrace_model_folder.config import parse_config

NORM = "model.layers.1.input_layernorm.weight"


def refused(path: pathlib.Path) -> str:
    with pytest.raises(InvalidModelFolder) as error:
        ModelFolder.open(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def rewrite_weights(path: pathlib.Path, changes: dict[str, Any], dtype: str = "F32", width: int = 4) -> None:
    shapes = {**expected_tensors(parse_config(CONFIG)), **changes}
    header, size = header_of({name: shape for name, shape in shapes.items() if shape is not None}, dtype, width)
    write_safetensors(path / "model.safetensors", header, size)


def test_a_valid_folder_is_described(tmp_path: pathlib.Path) -> None:
    folder = ModelFolder.open(write_folder(tmp_path / "tiny"))
    assert folder.name == "tiny"
    assert folder.revision.startswith("tiny@") and len(folder.revision) == len("tiny@") + 12
    assert set(folder.tensors) == set(expected_tensors(folder.config))
    assert (
        folder.parameter_count * 4
        == sum(record.num_bytes for record in folder.tensors.values())
        == folder.weight_bytes("fp32")
    )
    assert folder.weight_bytes("bf16") * 2 == folder.weight_bytes("float32")
    assert folder.tokenizer_path is None and folder.chat_template is None


@pytest.mark.parametrize(
    ("changes", "rule", "tensor"),
    [
        ({NORM: None}, "missing", NORM),
        ({"lm_head.weight": None}, "missing", "lm_head.weight"),
        ({"model.layers.2.mlp.up_proj.weight": (24, 16)}, "surplus", "model.layers.2.mlp.up_proj.weight"),
        ({"../../etc/x": (1,)}, "surplus", "../../etc/x"),
        ({NORM: (17,)}, "[16] expected", NORM),
        (
            {"model.layers.0.self_attn.k_proj.weight": (16, 8)},
            "[8, 16] expected",
            "model.layers.0.self_attn.k_proj.weight",
        ),
        ({"model.embed_tokens.weight": (31, 16)}, "[32, 16] expected", "model.embed_tokens.weight"),
        ({"model.layers.0.self_attn.q_proj.bias": (16,)}, "surplus", "model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_a_wrong_tensor_is_named_with_its_file(
    tmp_path: pathlib.Path, changes: dict[str, Any], rule: str, tensor: str
) -> None:
    rewrite_weights(write_folder(tmp_path), changes)
    message = refused(tmp_path)
    assert message.startswith("model.safetensors:") and rule in message and f"'{tensor}'" in message


def test_stale_rotary_frequencies_and_the_head_of_tied_embeddings_are_tolerated(tmp_path: pathlib.Path) -> None:
    write_folder(tmp_path, {**CONFIG, "tie_word_embeddings": True})
    rewrite_weights(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)})
    folder = ModelFolder.open(tmp_path)
    assert "lm_head.weight" not in expected_tensors(folder.config)
    rewrite_weights(tmp_path, {"lm_head.weight": (32, 17)})
    assert "lm_head.weight" in refused(tmp_path)


def test_weights_of_a_type_that_can_not_be_loaded_are_refused(tmp_path: pathlib.Path) -> None:
    rewrite_weights(write_folder(tmp_path), {}, "I8", 1)
    assert "I8" in refused(tmp_path)


def test_a_truncated_weight_file_is_refused(tmp_path: pathlib.Path) -> None:
    path = write_folder(tmp_path) / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    message = refused(tmp_path)
    assert message.startswith("model.safetensors: is truncated: tensor 'lm_head.weight'")


def test_shards_are_read_through_the_index(tmp_path: pathlib.Path) -> None:
    weight_map = write_sharded_folder(tmp_path)
    folder = ModelFolder.open(tmp_path)
    assert {name: record.file for name, record in folder.tensors.items()} == weight_map


@pytest.mark.parametrize(
    "target", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "x.bin", "a\\b.safetensors"]
)
def test_an_index_that_names_paths_is_refused(tmp_path: pathlib.Path, target: str) -> None:
    weight_map = write_sharded_folder(tmp_path / "model")
    write_safetensors(tmp_path / "outside.safetensors", {}, 0)
    write_index(tmp_path / "model", {**weight_map, NORM: target})
    message = refused(tmp_path / "model")
    assert "index.json" in message and NORM in message


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: pathlib.Path) -> None:
    weight_map = write_sharded_folder(tmp_path)
    others = sorted(set(weight_map.values()) - {weight_map[NORM]})
    write_index(tmp_path, {**weight_map, NORM: others[0]})
    assert NORM in refused(tmp_path)
    write_index(tmp_path, {**weight_map, "extra.weight": others[0]})
    assert "'extra.weight' is missing" in refused(tmp_path)
    write_index(tmp_path, {name: file for name, file in weight_map.items() if name != NORM})
    assert NORM in refused(tmp_path)
    write_index(tmp_path, {**weight_map, NORM: "\ud800.safetensors"})
    assert "is no name that a file can have" in refused(tmp_path)
    write_index(tmp_path, {**weight_map, NORM: "x" * 5000 + ".safetensors"})
    message = refused(tmp_path)
    assert "a file's name has at most 255 bytes, this has 5012" in message and len(message) < 200
    write_index(tmp_path, {**weight_map, NORM: "model-9.safetensors"})
    assert "model-9.safetensors" in refused(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: pathlib.Path) -> None:
    weight_map = write_sharded_folder(tmp_path)
    other = next(file for file in sorted(set(weight_map.values())) if file != weight_map[NORM])
    shapes = expected_tensors(parse_config(CONFIG))
    header, size = header_of({name: shapes[name] for name in shapes if weight_map[name] == other or name == NORM})
    write_safetensors(tmp_path / other, header, size)
    assert NORM in refused(tmp_path)


def test_a_folder_without_weights_opens_only_for_dummy_weights(tmp_path: pathlib.Path) -> None:
    (write_folder(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert "model.safetensors" in refused(tmp_path)
    assert ModelFolder.open(tmp_path, require_weights=False).tensors == {}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_out_of_the_folder_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    path = write_folder(tmp_path / "model") / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    message = refused(tmp_path / "model")
    assert name in message and "link" in message


def test_a_snapshot_of_the_hugging_face_cache_may_link_to_its_blobs(tmp_path: pathlib.Path) -> None:
    snapshot = write_folder(tmp_path / "models--x" / "snapshots" / "abc")
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    for file in list(snapshot.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(pathlib.Path("../../blobs") / file.name)
    assert ModelFolder.open(snapshot).tensors


def test_a_blob_of_that_cache_may_be_one_that_all_models_share(tmp_path: pathlib.Path) -> None:
    snapshot = write_folder(tmp_path / "models--x" / "snapshots" / "abc")
    blobs, shared = tmp_path / "models--x" / "blobs", tmp_path / "blobs" / "ab"
    blobs.mkdir()
    shared.mkdir(parents=True)
    (snapshot / "model.safetensors").rename(shared / "hash")
    (blobs / "etag").symlink_to("../../blobs/ab/hash")
    (snapshot / "model.safetensors").symlink_to("../../blobs/etag")
    assert ModelFolder.open(snapshot).tensors
    # A folder that is no cache's has no such neighbour.
    (tmp_path / "models--x").rename(tmp_path / "x")
    assert "link" in refused(tmp_path / "x" / "snapshots" / "abc")


def test_special_and_huge_files_are_refused_at_once(tmp_path: pathlib.Path) -> None:
    path = write_folder(tmp_path)
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")
    assert "regular file" in refused(path)
    (path / "config.json").unlink()
    (path / "config.json").touch()
    os.truncate(path / "config.json", 1 << 30)
    tracemalloc.start()
    try:
        assert "config.json" in refused(path)
        # Not read: it has a gigabyte.
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("make", ["missing", "file", "empty"])
def test_something_that_is_no_model_folder_is_refused(tmp_path: pathlib.Path, make: str) -> None:
    path = tmp_path / "model"
    if make == "file":
        path.write_text("x")
    if make == "empty":
        path.mkdir()
    assert "config.json" in refused(path) if make == "empty" else "model" in refused(path)


def test_a_large_folder_opens_within_seconds_since_only_headers_are_read(tmp_path: pathlib.Path) -> None:
    large = {
        **CONFIG,
        "num_hidden_layers": 128,
        "hidden_size": 16_384,
        "intermediate_size": 65_536,
        "vocab_size": 131_072,
    }
    large |= {"num_attention_heads": 128, "num_key_value_heads": 8}
    started = time.monotonic()
    folder = ModelFolder.open(write_folder(tmp_path, large))
    assert folder.weight_bytes("fp32") > 1 << 40
    # Reading the terabyte would take minutes.
    assert time.monotonic() - started < 60.0


def test_the_revision_follows_config_tokenizer_headers_and_weights(tmp_path: pathlib.Path) -> None:
    path = write_folder(tmp_path / "m")
    revisions = {ModelFolder.open(path).revision, ModelFolder.open(path).revision}
    assert len(revisions) == 1
    (path / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-5}))
    revisions.add(ModelFolder.open(path).revision)
    write_folder(path, {**CONFIG, "vocab_size": 33})
    revisions.add(ModelFolder.open(path).revision)
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    revisions.add(ModelFolder.open(path).revision)
    assert len(revisions) == 4


def test_opening_a_folder_imports_no_torch(tmp_path: pathlib.Path) -> None:
    code = (
        "import sys; from headrace_model_folder import ModelFolder; ModelFolder.open(sys.argv[1]); print('torch' in "
        "sys.modules)"
    )
    backend = pathlib.Path(sys.modules[ModelFolder.__module__].__file__ or "").parents[1]
    environment = {**os.environ, "PYTHONPATH": str(backend)}
    command = [sys.executable, "-c", code, str(write_folder(tmp_path))]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip() == "False"
    )
