"""Which models may draft: refused by name, with both sides' numbers, before weights are read."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest
from tests.support.running_server import DEMO

from headrace_backend.config import EngineConfig
from headrace_backend.draft_rules import unsuitable_draft
from headrace_model_folder import ModelFolder

DRAFT = DEMO / "draft"


@pytest.fixture(scope="module")
def target() -> ModelFolder:
    return ModelFolder.open(DEMO)


def reason(target: ModelFolder, draft: pathlib.Path, **engine: Any) -> str | None:
    config = EngineConfig(model=DEMO, draft_model=draft, speculate="draft", **engine)
    return unsuitable_draft(config, target)


def changed(path: pathlib.Path, **changes: Any) -> pathlib.Path:
    """The demo's draft model with other fields in its config.json, as a folder without weights."""
    shutil.copytree(DRAFT, path)
    config = json.loads((DRAFT / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    (path / "model.safetensors").unlink()
    return path


def test_the_demo_pair_suits(target: ModelFolder) -> None:
    assert reason(target, DRAFT) is None
    assert unsuitable_draft(EngineConfig(model=DEMO), target) is None


def test_another_vocabulary_is_refused_with_both_sizes(target: ModelFolder, tmp_path: pathlib.Path) -> None:
    larger = changed(tmp_path / "larger", vocab_size=5000)
    assert reason(target, larger, load="dummy") == (
        "draft_model larger: has a vocabulary of 5000 tokens, and the model has one of 4096; they must be the same"
    )


def test_the_same_ids_with_other_meanings_are_refused_with_both_hashes(
    target: ModelFolder, tmp_path: pathlib.Path
) -> None:
    swapped = changed(tmp_path / "swapped")
    tokenizer = json.loads((DRAFT / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, other = sorted(vocab, key=vocab.__getitem__)[1000:1002]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    (swapped / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = reason(target, swapped, load="dummy")
    assert target.token_table is not None and said is not None
    assert said.startswith("draft_model swapped: its tokenizer has another vocabulary (4096 tokens, hash ")
    assert said.endswith(f"than the model's (4096 tokens, hash {target.token_table.digest()})")


def test_a_draft_model_without_a_tokenizer_is_refused(target: ModelFolder, tmp_path: pathlib.Path) -> None:
    mute = changed(tmp_path / "mute")
    (mute / "tokenizer.json").unlink()
    assert reason(target, mute, load="dummy") == (
        "draft_model mute: has no tokenizer.json, by which its vocabulary is compared with the model's"
    )


def test_a_shorter_context_is_refused_unless_sequences_are_as_short(
    target: ModelFolder, tmp_path: pathlib.Path
) -> None:
    short = changed(tmp_path / "short", max_position_embeddings=512)
    assert reason(target, short, load="dummy") == (
        "draft_model short: has a context of 512 tokens, and sequences have up to 2048: max_model_len of at most 512 "
        "works"
    )
    assert reason(target, short, load="dummy", max_model_len=512) is None


def test_a_folder_that_is_none_is_refused_as_such(target: ModelFolder, tmp_path: pathlib.Path) -> None:
    assert reason(target, tmp_path / "nowhere") == f"draft_model: {tmp_path / 'nowhere'}: no such model folder"
    broken = changed(tmp_path / "broken")
    said = reason(target, broken)
    assert said is not None and said.startswith("draft_model: ") and "safetensors" in said


def test_bits_that_do_not_suit_are_refused_by_the_name_of_the_setting(
    target: ModelFolder, tmp_path: pathlib.Path
) -> None:
    packed = changed(
        tmp_path / "packed", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    )
    said = reason(target, packed, load="dummy", draft_quantize="int8")
    assert said is not None
    assert "draft_quantize is int8, and the folder is quantized already (gptq); draft_quantize off works" in said
