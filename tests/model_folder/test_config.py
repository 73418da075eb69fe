"""config.json: families' defaults, both spellings of the rotary embedding.

Values that must be refused by name.
"""

import dataclasses
import json
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies
from tests.model_folder.folders import CONFIG
from tests.support.examples import examples

from headrace_model_folder import InvalidModelFolder
from headrace_model_folder.bounded_files import parse_json_object
from headrace_model_folder.config import ModelConfig, parse_config
from headrace_model_folder.families.registry import FAMILIES


def config(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**CONFIG, **changes}.items() if value != "absent"}


def windows(parsed: ModelConfig) -> tuple[int | None, ...]:
    return tuple(layer.attention.window for layer in parsed.description.layers)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["GemmaForCausalLM"]),
        ("architectures", None),
        ("architectures", []),
        ("num_attention_heads", 0),
        ("num_attention_heads", -4),
        ("num_attention_heads", True),
        ("num_attention_heads", "4"),
        ("num_attention_heads", float("inf")),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", "absent"),
        ("num_key_value_heads", 3),
        ("hidden_size", 18),
        ("hidden_size", 2**62),
        ("head_dim", 5),
        ("vocab_size", 0),
        ("vocab_size", 10**100),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("tie_word_embeddings", "yes"),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("eos_token_id", 32),
        ("eos_token_id", [1, -1]),
        ("bos_token_id", "x"),
        ("torch_dtype", "int8"),
        ("rope_scaling", [1]),
    ],
)
def test_a_bad_value_is_refused_by_field_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidModelFolder) as error:
        parse_config(config(**{field: value}))
    assert field in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({"rope_type": "longropes", "factor": 2.0}, "rope_type"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 2}, "short_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 2}, "short_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [1.0, 0.0]}, "long_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": ["1"] * 2}, "long_factor"),
        ({"type": "linear"}, "factor"),
        ({"type": "linear", "factor": 0.0}, "factor"),
        ({"rope_type": "yarn", "factor": float("nan")}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta"),
        ({"full_attention": {"rope_type": "default"}}, "per layer type"),
        ({"rope_type": "dynamic", "alpha": 1000.0}, "'alpha' is not known"),
        ({"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}, "'llama_4_scaling_beta' is not known"),
        ({"rope_type": "yarn", "factor": 4.0, "extrapolation_factor": 0.5}, "'extrapolation_factor' is not known"),
    ],
)
def test_a_bad_rotary_parameter_is_refused_by_name(rope: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidModelFolder, match=field):
        parse_config(config(rope_scaling=rope))


@pytest.mark.parametrize(
    ("stated", "place"),
    [
        ({"rope_theta": -1.0}, ""),
        ({"rope_theta": -1.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, ""),
        ({"rope_theta": -1.0, "rope_parameters": {"rope_type": "default"}}, ""),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": -1.0}}, "rope_parameters: "),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": -1.0}}, "rope_scaling: "),
    ],
)
def test_a_bad_base_is_named_where_the_file_states_it(stated: dict[str, Any], place: str) -> None:
    with pytest.raises(
        InvalidModelFolder, match=rf"^config\.json: {place}rope_theta must be a number from 1 to 1e\+12"
    ):
        parse_config(config(**stated))


def test_what_stands_beside_the_rotary_object_is_named_so() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for fields, message in (
        ({"rope_theta": 1.0}, r"rope_theta must be above 1 for yarn"),
        ({"original_max_position_embeddings": 0}, r"original_max_position_embeddings must be an integer"),
        ({"partial_rotary_factor": "half"}, r"partial_rotary_factor must be a number"),
    ):
        with pytest.raises(InvalidModelFolder, match=rf"^config\.json: {message}"):
            parse_config(config(rope_scaling=yarn, **fields))
        with pytest.raises(InvalidModelFolder, match=rf"^config\.json: rope_parameters: {message}"):
            parse_config(config(rope_parameters=yarn | fields))


def test_both_spellings_of_the_rotary_embedding_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = parse_config(config(rope_theta=500_000.0, rope_scaling={"type": "llama3", **scaling}))
    new = parse_config(config(rope_parameters={"rope_type": "llama3", "rope_theta": 500_000.0, **scaling}))
    assert old == new
    assert old.description.rope.theta == 500_000.0 and old.description.rope.rope_type == "llama3"


