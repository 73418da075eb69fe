"""Folders of EAGLE-3 heads: what is read of them, and what is refused before torch is there."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.eagle_heads import Tensors, head_config, random_head, write_head

from headrace_model_folder import Eagle3Folder, InvalidModelFolder

TARGET: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config(**changes: Any) -> dict[str, Any]:
    return head_config(TARGET, 20, (2, 4, 5), **changes)


@pytest.fixture
def written(tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    def write(config: dict[str, Any], change: Callable[[Tensors], object] = lambda tensors: None) -> pathlib.Path:
        tensors = random_head(config)
        change(tensors)
        return write_head(tmp_path / "head", config, tensors)

    return write


def refusal(path: pathlib.Path) -> str:
    with pytest.raises(InvalidModelFolder) as refused:
        Eagle3Folder.open(path)
    return str(refused.value)


def test_a_head_is_read_with_its_targets_ids(written: Callable[..., pathlib.Path]) -> None:
    opened = Eagle3Folder.open(written(config()))
    tensors = random_head(config())
    assert list(opened.target_ids) == tensors["t2d"].nonzero()[:, 0].tolist()
    assert (opened.head.vocab_size, opened.head.draft_vocab_size, opened.has_embedding) == (50, 20, False)
    assert opened.head.fusion.inputs == 48 and opened.head.layers_of(8) == (2, 4, 5)
    assert "layers.0.self_attn.q_proj.weight" in opened.tensors


def test_layers_are_counted_as_each_form_counts_them(written: Callable[..., pathlib.Path]) -> None:
    """By default 2, L / 2 and L - 3; in `eagle_config` by the streams that leave them."""
    plain = config()
    del plain["eagle_aux_hidden_state_layer_ids"]
    for own, expected in (({}, (2, 16, 29)), ({"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, (2, 16, 29))):
        path = written(config())
        (path / "config.json").write_text(json.dumps(plain | {"eagle_config": own}))
        assert Eagle3Folder.open(path).head.layers_of(32) == expected
        (path / "config.json").unlink()
        (path / "model.safetensors").unlink()
        path.rmdir()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "architectures of an EAGLE-3 head name one of LlamaForCausalLMEagle3",
        ),
        ({"num_hidden_layers": 2}, "num_hidden_layers of an EAGLE-3 head must be 1, is 2"),
        ({"draft_vocab_size": 51}, "draft_vocab_size must be an integer from 1 to 50, is 51"),
        ({"eagle_aux_hidden_state_layer_ids": [1] * 17}, "must be a list of 1 to 16 layers, is a list of 17 entries"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, "must be a list of 1 to 16 layers, is '2'"),
        ({"eagle_aux_hidden_state_layer_ids": [1, -1, 2]}, "1 must be an integer from 0 to 1024, is -1"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "'fc.weight' has shape [16, 48], [16, 32] expected"),
        ({"eagle_config": 3}, "eagle_config must be an object, is 3"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "a head that fuses no streams is not read"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is not read for an EAGLE-3 head"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', is 'gelu'"),
        ({"transformer_layer_config": []}, "transformer_layer_config must be an object, is a list"),
        (
            {"transformer_layer_config": {"model_type": "deepseek_v3"}},
            "transformer_layer_config must have model_type llama or qwen3, has 'deepseek_v3'",
        ),
        ({"norm_before_fc": True}, "tensor 'input_norm.weight' is missing"),
        ({"fc_norm": True}, "tensor 'fc_norm.0.weight' is missing"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm is true, and so is norm_before_fc"),
        ({"norm_output": "yes"}, "norm_output must be true or false, is 'yes'"),
        (
            {"norm_output": True, "eagle_config": {"norm_output": False}},
            "norm_output is not the same in eagle_config and beside it",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types must be a list of num_hidden_layers (1)",
        ),
        ({"layer_types": ["sliding_attention"], "sliding_window": 0}, "sliding_window must be an integer from 1"),
        ({"target_hidden_size": 32}, "'fc.weight' has shape [16, 48], [16, 96] expected"),
        ({"hidden_size": 0}, "hidden_size must be an integer from 1 to"),
    ],
)
def test_a_config_that_is_no_heads_is_refused(
    written: Callable[..., pathlib.Path], changes: dict[str, Any], said: str
) -> None:
    path = written(config())
    (path / "config.json").write_text(json.dumps(config() | changes))
    assert said in refusal(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("midlayer.hidden_norm.weight"), "'layers.0.hidden_norm.weight' is missing"),
        (lambda tensors: tensors.pop("lm_head.weight"), "'lm_head.weight' is missing"),
        (lambda tensors: tensors.update({"fc.bias": torch.zeros(16)}), "'fc.bias' is surplus"),
        (lambda tensors: tensors.update({"input_norm.weight": torch.zeros(48)}), "'input_norm.weight' is surplus"),
        (lambda tensors: tensors.update({"layers.0.hidden_norm.weight": torch.ones(16)}), "is there under two names"),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(8)}), "has shape [8], [16] expected"),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(16, dtype=torch.int32)}), "has dtype I32"),
        (lambda tensors: tensors.pop("d2t"), "tensor 'd2t' is missing: draft_vocab_size is 20 and vocab_size is 50"),
        (lambda tensors: tensors["d2t"].__setitem__(19, 31), "makes token 19 of the head token 50 of the model"),
        (lambda tensors: tensors["d2t"].__setitem__(0, -1), "makes token 0 of the head token -1 of the model"),
        (
            lambda tensors: tensors["d2t"].__setitem__(1, tensors["d2t"][0] - 1),
            "makes two tokens of the head the same one",
        ),
    ],
)
def test_tensors_that_make_no_head_are_refused(
    written: Callable[..., pathlib.Path], change: Callable[[Tensors], object], said: str
) -> None:
    assert said in refusal(written(config(), change))


def test_a_folder_that_is_none_is_refused(tmp_path: pathlib.Path) -> None:
    assert refusal(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such folder"
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file").endswith("is not a folder")
    (tmp_path / "empty").mkdir()
    assert "config.json" in refusal(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text(json.dumps(config()))
    assert "weights are read from safetensors only" in refusal(tmp_path / "empty")
    assert Eagle3Folder.open(tmp_path / "empty", require_weights=False).target_ids == tuple(range(20))


def test_a_whole_vocabulary_needs_no_map(written: Callable[..., pathlib.Path]) -> None:
    whole = head_config(TARGET, 50, (2, 4, 5))
    del whole["draft_vocab_size"]
    path = written(whole | {"draft_vocab_size": 50}, lambda tensors: (tensors.pop("d2t"), tensors.pop("t2d")))
    (path / "config.json").write_text(json.dumps(whole))
    assert Eagle3Folder.open(path).target_ids == tuple(range(50))


def test_a_head_without_an_output_layer_has_its_targets_whole_vocabulary_and_embedding(
    written: Callable[..., pathlib.Path],
) -> None:
    """With an embedding of its own, or of a part of the vocabulary, it needs one of its own."""
    whole = head_config(TARGET, 50, (2, 4, 5))

    def change(tensors: Tensors) -> None:
        for name in ("d2t", "t2d", "lm_head.weight"):
            del tensors[name]

    path = written(whole, change)
    opened = Eagle3Folder.open(path)
    assert (opened.has_output_layer, opened.has_embedding) == (False, False)
    write_head(path.parent / "own", whole, random_head(whole) | {"embed_tokens.weight": torch.zeros(50, 16)})
    assert Eagle3Folder.open(path.parent / "own").has_output_layer
    own = random_head(whole) | {"embed_tokens.weight": torch.zeros(50, 16)}
    del own["lm_head.weight"]
    assert "'lm_head.weight' is missing" in refusal(write_head(path.parent / "half", whole, own))
