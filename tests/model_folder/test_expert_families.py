"""Families of mixtures of experts: which layers are sparse, their tensors, and what is refused.

All without torch.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import pytest
from tests.model_folder.folders import CONFIG, header_of, write_folder, write_safetensors
from tests.model_folder.test_gpt_oss_family import GPT_OSS

from headrace_backend.config import EngineConfig
from headrace_backend.pp_rules import stages
from headrace_backend.quantize_rules import unsuitable_quantization
from headrace_backend.tp_rules import rank_part, unsuitable_tp
from headrace_model_folder import InvalidModelFolder, ModelFolder, expected_tensors
from headrace_model_folder.config import ModelConfig, parse_config
from headrace_model_folder.description import Experts

QWEN = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "head_dim": 4,
}
MIXTRAL = CONFIG | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3}


def config(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**base, **changes}.items() if value != "absent"}


def sparse(**changes: Any) -> list[int]:
    layers = parse_config(config(QWEN, num_hidden_layers=6, **changes)).description.layers
    return [index for index, layer in enumerate(layers) if isinstance(layer.mlp, Experts)]


def engine(**settings: Any) -> EngineConfig:
    return EngineConfig(model=pathlib.Path("m"), device="cpu", **settings)


def test_layers_are_sparse_by_step_but_for_those_that_are_named() -> None:
    assert sparse() == [0, 1, 2, 3, 4, 5]
    assert sparse(decoder_sparse_step=2) == [1, 3, 5]
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[0, 3]) == [1, 5]
    assert sparse(mlp_only_layers=[0, 1, 2, 3, 4, 5]) == []
    # One sparse layer makes a mixture.
    for dense, is_mixture in (([0, 1, 2, 4, 5], True), ([0, 1, 2, 3, 4, 5], False)):
        parsed = parse_config(config(QWEN, num_hidden_layers=6, mlp_only_layers=dense))
        assert parsed.description.has_experts is is_mixture


def test_experts_take_sizes_and_names_from_their_family() -> None:
    qwen, mixtral = (parse_config(each).description.layers[1].mlp for each in (QWEN, MIXTRAL))
    assert isinstance(qwen, Experts) and isinstance(mixtral, Experts)
    assert (len(qwen.experts), qwen.per_token, qwen.inner, qwen.renormalized) == (4, 2, 12, False)
    assert (len(mixtral.experts), mixtral.per_token, mixtral.inner, mixtral.renormalized) == (3, 2, 24, True)
    assert (qwen.router.name, qwen.experts[3].up.name) == (
        "model.layers.1.mlp.gate", "model.layers.1.mlp.experts.3.up_proj",
    )  # fmt: skip
    # w1 is the gate, w3 the way up, w2 the way down.
    assert [(linear.name.rpartition(".")[2], linear.outputs) for linear in mixtral.experts[0].linears] == [
        ("w1", 24), ("w3", 24), ("w2", 16),
    ]  # fmt: skip
    # transformers 5 writes another name; both are taken.
    newer = config(QWEN, num_experts="absent", num_local_experts=4)
    assert parse_config(newer) == parse_config(QWEN)


def test_absent_fields_take_transformers_defaults() -> None:
    qwen = (
        parse_config(config(QWEN, num_experts="absent", num_experts_per_tok="absent", moe_intermediate_size="absent"))
        .description.layers[0]
        .mlp
    )
    assert isinstance(qwen, Experts)
    assert (len(qwen.experts), qwen.per_token, qwen.inner) == (128, 8, 768)
    mixtral = parse_config(config(MIXTRAL, num_local_experts="absent")).description
    assert isinstance(mixtral.layers[0].mlp, Experts)
    assert (len(mixtral.layers[0].mlp.experts), mixtral.rope.theta, mixtral.norm.eps) == (8, 1e6, 1e-5)


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (QWEN, "num_experts", 0),
        (QWEN, "num_experts", 4.5),
        (QWEN, "num_experts", 1025),
        (QWEN, "num_local_experts", 5),
        (QWEN, "num_experts_per_tok", 5),
        (QWEN, "num_experts_per_tok", 0),
        (QWEN, "moe_intermediate_size", -1),
        (QWEN, "norm_topk_prob", 1),
        (QWEN, "decoder_sparse_step", 0),
        (QWEN, "mlp_only_layers", [2]),
        (QWEN, "mlp_only_layers", [True]),
        (QWEN, "mlp_only_layers", 1),
        (QWEN, "quantization_config", {"quant_method": "mxfp4"}),
        (QWEN, "quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        (MIXTRAL, "num_local_experts", "8"),
        (MIXTRAL, "num_experts_per_tok", 4),
    ],
)
def test_a_bad_value_is_refused_by_field_name(base: dict[str, Any], field: str, value: Any) -> None:
    with pytest.raises(InvalidModelFolder) as error:
        parse_config(config(base, **{field: value}))
    assert field in str(error.value) and "\n" not in str(error.value)


def test_a_hostile_number_of_experts_makes_no_names() -> None:
    with pytest.raises(InvalidModelFolder, match="num_experts of 1024 in 1000 layers makes more than 65536 experts"):
        parse_config(config(QWEN, num_experts=1024, num_hidden_layers=1000))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.1.mlp.experts.3.up_proj.weight": None}, "is missing"),
        ({"model.layers.0.mlp.gate.weight": None}, "is missing"),
        ({"model.layers.0.mlp.experts.4.up_proj.weight": (12, 16)}, "is surplus"),
        ({"model.layers.0.mlp.experts.0.down_proj.weight": (16, 24)}, "[16, 12] expected"),
        ({"model.layers.0.mlp.gate.weight": (5, 16)}, "[4, 16] expected"),
    ],
)
def test_experts_that_are_missing_or_misshapen_are_named_with_their_file(
    tmp_path: pathlib.Path, changes: dict[str, Any], message: str
) -> None:
    write_folder(tmp_path, QWEN)
    assert ModelFolder.open(tmp_path).parameter_count > 0
    shapes = {**expected_tensors(parse_config(QWEN)), **changes}
    header, size = header_of({name: shape for name, shape in shapes.items() if shape is not None})
    write_safetensors(tmp_path / "model.safetensors", header, size)
    with pytest.raises(InvalidModelFolder) as error:
        ModelFolder.open(tmp_path)
    text = str(error.value)
    assert text.startswith("model.safetensors:") and message in text and f"'{next(iter(changes))}'" in text


def test_ranks_share_each_expert_and_have_the_whole_router() -> None:
    model = parse_config(QWEN)
    part = rank_part(model.description, 2).layers[0].mlp
    assert isinstance(part, Experts)
    assert (len(part.experts), part.inner, part.router.outputs) == (4, 6, 4)
    assert unsuitable_tp(engine(tp=2), model) is None
    odd = parse_config(config(QWEN, moe_intermediate_size=13))
    reason = "tp is 2, which does not divide the inner size of experts 13; tp 1 works, expert_parallel works with tp 2"
    assert unsuitable_tp(engine(tp=2), odd) == reason


def test_ranks_with_whole_experts_share_the_rest_of_the_model() -> None:
    model = parse_config(QWEN)
    layer = rank_part(model.description, 2, whole_experts=True).layers[0]
    assert isinstance(layer.mlp, Experts)
    assert (len(layer.mlp.experts), layer.mlp.inner, layer.mlp.router.outputs) == (2, 12, 4)
    assert layer.attention.num_heads == model.description.attention.num_heads // 2
    together = engine(tp=2, expert_parallel=True)
    assert unsuitable_tp(together, model) is None
    # Which one rank can't have a part of each of.
    assert unsuitable_tp(together, parse_config(config(QWEN, moe_intermediate_size=13))) is None
    assert unsuitable_tp(together, parse_config(config(QWEN, num_experts=7))) == (
        "tp is 2, which does not divide the number of experts 7; no number of ranks works"
    )
    assert unsuitable_tp(engine(expert_parallel=True), model) == (
        "tp is 1, which is one rank, and expert_parallel deals experts out to several; tp 2, 4 work"
    )


def test_bits_that_experts_do_not_have_are_refused() -> None:
    model = _with_inner(768)
    for bits in ("off", "int8", "fp8", "int4", "nf4"):
        assert unsuitable_quantization(engine(quantize=bits), model) is None
    assert unsuitable_quantization(engine(quantize="int4"), _with_inner(96)) == (
        "quantize_group is 128, which does not divide the 96 inputs of "
        "model.layers.0.mlp.experts.0.down_proj.weight; quantize_group 32 works"
    )
    assert unsuitable_quantization(engine(quantize="nf4"), parse_config(GPT_OSS)) == (
        "quantize is nf4, in which experts with biases can't be multiplied; quantize int8, fp8 and int4 work"
    )


def _with_inner(inner: int) -> ModelConfig:
    return parse_config(config(QWEN, hidden_size=256, head_dim=64, moe_intermediate_size=inner))


def test_stages_count_the_weights_of_experts() -> None:
    """Three sparse layers behind three dense ones weigh more."""
    model = parse_config(config(QWEN, num_hidden_layers=6, mlp_only_layers=[0, 1, 2], num_experts=64))
    first, last = stages(engine(pp=2), model)
    assert (first.first_layer, last.first_layer) == (0, 4)


def test_torch_stays_out(tmp_path: pathlib.Path) -> None:
    write_folder(tmp_path, MIXTRAL)
    code = (
        "import sys; from headrace_model_folder import ModelFolder; "
        f"ModelFolder.open({str(tmp_path)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
