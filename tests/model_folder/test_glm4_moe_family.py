"""GLM-4.5: which layers are dense, how experts are chosen, tensors that are not used, refusals."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from tests.model_folder.folders import CONFIG, header_of, write_folder, write_safetensors

from headrace_backend.config import EngineConfig
from headrace_backend.quantize_rules import unsuitable_quantization
from headrace_backend.tp_rules import rank_part, unsuitable_tp
from headrace_model_folder import InvalidModelFolder, ModelFolder, expected_tensors
from headrace_model_folder.config import parse_config
from headrace_model_folder.description import Experts, Mlp, SigmoidScores

GLM = CONFIG | {
    "architectures": ["Glm4MoeForCausalLM"],
    "head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}


def changed(**changes: Any) -> dict[str, Any]:
    return GLM | changes


def mixture(**changes: Any) -> Experts:
    mlp = parse_config(changed(**changes)).description.layers[-1].mlp
    assert isinstance(mlp, Experts)
    return mlp


def test_the_first_layers_are_dense() -> None:
    layers = parse_config(changed(num_hidden_layers=4, first_k_dense_replace=3)).description.layers
    assert [isinstance(layer.mlp, Mlp) for layer in layers] == [True, True, True, False]


def test_absent_fields_take_transformers_defaults() -> None:
    config = {name: value for name, value in GLM.items() if name not in ("moe_intermediate_size", "n_routed_experts")}
    model = parse_config(config | {"num_experts_per_tok": 8}).description
    found = model.layers[-1].mlp
    assert isinstance(found, Experts) and found.shared is not None
    assert (len(found.experts), found.inner, found.shared.mlp.inner, found.renormalized) == (128, 1408, 1408, True)
    assert found.scores == SigmoidScores("model.layers.1.mlp.gate.e_score_correction_bias", 128, 1, 1, 1.0)
    assert (model.attention.rotary_dim, model.norm.eps) == (4, 1e-5)


def test_tensors_have_the_names_of_published_folders() -> None:
    tensors = expected_tensors(parse_config(changed(attention_bias=True, use_qk_norm=True)))
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"] == (8,)
    assert tensors["model.layers.1.mlp.shared_experts.down_proj.weight"] == (16, 12)
    assert tensors["model.layers.1.mlp.experts.7.gate_proj.weight"] == (12, 16)
    assert tensors["model.layers.0.self_attn.q_norm.weight"] == (8,)
    assert "model.layers.0.self_attn.o_proj.bias" not in tensors


def written(path: pathlib.Path, config: dict[str, Any], **more: tuple[int, ...]) -> ModelFolder:
    write_folder(path, config)
    shapes = expected_tensors(parse_config(config)) | {name.replace("__", "."): shape for name, shape in more.items()}
    header, size = header_of(shapes)
    write_safetensors(path / "model.safetensors", header, size)
    return ModelFolder.open(path)


def test_layers_that_predict_several_tokens_are_left_out_and_others_are_surplus(tmp_path: pathlib.Path) -> None:
    behind: dict[str, tuple[int, ...]] = {"model__layers__2__eh_proj__weight": (16, 32)}
    folder = written(tmp_path, GLM, **behind)
    assert folder.parameter_count == written(tmp_path, GLM).parameter_count
    for config, name in (
        (changed(num_nextn_predict_layers=0), behind),
        (GLM, {"model__layers__3__enorm__weight": (16,)}),
    ):
        with pytest.raises(InvalidModelFolder, match="is surplus"):
            written(tmp_path, config, **name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_routed_experts", 0),
        ("n_routed_experts", 2000),
        ("num_experts_per_tok", 9),
        ("n_group", 3),
        # Groups of one have no two best.
        ("n_group", 8),
        ("topk_group", 2),
        ("n_shared_experts", 0),
        ("first_k_dense_replace", -1),
        ("routed_scaling_factor", 0),
        ("routed_scaling_factor", "2"),
        ("norm_topk_prob", 1),
        ("use_qk_norm", "yes"),
        ("num_nextn_predict_layers", 17),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("moe_layer_freq", 2),
    ],
)
def test_a_bad_value_is_refused_by_field_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidModelFolder) as error:
        parse_config(changed(**{field: value}))
    assert field in str(error.value) and "\n" not in str(error.value)


def test_more_experts_than_the_best_groups_have_are_refused() -> None:
    assert mixture(n_group=4, topk_group=2, num_experts_per_tok=4).per_token == 4
    with pytest.raises(InvalidModelFolder, match="num_experts_per_tok must be at most the 4 experts of topk_group"):
        parse_config(changed(n_group=4, topk_group=2, num_experts_per_tok=5))


def engine(**settings: Any) -> EngineConfig:
    return EngineConfig(model=pathlib.Path("m"), device="cpu", **settings)


def test_ranks_share_the_shared_expert_whatever_they_do_with_the_others() -> None:
    for whole, (experts, inner) in {False: (8, 6), True: (4, 12)}.items():
        part = rank_part(parse_config(GLM).description, 2, whole).layers[1].mlp
        assert isinstance(part, Experts) and part.shared is not None
        assert (len(part.experts), part.inner, part.shared.mlp.inner) == (experts, inner, 6)
    odd = parse_config(changed(moe_intermediate_size=13))
    reason = unsuitable_tp(engine(tp=2, expert_parallel=True), odd)
    assert reason is not None and "does not divide the inner size of shared experts 13" in reason


def test_groups_must_divide_the_shared_expert_s_part_too() -> None:
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 32}
    model = parse_config(changed(**sizes, n_shared_experts=3))
    together = engine(tp=2, expert_parallel=True, quantize="int4", quantize_group=32)
    assert unsuitable_quantization(together, model) is None
    reason = unsuitable_tp(together, model)
    assert reason is not None and "48 of down_proj's 96 inputs, and quantize_group 32 does not divide those" in reason