def test_a_rotary_embedding_that_is_stated_twice_must_be_one() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    both = {"rope_scaling": yarn, "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **yarn}}
    assert parse_config(config(**both)).description.rope.theta == 500.0
    with pytest.raises(InvalidModelFolder, match="must say what rope_parameters says, differs in 'factor'"):
        parse_config(config(**{**both, "rope_scaling": {**yarn, "factor": 2.0}}))
    for newer, older, differs in (
        ({"rope_theta": 1e4}, {"type": "linear", "factor": 4.0}, "rope_type"),
        ({}, {"type": "linear", "factor": 4.0}, "rope_type"),
        ({**yarn, "attention_factor": 2.0}, yarn, "attention_factor"),
        (yarn, {**yarn, "attention_factor": 2.0}, "attention_factor"),
        ({"full_attention": {"rope_theta": 1e4}}, {"type": "linear", "factor": 8.0}, "rope_type"),
        (yarn, {**yarn, "rope_theta": 500.0}, "rope_theta"),
    ):
        with pytest.raises(InvalidModelFolder, match=f"must say what rope_parameters says, differs in '{differs}'"):
            parse_config(config(rope_parameters=newer, rope_scaling=older))
    # What changes nothing may differ.
    alike = {"rope_parameters": {"rope_theta": 500.0, "mrope_section": [1]}, "rope_scaling": {"type": "default"}}
    assert parse_config(config(**alike)).description.rope.theta == 500.0
    with pytest.raises(InvalidModelFolder, match=r"original_max_position_embeddings must be that beside it \(64\)"):
        parse_config(config(rope_scaling=yarn, original_max_position_embeddings=64))


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["LlamaForCausalLM", "MistralForCausalLM"], r"\['LlamaForCausalLM', 'MistralForCausalLM'\]"),
        ("LlamaForCausalLM", "'LlamaForCausalLM'"),
        (["LlamaForCausalLM"] * 9, "a list of 9 entries"),
        ([], r"\[\]"),
    ],
)
def test_architectures_must_be_one_name(names: object, found: str) -> None:
    with pytest.raises(InvalidModelFolder, match=f"architectures must be a list of exactly one name, is {found}$"):
        parse_config(config(architectures=names))


def test_yarn_stretches_the_usable_context_and_others_do_not() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert parse_config(config(rope_scaling=yarn)).max_position_embeddings == 512
    extended = {**yarn, "original_max_position_embeddings": 32}
    assert parse_config(config(rope_scaling=extended)).max_position_embeddings == 128
    assert parse_config(config(rope_scaling={"type": "linear", "factor": 4.0})).max_position_embeddings == 128


def test_absent_fields_take_the_familys_defaults() -> None:
    mistral = config(
        architectures=["MistralForCausalLM"],
        num_attention_heads=8,
        num_key_value_heads="absent",
        max_position_embeddings="absent",
    )
    parsed = parse_config(mistral)
    attention = parsed.description.attention
    assert (attention.num_kv_heads, attention.window, parsed.max_position_embeddings) == (8, 4096, 131_072)
    assert windows(parse_config({**mistral, "sliding_window": None})) == (None, None)
    llama = parse_config(config(num_key_value_heads="absent"))
    attention = llama.description.attention
    assert (attention.num_kv_heads, attention.head_dim, attention.window) == (4, 4, None)


def test_qwen_windows_follow_use_sliding_window_and_layer_types() -> None:
    qwen = config(architectures=["Qwen2ForCausalLM"], sliding_window=8, max_window_layers=1)
    assert windows(parse_config(qwen)) == (None, None)
    assert windows(parse_config({**qwen, "use_sliding_window": True})) == (None, 8)
    types = ["sliding_attention", "full_attention"]
    assert windows(parse_config({**qwen, "use_sliding_window": True, "layer_types": types})) == (8, None)
    with pytest.raises(InvalidModelFolder, match="layer_types"):
        parse_config({**qwen, "use_sliding_window": True, "layer_types": ["chunked_attention", "full_attention"]})


