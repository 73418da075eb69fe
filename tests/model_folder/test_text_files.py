"""generation_config.json and the chat template in their different forms."""

import json
import pathlib
from typing import Any

import pytest
from tests.model_folder.folders import write_folder
from transformers import GenerationConfig

from headrace_model_folder import GenerationDefaults, InvalidModelFolder, ModelFolder


def defaults(path: pathlib.Path, **values: Any) -> GenerationDefaults:
    write_folder(path)
    (path / "generation_config.json").write_text(json.dumps(values))
    return ModelFolder.open(path).generation_defaults


def test_sampling_defaults_are_read(tmp_path: pathlib.Path) -> None:
    found = defaults(
        tmp_path, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, eos_token_id=[3, 4], do_sample=True
    )
    assert found == GenerationDefaults(0.6, 0.9, 20, None, 1.1, (3, 4))


def test_do_sample_must_be_a_boolean(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidModelFolder, match="do_sample must be true or false, is 'false'"):
        defaults(tmp_path, temperature=0.7, do_sample="false")


def test_do_sample_false_means_greedy(tmp_path: pathlib.Path) -> None:
    assert defaults(tmp_path, temperature=0.6, do_sample=False).temperature == 0.0


def test_end_of_text_falls_back_to_the_config(tmp_path: pathlib.Path) -> None:
    assert defaults(tmp_path).eos_token_ids == (2,)
    assert defaults(tmp_path, eos_token_id=7).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").unlink()
    assert ModelFolder.open(tmp_path).generation_defaults == GenerationDefaults(eos_token_ids=(2,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("repetition_penalty", 0),
        ("eos_token_id", 32),
    ],
)
def test_a_default_out_of_range_is_refused_by_name(tmp_path: pathlib.Path, field: str, value: Any) -> None:
    with pytest.raises(InvalidModelFolder, match=f"generation_config.json: {field}"):
        defaults(tmp_path, **{field: value})


def test_recommendations_without_effect_are_named(tmp_path: pathlib.Path) -> None:
    found = defaults(
        tmp_path,
        suppress_tokens=[1, 2],
        bad_words_ids=[[3]],
        max_new_tokens=64,
        no_repeat_ngram_size=3,
        repetition_window=64,
        temperature=0.7,
    )
    assert found.without_effect == (
        "bad_words_ids (a list of 1 entries)",
        "max_new_tokens (64)",
        "no_repeat_ngram_size (3)",
        "repetition_window (64)",
        "suppress_tokens (a list of 2 entries)",
    )


def test_what_asks_for_nothing_is_not_named(tmp_path: pathlib.Path) -> None:
    # What transformers writes by itself, with the values that it fills in, and outputs that the
    # context bounds anyway.
    written = {**GenerationConfig().to_dict(), **GenerationConfig._get_default_generation_params()}
    assert defaults(tmp_path, **{**written, "_from_model_config": True}).without_effect == ()
    assert defaults(tmp_path, max_length=4096, bos_token_id=1, pad_token_id=0, suppress_tokens=[]).without_effect == ()


def test_a_hostile_file_names_so_much_and_no_more(tmp_path: pathlib.Path) -> None:
    found = defaults(tmp_path, **{f"\x1b[31m\n{index}" + "x" * 500: "\ud800" * 500 for index in range(100)})
    assert len(found.without_effect) == 33 and found.without_effect[-1] == "68 more"
    assert all(line.isprintable() and len(line) < 200 for line in found.without_effect)


def test_the_template_is_found_in_all_its_places(tmp_path: pathlib.Path) -> None:
    write_folder(tmp_path)
    tokenizer_config = tmp_path / "tokenizer_config.json"
    tokenizer_config.write_text(
        json.dumps({"chat_template": "A", "bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None})
    )
    folder = ModelFolder.open(tmp_path)
    assert folder.chat_template == "A"
    assert folder.template.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    tokenizer_config.write_text(json.dumps({"chat_template": named}))
    assert ModelFolder.open(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert ModelFolder.open(tmp_path).chat_template == "J"


@pytest.mark.parametrize("field", ["chat_template", "bos_token"])
def test_half_of_a_surrogate_pair_is_refused_by_name(tmp_path: pathlib.Path, field: str) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({field: "a \ud800"}))
    with pytest.raises(InvalidModelFolder, match=rf"tokenizer_config\.json: {field} has half of a surrogate pair"):
        ModelFolder.open(tmp_path)


def test_a_template_of_the_wrong_kind_or_size_is_refused(tmp_path: pathlib.Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(InvalidModelFolder, match=r"tokenizer_config\.json"):
        ModelFolder.open(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("x" * ((1 << 20) + 1))
    with pytest.raises(InvalidModelFolder, match=r"chat_template\.jinja"):
        ModelFolder.open(tmp_path)
