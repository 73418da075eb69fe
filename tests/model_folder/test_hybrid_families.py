"""What config.json of a model with recurrent layers says, and what such a model cannot do yet."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
from typing import Any

import pytest
from tests.model_folder.folders import CONFIG, header_of, write_safetensors

from headrace_backend.config import EngineConfig
from headrace_backend.pp_rules import stages, unsuitable_pp
from headrace_backend.state_rules import reuses_prefixes, row_state_bytes, unsuitable_states
from headrace_backend.tp_rules import rank_part, unsuitable_tp
from headrace_kernels.recurrence.gated_delta import DeltaHeads
from headrace_kernels.recurrence.pending import line_elements
from headrace_model_folder import InvalidModelFolder, ModelFolder, expected_tensors, open_mtp
from headrace_model_folder.config import ModelConfig, parse_config
from headrace_model_folder.description import Attention, GatedDeltaNet

LINEAR = {
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
HYBRID = {**CONFIG, **LINEAR, "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4, "head_dim": 8}
KINDS = ["linear_attention"] * 3 + ["full_attention"]


def parsed(**changes: Any) -> ModelConfig:
    return parse_config({**HYBRID, **changes})


def engine(**values: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": pathlib.Path("model"), **values})


def test_three_of_four_layers_have_linear_attention_unless_the_file_says_otherwise() -> None:
    for changes, kinds in (
        ({}, KINDS),
        ({"full_attention_interval": 2}, ["linear_attention", "full_attention"] * 2),
        ({"layer_types": KINDS[::-1]}, KINDS[::-1]),
        ({"full_attention_interval": 1}, ["full_attention"] * 4),
    ):
        model = parsed(**changes).description
        linear = [isinstance(layer.attention, GatedDeltaNet) for layer in model.layers]
        assert linear == [kind == "linear_attention" for kind in kinds]
        assert len(model.attentions) + len(model.recurrent_layers) == 4
        assert model.attention is model.attentions[0] and not model.is_plain


def test_sizes_and_tensors_are_those_of_the_fields() -> None:
    model = parsed().description
    linear, full = model.layers[0].attention, model.layers[3].attention
    assert isinstance(linear, GatedDeltaNet) and isinstance(full, Attention)
    shapes = {name.removeprefix("model.layers.0.linear_attn."): shape for name, shape in linear.tensors()}
    assert shapes == {
        "in_proj_q.weight": (8, 16), "in_proj_k.weight": (8, 16), "in_proj_v.weight": (24, 16),
        "in_proj_z.weight": (24, 16), "in_proj_b.weight": (4, 16), "in_proj_a.weight": (4, 16),
        "out_proj.weight": (16, 24), "conv1d.weight": (40, 1, 4), "A_log": (4,),
        "dt_bias": (4,), "norm.weight": (6,),
    }  # fmt: skip
    # A matrix for each value head, and the inputs of the four tokens that the convolution sees.
    assert linear.state_elements == 4 * 4 * 6 + 4 * 40
    assert row_state_bytes(model) == 3 * 4 * linear.state_elements
    assert full.gated and full.query.outputs == 2 * full.num_heads * full.head_dim
    assert (full.rotary_dim, full.output.inputs) == (2, full.num_heads * full.head_dim)
    norms = [*full.norms, *model.layers[0].norms, model.norm]
    assert all(norm.adds_one and norm.rounds_once for norm in norms) and not linear.norm.adds_one


def test_what_sees_is_left_out_and_what_predicts_further_tokens_is_not_read(tmp_path: pathlib.Path) -> None:
    beside = {"mtp.fc.weight": (3, 5), "mtp.layers.0.self_attn.q_proj.weight": (7,)}
    # As published: positions of images have sections of their own, which those of text do not need.
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    text = {key: value for key, value in HYBRID.items() if key != "architectures"}
    text["rope_parameters"] = {**rope, "partial_rotary_factor": 0.5}
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {"depth": 1},
        "tie_word_embeddings": True,
    }  # fmt: skip
    described = parse_config(whole).description
    assert (described.attention.rotary_dim, described.rope.theta, described.head.tied) == (4, 1e7, True)
    for name, config, prefix, others in (
        ("text", HYBRID, "model.", beside),
        ("several", whole, "model.language_model.", {**beside, "model.visual.patch_embed.proj.weight": (2, 2)}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        expected = expected_tensors(parse_config(config))
        stored = parse_config(config).description.stored_tensors()
        named = {
            prefix + tensor.removeprefix("model.") if tensor.startswith("model.") else tensor: shape
            for tensor, shape in stored.items()
        }
        write_safetensors(folder / "model.safetensors", *header_of({**named, **others}))
        opened = ModelFolder.open(folder)
        assert {tensor for tensor in opened.tensors if not tensor.startswith("mtp.")} == expected.keys()
        # config.json does not announce the layer whose tensors are there.
        assert opened.config.mtp is None
        write_safetensors(folder / "model.safetensors", *header_of({**named, "draft.weight": (3,)}))
        with pytest.raises(InvalidModelFolder, match=r"'draft\.weight' is surplus"):
            ModelFolder.open(folder)
        del named[f"{prefix}layers.0.linear_attn.A_log"]
        write_safetensors(folder / "model.safetensors", *header_of(named))
        with pytest.raises(InvalidModelFolder, match=r"linear_attn\.A_log' is missing"):
            ModelFolder.open(folder)


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 4, 7, 8])
def test_a_row_takes_what_the_kernels_layout_says(num_drafts: int) -> None:
    for tp in (1, 2):
        linear = rank_part(parsed().description, tp).recurrent_layers[0]
        heads = DeltaHeads(linear.num_key_heads, linear.num_value_heads, linear.key_dim, linear.value_dim)
        assert linear.drafted_state_elements(num_drafts) == line_elements(heads, linear.kernel_size, num_drafts)


def test_the_layer_that_predicts_the_token_after_the_next_is_a_model_of_one_layer() -> None:
    model = parsed(mtp_num_hidden_layers=1)
    assert model.mtp is not None and model.mtp.description.fusion is not None
    mtp = model.mtp.description
    names = dict(mtp.tensors())
    size = mtp.hidden_size
    assert names["mtp.fc.weight"] == (size, 2 * size) and names["mtp.pre_fc_norm_hidden.weight"] == (size,)
    assert {"mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= set(names)
    [layer] = mtp.layers
    assert layer.kv_attention.gated and not mtp.recurrent_layers
    assert all(norm.adds_one for norm in (*layer.norms, mtp.norm, mtp.fusion.embedding_norm, mtp.fusion.state_norm))
    for changes in ({}, {"mtp_num_hidden_layers": 2}, {"mtp_use_dedicated_embeddings": True}):
        assert parsed(**{"mtp_num_hidden_layers": 1, **changes} if changes else {}).mtp is None


@pytest.mark.parametrize("joined", [True, False])
def test_a_folder_with_the_layer_opens_however_its_experts_lie(joined: bool, tmp_path: pathlib.Path) -> None:
    fields = {name: value for name, value in HYBRID.items() if name != "intermediate_size"}
    config = {**fields, **EXPERTS, "mtp_num_hidden_layers": 1}
    model = parse_config(config)
    assert model.mtp is not None
    named = {**model.description.stored_tensors(), **model.mtp.description.stored_tensors()}
    expected = dict(model.mtp.description.tensors())
    if joined:
        name = "mtp.layers.0.mlp.experts"
        named = {tensor: shape for tensor, shape in named.items() if not tensor.startswith(name)}
        named |= {f"{name}.gate_up_proj": (3, 10, model.description.hidden_size)}
        named |= {f"{name}.down_proj": (3, model.description.hidden_size, 5)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", *header_of(named))
    opened = open_mtp(ModelFolder.open(tmp_path))
    assert {tensor for tensor in opened.tensors if tensor.startswith("mtp.")} == {
        tensor for tensor in expected if tensor.startswith("mtp.")
    }
    del named["mtp.pre_fc_norm_hidden.weight"]
    write_safetensors(tmp_path / "model.safetensors", *header_of(named))
    with pytest.raises(InvalidModelFolder, match=r"'mtp\.pre_fc_norm_hidden\.weight' is missing"):
        open_mtp(ModelFolder.open(tmp_path))


EXPERTS = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 5,
    "shared_expert_intermediate_size": 7,
}


def test_every_layer_of_a_mixture_has_experts_and_a_shared_one() -> None:
    without_inner = {name: value for name, value in HYBRID.items() if name != "intermediate_size"}
    model = parse_config({**without_inner, **EXPERTS}).description
    assert len(model.expert_layers) == 4
    for experts in model.expert_layers:
        assert experts.renormalized and experts.shared is not None
        assert (experts.inner, experts.shared.mlp.inner, experts.router.keeps_dtype) == (5, 7, True)
        shared = 3 * 7 * 16 + 16
        assert experts.multiplied == 3 * 16 + 2 * 3 * 5 * 16 + shared
    names = [name for name, _ in model.tensors() if name.startswith("model.layers.1.mlp.shared")]
    assert names == [
        f"model.layers.1.mlp.shared_expert{name}.weight" for name in (".gate_proj", ".up_proj", ".down_proj", "_gate")
    ]


def test_experts_may_lie_in_one_tensor_as_published(tmp_path: pathlib.Path) -> None:
    config = {**HYBRID, **EXPERTS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = expected_tensors(parse_config(config))
    stored = parse_config(config).description.stored_tensors()
    joined = {name: shape for name, shape in stored.items() if ".experts." not in name}
    for layer in range(4):
        joined[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = (3, 10, 16)
        joined[f"model.layers.{layer}.mlp.experts.down_proj"] = (3, 16, 5)
    write_safetensors(tmp_path / "model.safetensors", *header_of(joined))
    tensors = ModelFolder.open(tmp_path).tensors
    assert {name: record.shape for name, record in tensors.items()} == expected
    # They cover the file without a gap, each expert's gate before its up.
    ordered = sorted(tensors.values(), key=lambda record: record.offset)
    assert all(one.offset + one.num_bytes == other.offset for one, other in itertools.pairwise(ordered))
    first = [
        name for name, record in sorted(tensors.items(), key=lambda item: item[1].offset) if "s.1.mlp.experts.0" in name
    ]
    assert first == [f"model.layers.1.mlp.experts.0.{part}_proj.weight" for part in ("gate", "up", "down")]
    joined["model.layers.2.mlp.experts.down_proj"] = (3, 5, 16)
    write_safetensors(tmp_path / "model.safetensors", *header_of(joined))
    with pytest.raises(InvalidModelFolder, match=r"experts\.down_proj' has shape \[3, 5, 16\], \[3, 16, 5\] expected"):
        ModelFolder.open(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"linear_num_value_heads": 3},
            r"linear_num_value_heads must be a multiple of linear_num_key_heads \(2\), is 3",
        ),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads must be an integer from 1 to 1024, is 0"),
        ({"linear_key_head_dim": 513}, "linear_key_head_dim must be an integer from 1 to 512"),
        ({"linear_value_head_dim": "6"}, "linear_value_head_dim must be an integer"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer from 2 to 16, is 1"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types must leave one of the 4 layers 'full_attention'"),
        ({"full_attention_interval": 5}, "full_attention_interval must leave one of the 4 layers"),
        ({"full_attention_interval": 0}, "full_attention_interval must be an integer from 1"),
        ({"layer_types": ["sliding_attention"] + KINDS[1:]}, "must hold 'full_attention' or 'linear_attention'"),
        ({"layer_types": KINDS[1:]}, "layer_types must be a list of num_hidden_layers"),
        ({"attn_output_gate": False}, "attn_output_gate must be true"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({**EXPERTS, "num_experts_per_tok": 4}, "num_experts_per_tok must be an integer from 1 to 3, is 4"),
        ({**EXPERTS, "shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be an integer"),
        ({**EXPERTS, "moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor must leave an even number"),
    ],
)
def test_what_the_family_cannot_do_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModelFolder, match=message):
        parsed(**changes)


def test_settings_that_need_more_of_states_are_refused_by_name() -> None:
    model, plain = parsed(), parsed(full_attention_interval=1)
    for setting, rule, message in (
        (
            {"enable_prefix_cache": True, "state_checkpoints": 0},
            unsuitable_states,
            r"enable_prefix_cache is on, state_checkpoints is 0, .* state_checkpoints 1 or more works",
        ),
        ({"pp": 2}, unsuitable_pp, r"pp is 2, and each stage needs a layer with keys .* has 1: pp of at most 1 works"),
    ):
        reason = rule(engine(**setting), model)
        assert reason is not None and re.fullmatch(message, reason) is not None
        assert rule(engine(**setting), plain) is None
    wide = parsed(linear_key_head_dim=129, linear_value_head_dim=128)
    assert unsuitable_states(engine(speculate="ngram"), model) is None is unsuitable_states(engine(), wide)
    reason = unsuitable_states(engine(speculate="ngram"), wide)
    assert reason is not None and "has a matrix of 32768 elements for each head" in reason
    assert (
        unsuitable_states(engine(), model) is None
        and unsuitable_states(engine(enable_prefix_cache=False), model) is None
    )
    assert unsuitable_states(engine(enable_prefix_cache=True), model) is None
    assert unsuitable_states(engine(state_checkpoints=4), model) is None is unsuitable_states(engine(), plain)
    reason = unsuitable_states(engine(state_checkpoints=4), plain)
    assert reason is not None and re.match("state_checkpoints is 4, and the model .* has no recurrent layers", reason)
    for described in (model.description, plain.description):
        assert reuses_prefixes(engine(), described)
        assert not reuses_prefixes(engine(enable_prefix_cache=False), described)
    assert not reuses_prefixes(engine(state_checkpoints=0), model.description)
    assert reuses_prefixes(engine(state_checkpoints=0), plain.description)


def test_each_stage_has_a_layer_with_keys() -> None:
    """A large vocabulary leaves the first and the last stage one layer, if that layer has keys."""
    large = {"num_hidden_layers": 6, "vocab_size": 40_000}
    for interval, firsts in ((1, [0, 1, 5]), (2, [0, 2, 5]), (3, None)):
        model = parsed(full_attention_interval=interval, **large)
        if firsts is None:
            assert unsuitable_pp(engine(pp=3), model) is not None and unsuitable_pp(engine(pp=2), model) is None
            continue
        assert unsuitable_pp(engine(pp=3), model) is None
        assert [stage.first_layer for stage in stages(engine(pp=3), model)] == firsts


def test_ranks_share_value_heads_and_divide_or_repeat_key_heads() -> None:
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 48, "vocab_size": 96}
    for heads, tp, message in (
        ((2, 6), 4, "tp is 4, which does not divide linear_num_value_heads 6; tp 1, 2, 6 work"),
        ((4, 12), 3, "tp is 3, which neither divides linear_num_key_heads 4 nor is a multiple of it; tp 1, 2 work"),
        ((2, 12), 3, "tp is 3, which neither divides linear_num_key_heads 2 nor is a multiple of it; tp 1, 2, 6 work"),
    ):
        keys, values = heads
        model = parsed(linear_num_key_heads=keys, linear_num_value_heads=values, **sizes)
        assert unsuitable_tp(engine(tp=tp), model) == message
    model = parsed(**sizes).description
    for tp, keys in ((2, 1), (4, 1)):
        part = rank_part(model, tp).recurrent_layers[0]
        assert (part.num_key_heads, part.num_value_heads) == (keys, 4 // tp)
        assert part.num_channels == 2 * keys * 4 + 24 // tp
        assert row_state_bytes(rank_part(model, tp)) == 3 * 4 * part.state_elements
