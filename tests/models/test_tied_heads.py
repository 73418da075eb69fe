"""An output layer that config.json ties to the embedding, and what the folder's tensors say of it.

transformers takes the folder's own output layer where it differs, and so do we.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.checkpoints import load, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.models.test_against_transformers import TOLERANCE

from headrace_model_folder import ModelFolder

TOKENS = list(range(20))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def changed_in_one_number(embedding: torch.Tensor) -> torch.Tensor:
    head = embedding.clone()
    head[-1, -1] += 1.0
    return head


@pytest.mark.parametrize(
    ("make_head", "is_tied"),
    [
        (torch.clone, True),
        (changed_in_one_number, False),
        (lambda embedding: embedding.half(), False),
    ],
)
def test_a_tied_output_layer_of_its_own_is_used(
    tmp_path: pathlib.Path, make_head: Callable[[torch.Tensor], torch.Tensor], is_tied: bool
) -> None:
    write_checkpoint(tmp_path, "llama-tied")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, HEAD: make_head(tensors[EMBEDDING])}, file, {"format": "pt"})
    assert ModelFolder.open(tmp_path).config.description.head.tied == is_tied
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).float().eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    [found] = PagedDriver(load(tmp_path)).step([Row(TOKENS)], [len(TOKENS)])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("written", "is_tied"), [("ministral3-part", True), ("mistral3-part", False)])
def test_mistral_3_is_tied_where_nothing_is_stated_unless_it_has_an_output_layer_of_its_own(
    tmp_path: pathlib.Path, written: str, is_tied: bool
) -> None:
    """Published folders leave the field out, with and without that layer; transformers agrees."""
    write_checkpoint(tmp_path, written)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for fields in (config, config["text_config"]):
        fields.pop("tie_word_embeddings", None)
    path.write_text(json.dumps(config))
    assert transformers.AutoConfig.from_pretrained(tmp_path).tie_word_embeddings
    assert ModelFolder.open(tmp_path).config.description.head.tied == is_tied
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path).float().eval()
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([TOKENS])).logits[0]
    [found] = PagedDriver(load(tmp_path)).step([Row(TOKENS)], [len(TOKENS)])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_what_stands_beside_the_parts_of_gemma_3_says_whether_it_is_tied(tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path, "gemma3-part")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = True, False
    path.write_text(json.dumps(config))
    assert ModelFolder.open(tmp_path).config.description.head.tied
