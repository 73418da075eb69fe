"""Which files of a repository are fetched."""

from __future__ import annotations

import json

import pytest

from headrace_hub.choice import INDEX_FILE, gguf_file, is_folder_model, shards, small_files
from headrace_hub.errors import BadName, HubRefused

QUANTS = ("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf", "m-Q8_0_L.gguf", "old/m.q5_0.gguf")
ASIDE = ("mmproj-m-F16.gguf", "m.imatrix.gguf", "imatrix_unsloth.gguf", "m-BF16-00001-of-00002.gguf")


def test_only_configuration_and_tokenizer_are_small_files() -> None:
    there = [
        "config.json",
        "tokenizer.json",
        "modeling.py",
        "pytorch_model.bin",
        "sub/config.json",
        "training_args.json",
    ]
    assert small_files(there) == ["config.json", "tokenizer.json"]
    assert small_files([*there, INDEX_FILE])[-1] == INDEX_FILE
    assert INDEX_FILE not in small_files([*there, INDEX_FILE, "model.safetensors"])


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["config.json", "pytorch_model.bin"], r"no model.safetensors .* pickles \(pytorch_model.bin\)"),
        (["config.json", "consolidated.00.pth"], r"pickles \(consolidated.00.pth\)"),
        (["README.md"], "no config.json; safetensors and GGUF weights are what is served"),
        (["model.safetensors"], "no config.json"),
    ],
)
def test_a_repository_without_weights_that_are_read_is_refused(files: list[str], reason: str) -> None:
    with pytest.raises(HubRefused, match=reason):
        is_folder_model("a/b", files, None)


def test_a_folder_model_is_preferred_unless_a_file_is_named() -> None:
    files = ["config.json", "model.safetensors", "m-Q8_0.gguf"]
    assert is_folder_model("a/b", files, None)
    assert not is_folder_model("a/b", files, "Q8_0")
    with pytest.raises(BadName, match="has no GGUF file"):
        is_folder_model("a/b", files[:2], "Q8_0")


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q8_0", "m-Q8_0.gguf"),
        ("m-Q8_0.gguf", "m-Q8_0.gguf"),
        ("old/m.q5_0.gguf", "old/m.q5_0.gguf"),
        ("Q5_0", "old/m.q5_0.gguf"),
    ],
)
def test_a_part_of_its_name_names_a_gguf_file(file: str, found: str) -> None:
    assert gguf_file("a/b", (*QUANTS, *ASIDE), file) == found


def test_the_only_gguf_file_needs_no_name() -> None:
    assert gguf_file("a/b", ("m-Q8_0.gguf", *ASIDE), None) == "m-Q8_0.gguf"


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (None, "has 5 GGUF files; name one as a/b:Q4_K_M or with --file: m-Q4_K_M.gguf, m-Q4_K_S.gguf"),
        ("Q4_K", "has 2 GGUF files that Q4_K fits"),
        ("Q2_K", "has no GGUF file Q2_K"),
        ("BF16", "has BF16 only split into parts"),
        ("F16", "has no GGUF file F16"),
    ],
)
def test_what_names_no_single_gguf_file_gets_the_list(file: str | None, reason: str) -> None:
    with pytest.raises(BadName, match=reason) as refused:
        gguf_file("a/b", (*QUANTS, *ASIDE), file)
    assert all(name in str(refused.value) for name in QUANTS)
    assert not any(name in str(refused.value) for name in ASIDE)


def test_an_index_names_shards_that_are_there() -> None:
    index = json.dumps(
        {"weight_map": {"a": "m-2.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}}
    ).encode()
    assert shards(index, "a/b", ["m-1.safetensors", "m-2.safetensors"]) == ["m-1.safetensors", "m-2.safetensors"]
    with pytest.raises(HubRefused, match="names m-2.safetensors, which the repository does not have"):
        shards(index, "a/b", ["m-1.safetensors"])


@pytest.mark.parametrize(
    "index",
    [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b'{"weight_map": {"a": "../x.safetensors"}}',
     b'{"weight_map": {"a": "x.bin"}}', b'{"weight_map": {"a": 1, "b": "x"}}'],
)  # fmt: skip
def test_what_is_no_index_is_refused(index: bytes) -> None:
    with pytest.raises(HubRefused, match=INDEX_FILE):
        shards(index, "a/b", ["x.bin"])
