"""The layer of GLM-4.5 that predicts the token after the next: announced, there, and whole."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from tests.model_folder.folders import header_of, write_folder, write_safetensors
from tests.model_folder.test_glm4_moe_family import GLM, changed

from headrace_model_folder import InvalidModelFolder, ModelFolder, expected_tensors, open_mtp
from headrace_model_folder.config import parse_config
from headrace_model_folder.description import Experts, Mlp

LAYER = "model.layers.2."
COPIES = {f"{LAYER}embed_tokens.weight": (32, 16), f"{LAYER}shared_head.head.weight": (32, 16)}


def own_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    mtp = parse_config(config).mtp
    assert mtp is not None
    return {name: shape for name, shape in expected_tensors(mtp).items() if name.startswith(LAYER)}


def written(path: pathlib.Path, config: dict[str, Any], own: dict[str, tuple[int, ...]]) -> ModelFolder:
    """A folder with the model's tensors, and some of the layer's."""
    write_folder(path, config)
    header, size = header_of(expected_tensors(parse_config(config)) | own)
    write_safetensors(path / "model.safetensors", header, size)
    return ModelFolder.open(path)


def test_the_layer_has_the_names_of_published_folders() -> None:
    shapes = own_shapes(changed(attention_bias=True, use_qk_norm=True))
    assert shapes[f"{LAYER}eh_proj.weight"] == (16, 32)
    assert shapes[f"{LAYER}enorm.weight"] == shapes[f"{LAYER}hnorm.weight"] == (16,)
    assert shapes[f"{LAYER}shared_head.norm.weight"] == (16,)
    assert shapes[f"{LAYER}mlp.experts.7.gate_proj.weight"] == (12, 16)
    assert shapes[f"{LAYER}mlp.gate.e_score_correction_bias"] == (8,)
    assert shapes[f"{LAYER}self_attn.q_norm.weight"] == (8,)


def test_the_layer_has_experts_if_a_layer_at_its_place_would() -> None:
    kinds = {}
    for num_dense in (1, 2, 3):
        mtp = parse_config(changed(first_k_dense_replace=num_dense)).mtp
        assert mtp is not None
        kinds[num_dense] = type(mtp.description.layers[0].mlp)
    assert kinds == {1: Experts, 2: Experts, 3: Mlp}


@pytest.mark.parametrize("count", [0, 2])
def test_a_model_that_announces_none_or_several_has_none(count: int) -> None:
    assert parse_config(changed(num_nextn_predict_layers=count)).mtp is None


def test_a_folder_with_the_layer_opens_with_and_without_copies(tmp_path: pathlib.Path) -> None:
    for copies in ({}, COPIES):
        folder = written(tmp_path, GLM, own_shapes(GLM) | copies)
        layer = open_mtp(folder)
        assert layer.path == folder.path and layer.config == folder.config.mtp
        shared = {"model.embed_tokens.weight", "lm_head.weight"}
        assert layer.tensors.keys() == own_shapes(GLM).keys() | shared
        # What is served does not depend on it.
        assert folder.parameter_count == written(tmp_path, GLM, {}).parameter_count


def test_a_folder_that_only_announces_the_layer_is_refused_when_it_is_asked_for(tmp_path: pathlib.Path) -> None:
    for copies in ({}, COPIES):
        folder = written(tmp_path, GLM, copies)
        with pytest.raises(InvalidModelFolder) as error:
            open_mtp(folder)
        assert str(error.value) == (
            "config.json announces an MTP layer (num_nextn_predict_layers or mtp_num_hidden_layers is 1), and the "
            "folder has no tensors model.layers.2.*"
        )


def test_without_weights_nothing_is_asked_of_tensors(tmp_path: pathlib.Path) -> None:
    write_folder(tmp_path, GLM)
    assert open_mtp(ModelFolder.open(tmp_path, require_weights=False)).tensors == {}


def _missing(own: dict[str, tuple[int, ...]]) -> None:
    del own[f"{LAYER}hnorm.weight"]


def _misshapen(own: dict[str, tuple[int, ...]]) -> None:
    own[f"{LAYER}eh_proj.weight"] = (16, 16)


def _surplus(own: dict[str, tuple[int, ...]]) -> None:
    own[f"{LAYER}mlp.extra.weight"] = (16, 16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_missing, "tensor 'model.layers.2.hnorm.weight' is missing"),
        (_misshapen, "tensor 'model.layers.2.eh_proj.weight' has shape [16, 16], [16, 32] expected from config.json"),
        (_surplus, "tensor 'model.layers.2.mlp.extra.weight' is surplus"),
    ],
)
def test_a_layer_that_is_not_whole_is_refused_by_tensor(change: Any, said: str, tmp_path: pathlib.Path) -> None:
    own = own_shapes(GLM)
    change(own)
    with pytest.raises(InvalidModelFolder) as error:
        open_mtp(written(tmp_path, GLM, own))
    assert said in str(error.value) and "\n" not in str(error.value)