def test_phi3_takes_its_context_window_and_rotation_from_its_own_fields() -> None:
    phi = config(architectures=["Phi3ForCausalLM"], head_dim=8, partial_rotary_factor=0.75, rms_norm_eps="absent")
    model = parse_config(phi).description
    assert (model.attention.rotary_dim, model.norm.eps) == (6, 1e-5)
    assert [linear.fused and (linear.fused.name, linear.fused.first) for linear in model.layers[1].mlp.linears] == [
        ("model.layers.1.mlp.gate_up_proj", 0),
        ("model.layers.1.mlp.gate_up_proj", 24),
        None,
    ]
    # A window as long as the context hides nothing.
    assert windows(parse_config({**phi, "sliding_window": 127})) == (127, 127)
    assert windows(parse_config({**phi, "sliding_window": 128})) == (None, None)
    factors = {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    for name in ("su", "yarn", "longrope"):
        rope = parse_config({**phi, "rope_scaling": {"type": name, **factors}}).description.rope
        assert (rope.rope_type, rope.original_max_position_embeddings) == ("longrope", 4096)


@pytest.mark.parametrize("factor", [0.0, 0.1, 0.4, 1.5])
def test_a_rotary_factor_must_leave_an_even_number_of_a_heads_elements(factor: float) -> None:
    with pytest.raises(InvalidModelFolder, match="partial_rotary_factor must"):
        parse_config(config(architectures=["Phi3ForCausalLM"], head_dim=8, partial_rotary_factor=factor))


@pytest.mark.parametrize("code", [{"AutoModelForCausalLM": "modeling_evil.Evil"}, "modeling_evil.Evil", [1]])
def test_code_of_the_folders_own_changes_nothing_but_is_mentioned(code: Any) -> None:
    parsed = parse_config(config(auto_map=code))
    assert parsed.names_own_code
    assert dataclasses.replace(parsed, names_own_code=False) == parse_config(config())
    with pytest.raises(
        InvalidModelFolder, match=r"'EvilForCausalLM'; code of the folder's own \(auto_map\) is never run"
    ):
        parse_config(config(auto_map=code, architectures=["EvilForCausalLM"]))


@pytest.mark.parametrize("code", [{}, None, "absent"])
def test_a_folder_without_code_of_its_own_is_not_said_to_have_some(code: Any) -> None:
    assert not parse_config(config(auto_map=code)).names_own_code
    with pytest.raises(InvalidModelFolder, match="'OtherForCausalLM'$"):
        parse_config(config(auto_map=code, architectures=["OtherForCausalLM"]))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": ' + b"[" * 200_000, "JSON"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "JSON"),
        (b"[]", "object"),
        (b"\xff\xfe{}", "JSON"),
        (b"", "JSON"),
    ],
)
def test_json_that_readers_could_disagree_on_is_refused(text: bytes, rule: str) -> None:
    with pytest.raises(InvalidModelFolder, match=rule):
        parse_json_object(text, "config.json")


_JSON = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats()
    | strategies.text(max_size=5),
    lambda inner: (
        strategies.lists(inner, max_size=3) | strategies.dictionaries(strategies.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
_KEYS = [
    *CONFIG,
    "head_dim",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "use_sliding_window",
    "dtype",
]


@hypothesis.settings(max_examples=examples(300), deadline=None)
@hypothesis.given(
    architecture=strategies.sampled_from(list(FAMILIES)),
    changes=strategies.dictionaries(strategies.sampled_from(_KEYS), _JSON, max_size=4),
)
def test_any_json_either_parses_or_is_refused_in_one_line(architecture: str, changes: dict[str, Any]) -> None:
    values = json.loads(json.dumps({**CONFIG, "architectures": [architecture], **changes}))
    try:
        parsed = parse_config(values)
    except InvalidModelFolder as error:
        assert "\n" not in str(error)
    else:
        assert len(windows(parsed)) == values["num_hidden_layers"]
        assert all(a.num_heads % a.num_kv_heads == 0 for a in (layer.attention for layer in parsed.description.layers))
