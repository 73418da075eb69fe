"""What config.json of a dense family says of its layers, and what is refused by name."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from tests.model_folder.folders import CONFIG, header_of, write_safetensors

from headrace_backend.config import EngineConfig
from headrace_backend.pp_rules import unsuitable_pp
from headrace_model_folder import InvalidModelFolder, ModelFolder, expected_tensors
from headrace_model_folder.config import parse_config
from headrace_model_folder.description import Mlp, ModelDescription


def describe(architecture: str, **changes: Any) -> ModelDescription:
    return parse_config({**CONFIG, "architectures": [architecture], "num_hidden_layers": 4, **changes}).description


def rope_types(model: ModelDescription) -> list[str]:
    return [layer.attention.rope.rope_type for layer in model.layers]


def windows(model: ModelDescription) -> list[int | None]:
    return [layer.attention.window for layer in model.layers]


def test_smollm3_rotates_where_its_list_or_interval_says() -> None:
    by_default = describe("SmolLM3ForCausalLM")
    assert rope_types(by_default) == ["default", "default", "default", "none"]
    assert by_default.rope.theta == 2_000_000.0 and by_default.head.tied
    assert rope_types(describe("SmolLM3ForCausalLM", no_rope_layer_interval=2)) == ["default", "none"] * 2
    # A list may have entries for more layers than the model has.
    listed = describe("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 0, 1], rope_theta=5e6)
    assert rope_types(listed) == ["none", "default", "default", "none"]
    assert (listed.rope.theta, len(listed.rotations)) == (5e6, 2)


def test_smollm3_has_windows_only_where_its_config_says() -> None:
    window = {"sliding_window": 8, "no_rope_layers": [1, 0, 1, 0]}
    assert windows(describe("SmolLM3ForCausalLM", **window)) == [None] * 4
    assert windows(describe("SmolLM3ForCausalLM", **window, use_sliding_window=True)) == [None, 8, None, 8]
    types = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    stated = describe("SmolLM3ForCausalLM", **window, use_sliding_window=True, layer_types=types)
    assert windows(stated) == [8, None, None, None]


def test_olmo_norms_outputs_and_whole_projections() -> None:
    layer = describe("Olmo2ForCausalLM").layers[1]
    assert layer.attention_norm is None and layer.mlp_norm is None and not layer.is_plain
    assert [(norm.name, norm.size, norm.eps) for norm in (*layer.norms, *layer.attention.norms)] == [
        ("model.layers.1.post_attention_layernorm", 16, 1e-5),
        ("model.layers.1.post_feedforward_layernorm", 16, 1e-5),
        ("model.layers.1.self_attn.q_norm", 16, 1e-5),
        ("model.layers.1.self_attn.k_norm", 8, 1e-5),
    ]


def test_glm4_has_norms_on_both_sides_and_turns_neighbours_in_half_a_head() -> None:
    model = describe("Glm4ForCausalLM", head_dim=16)
    layer = model.layers[0]
    names = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    assert [norm.name for norm in layer.norms] == [f"model.layers.0.{name}" for name in names]
    assert (layer.attention.rotary_dim, layer.attention.interleaved, layer.is_plain) == (8, True, False)
    assert [linear.bias for linear in layer.attention.linears] == [True, True, True, False]
    stored = list(model.stored_tensors())
    assert "model.layers.0.mlp.gate_up_proj.weight" in stored and "model.layers.0.mlp.up_proj.weight" not in stored


GEMMA = {"head_dim": 8, "sliding_window": 8, "eos_token_id": 1}


def test_gemma3_has_raised_norms_on_both_sides_gelu_scaled_embeddings_and_a_stated_scale() -> None:
    model = describe("Gemma3ForCausalLM", **GEMMA, query_pre_attn_scalar=64)
    layer = model.layers[0]
    names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    assert [norm.name for norm in layer.norms] == [f"model.layers.0.{name}_layernorm" for name in names]
    assert all(norm.adds_one for norm in (*layer.norms, *layer.attention.norms, model.norm))
    assert isinstance(layer.mlp, Mlp) and layer.mlp.activation == "gelu_tanh" and not layer.is_plain
    assert (model.embedding.scale, layer.attention.scale, model.head.tied) == (4.0, 0.125, True)


def test_gemma3_has_a_window_and_a_base_of_their_own_in_most_layers() -> None:
    model = describe(
        "Gemma3ForCausalLM", **GEMMA, sliding_window_pattern=2, rope_scaling={"type": "linear", "factor": 8}
    )
    assert windows(model) == [8, None] * 2
    assert [layer.attention.rope.theta for layer in model.layers] == [10_000.0, 1_000_000.0] * 2
    assert [layer.attention.rope.factor for layer in model.layers] == [1.0, 8.0] * 2
    types = ["full_attention"] + ["sliding_attention"] * 3
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
    stated = describe("Gemma3ForCausalLM", **GEMMA, layer_types=types, rope_parameters=ropes)
    assert [layer.attention.rope.theta for layer in stated.layers] == [1_000_000.0, 300.0, 300.0, 300.0]


OUTER = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 3], "torch_dtype": "bfloat16"}
TEXT = {key: value for key, value in CONFIG.items() if key not in (*OUTER, "torch_dtype")}


def test_the_text_part_of_a_model_that_sees_is_read_and_the_rest_left_out(tmp_path: pathlib.Path) -> None:
    config = {**OUTER, "text_config": {**TEXT, **GEMMA}, "vision_config": {"hidden_size": 4}}
    parsed = parse_config(config)
    assert (parsed.eos_token_ids, parsed.torch_dtype) == ((1, 3), "bfloat16")
    expected = expected_tensors(parsed)
    for outer in ("language_model.model.", "model.language_model."):
        folder = tmp_path / outer
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        named = {outer + name.removeprefix("model."): shape for name, shape in expected.items()}
        header, size = header_of({**named, "vision_tower.embed.weight": (3,), "multi_modal_projector.weight": (5,)})
        write_safetensors(folder / "model.safetensors", header, size)
        assert ModelFolder.open(folder).tensors.keys() == expected.keys()
        header, size = header_of({**named, "audio_tower.embed.weight": (3,)})
        write_safetensors(folder / "model.safetensors", header, size)
        with pytest.raises(InvalidModelFolder, match="'audio_tower.embed.weight' is surplus"):
            ModelFolder.open(folder)
        header, size = header_of({**named, "model.norm.weight": (16,)})
        write_safetensors(folder / "model.safetensors", header, size)
        with pytest.raises(InvalidModelFolder, match="there twice"):
            ModelFolder.open(folder)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500_000.0, "rope_scaling": YARN},
        {"rope_scaling": YARN},
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}},
        {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 500_000.0}}},
    ],
)
def test_olmo3_stretches_the_context_of_layers_without_a_window(rope: dict[str, Any]) -> None:
    config = parse_config({**CONFIG, "architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 4, **rope})
    assert rope_types(config.description) == ["default"] * 3 + ["yarn"]
    assert windows(config.description) == [4096] * 3 + [None]
    assert {layer.attention.rope.theta for layer in config.description.layers} == {500_000.0}
    assert config.max_position_embeddings == 512


def test_a_quantization_of_a_text_part_may_not_be_nested_beyond_reading() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    config = {**OUTER, "text_config": {**TEXT, **GEMMA}, "quantization_config": {"ignore": nested}}
    with pytest.raises(InvalidModelFolder, match="quantization_config is nested too deeply"):
        parse_config(config)


@pytest.mark.parametrize(
    ("architecture", "changes", "field"),
    [
        ("Gemma3ForCausalLM", {**GEMMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("Gemma3ForCausalLM", {**GEMMA, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("Gemma3ForCausalLM", {**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3ForCausalLM", {**GEMMA, "hidden_activation": "gelu"}, "hidden_activation"),
        ("Gemma3ForCausalLM", {**GEMMA, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("Gemma3ForConditionalGeneration", GEMMA, "text_config must be an object"),
        ("Gemma3ForConditionalGeneration", {"text_config": [1]}, "text_config must be an object"),
        ("Olmo3ForCausalLM", {"rope_parameters": {"chunked_attention": {}}}, "rope_parameters"),
        ("Olmo3ForCausalLM", {"rope_parameters": {"full_attention": {}, "sliding_attention": 3}}, "rope_parameters"),
        ("Olmo3ForCausalLM", {"rope_parameters": {"full_attention": {"rope_type": "odd"}}}, "rope_type"),
        ("Olmo3ForCausalLM", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("Olmo3ForCausalLM", {"rope_parameters": {"rope_type": "default"}}, "an object for each kind of layer"),
        ("Gemma3ForCausalLM", {**GEMMA, "rope_parameters": {"rope_theta": 1e4}}, "an object for each kind of layer"),
        ("Olmo2ForCausalLM", {"rope_parameters": {"full_attention": {}}}, "rope_parameters"),
        ("Ministral3ForCausalLM", {"rope_scaling": None}, "rope_scaling must be an object, or absent"),
        ("GptOssForCausalLM", {"rope_scaling": None}, "rope_scaling must be an object, or absent"),
        ("SmolLM3ForCausalLM", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 21}, "layer_types must be"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1, 2]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": "1010"}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ("SmolLM3ForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ],
)
def test_what_a_family_cannot_do_is_refused_by_name(architecture: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidModelFolder, match=field):
        describe(architecture, **changes)


GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "sliding_window": 8,
    "eos_token_id": 1,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def test_gemma4_has_heads_of_two_sizes_normed_values_and_numbers_of_the_stream() -> None:
    model = describe("Gemma4ForCausalLM", **GEMMA4, attention_k_eq_v=True, final_logit_softcapping=30.0)
    sliding, full = (layer.kv_attention for layer in model.layers[:2])
    assert (sliding.head_dim, full.head_dim, full.num_kv_heads, full.window) == (8, 16, 1, None)
    assert sliding.value is not None and full.value is None and full.value_norm_eps == 1e-6
    assert (full.scale, model.head.softcap, model.has_one_geometry) == (1.0, 30.0, False)
    assert (full.rope.rope_type, full.rope.proportion, sliding.rope.rope_type) == ("proportional", 0.25, "default")
    assert "model.layers.3.layer_scalar" in model.stored_tensors()
    assert not any(norm.adds_one for norm in model.layers[0].norms)


def test_gemma4s_last_layers_read_keys_of_the_last_layer_of_their_kind() -> None:
    model = describe("Gemma4ForCausalLM", **GEMMA4, num_kv_shared_layers=2, use_double_wide_mlp=True)
    assert [attention.kv_source for attention in model.attentions] == [None, None, "model.layers.0", "model.layers.1"]
    assert (model.kv_sources, len(model.kv_attentions)) == ((0, 1, 0, 1), 2)
    assert [layer.mlp.inner for layer in model.layers] == [24, 24, 48, 48]
    # Folders may have the tensors that nobody reads.
    assert "model.layers.2.self_attn.k_proj" in model.unused
    with pytest.raises(InvalidModelFolder, match="num_kv_shared_layers must leave a layer of 'sliding_attention'"):
        types = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
        describe("Gemma4ForCausalLM", **GEMMA4 | {"layer_types": types}, num_kv_shared_layers=2)


def test_gemma4s_inputs_by_layer_are_of_the_whole_vocabulary() -> None:
    vocab_size = CONFIG["vocab_size"]
    changes = {**GEMMA4, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": vocab_size}
    shapes = describe("Gemma4ForCausalLM", **changes).stored_tensors()
    assert shapes["model.embed_tokens_per_layer.weight"] == (vocab_size, 4 * 4)
    assert shapes["model.layers.1.per_layer_input_gate.weight"] == (4, CONFIG["hidden_size"])
    with pytest.raises(InvalidModelFolder, match="vocab_size_per_layer_input must be vocab_size"):
        describe("Gemma4ForCausalLM", **changes | {"vocab_size_per_layer_input": vocab_size - 1})


@pytest.mark.parametrize(
    "changes", [{"num_kv_shared_layers": 2}, {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64}]
)
def test_what_one_layer_of_gemma4_hands_another_keeps_them_in_one_stage(changes: dict[str, Any]) -> None:
    values = {**CONFIG, **GEMMA4, "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 4}
    in_two = EngineConfig(model=pathlib.Path("model"), pp=2)
    refused = unsuitable_pp(in_two, parse_config({**values, **changes, "vocab_size": 64}))
    assert refused is not None and refused.endswith("(Gemma4ForCausalLM), which stages do not hand on: pp 1 works")
    assert unsuitable_pp(in_two, parse_config(values)) is None


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be 'vision' or null"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types must end with 'full_attention'"),
        ({"per_layer_config": [1]}, "per_layer_config must be an object"),
        ({"per_layer_config": {"1": {"hidden_size": 9}}}, "per_layer_config must state head_dim and"),
        ({"per_layer_config": {"1": {"head_dim": 7}}}, "per_layer_config 1: head_dim must be even, is 7"),
        ({"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "num_key_value_heads must divide"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers must be an integer from 0 to 3"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping must be a number"),
        ({"rope_parameters": {"full_attention": {"rope_type": "spiral"}}}, "rope_type must be one of"),
        ({"rope_parameters": {"vision": {"rope_theta": 1.0}}}, "rope_parameters must be of"),
    ],
)
def test_what_gemma4_does_not_compute_is_refused_by_field(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(InvalidModelFolder, match=rule):
        describe("Gemma4ForCausalLM", **GEMMA4 | changes)


def test_seed_oss_has_biases_where_its_fields_say_so() -> None:
    attention = describe("SeedOssForCausalLM").layers[0].kv_attention
    assert [linear.bias for linear in attention.linears] == [True, True, True, False]
    attention = describe("SeedOssForCausalLM", attention_bias=False, attention_out_bias=True).layers[0].kv_attention
    assert [linear.bias for linear in attention.linears] == [False, False, False, True]
    assert attention.head_dim == 128


def test_layers_of_exaone4_rotate_where_they_have_the_window() -> None:
    model = describe("Exaone4ForCausalLM", sliding_window=9)
    assert windows(model) == [9, 9, 9, None] and rope_types(model) == ["default"] * 3 + ["none"]
    # Letters, the last layer sees everything whatever they say.
    model = describe("Exaone4ForCausalLM", sliding_window=9, sliding_window_pattern="LG", num_hidden_layers=3)
    assert windows(model) == [9, None, None] and rope_types(model) == ["default", "none", "none"]
    model = describe("Exaone4ForCausalLM", sliding_window=None, sliding_window_pattern="LLLG")
    assert windows(model) == [None] * 4 and rope_types(model) == ["default"] * 4
    for pattern in ("", "LLX", 0, [4]):
        with pytest.raises(InvalidModelFolder, match="sliding_window_pattern must be"):
            describe("Exaone4ForCausalLM", sliding_window=9, sliding_window_pattern=pattern)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_context_of_ministral3_ends_where_queries_would_be_scaled(key: str) -> None:
    values = {**CONFIG, "architectures": ["Ministral3ForCausalLM"], "max_position_embeddings": 160}
    assert parse_config(values | {key: YARN | {"llama_4_scaling_beta": 0.1}}).max_position_embeddings == 40
    assert parse_config(values | {key: YARN | {"llama_4_scaling_beta": 0}}).max_position_embeddings == 160
    assert parse_config(values | {key: YARN}).max_position_embeddings == 160
    # As published: all of it is the default.
    assert parse_config(values).max_position_embeddings == 16_384
    with pytest.raises(InvalidModelFolder, match="llama_4_scaling_beta must be a number"):
        parse_config(values | {key: YARN | {"llama_4_scaling_beta": "much"}})
    with pytest.raises(InvalidModelFolder, match="'llama_4_scaling_beta' is not known"):
        parse_config({**CONFIG, key: YARN | {"llama_4_scaling_beta": 0.1}})


def test_the_text_part_of_mistral3_is_one_of_two() -> None:
    text = {name: value for name, value in CONFIG.items() if name != "architectures"} | {"rope_theta": 500.0}
    values = {"architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {}}

    def parsed(**own: Any) -> Any:
        return parse_config({**values, "text_config": {**text, **own}})

    assert windows(parsed().description) == windows(parsed(model_type="mistral").description) == [4096, 4096]
    assert windows(parsed(model_type="ministral3").description) == [None, None]
    with pytest.raises(InvalidModelFolder, match=r"text_config.model_type must be 'mistral' or 'ministral3', is 'gpt'"):
        parsed(model_type="gpt")
