"""Which settings suit a model.

The layer that does not, and a value that works, are named; what a card lacks is reported.
"""

from __future__ import annotations

import dataclasses
import pathlib

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.model_folder.test_gguf import FILE, small
from tests.support.demo_config import demo_config
from tests.support.running_server import DEMO

from headrace_backend.cards import Card
from headrace_backend.config import QUANTIZE_GROUPS, EngineConfig
from headrace_backend.quantize_rules import unsuitable_head, unsuitable_quantization
from headrace_backend.worker.start_up.quantized import without_products
from headrace_kernels.weight_formats.quantized_weight import QuantKind
from headrace_model_folder import FolderQuantization, LayerFormat, Layout, ModelConfig, ModelFolder
from headrace_model_folder.safetensors_header import Nf4State, TensorRecord

MODEL = ModelFolder.open(DEMO, require_weights=False).config


def config_of(quantize: str, group: int = 128) -> EngineConfig:
    return EngineConfig.model_validate({"model": DEMO, "quantize": quantize, "quantize_group": group})


def shaped(hidden_size: int, intermediate_size: int) -> ModelConfig:
    return demo_config(hidden_size=hidden_size, intermediate_size=intermediate_size)


@pytest.mark.parametrize(
    ("model", "group", "line"),
    [
        (MODEL, 128, (
            "quantize_group is 128, which does not divide the 704 inputs of model.layers.0.mlp.down_proj.weight; "
            "quantize_group 64 works"
        )),
        (shaped(96, 704), 64, (
            "quantize_group is 64, which does not divide the 96 inputs of model.layers.0.self_attn.q_proj.weight; "
            "quantize_group 32 works"
        )),
        (shaped(256, 700), 32, (
            "quantize_group is 32, which does not divide the 700 inputs of model.layers.0.mlp.down_proj.weight; "
            "quantize int8 and fp8 work"
        )),
    ],
)  # fmt: skip
def test_the_layer_and_what_works_are_named(model: ModelConfig, group: int, line: str) -> None:
    assert unsuitable_quantization(config_of("int4", group), model) == line
    for quantize in ("off", "int8", "fp8"):
        assert unsuitable_quantization(config_of(quantize), model) is None


@given(st.sampled_from(QUANTIZE_GROUPS), st.integers(1, 40), st.integers(1, 40))
def test_the_value_that_is_said_to_work_works(group: int, hidden: int, inner: int) -> None:
    model = shaped(16 * hidden, 16 * inner)
    line = unsuitable_quantization(config_of("int4", group), model)
    if line is None:
        assert all(size % group == 0 for size in (16 * hidden, 16 * inner, model.description.attention.output.inputs))
    elif "quantize_group" in line.partition(";")[2]:
        works = int(line.split()[-2])
        assert unsuitable_quantization(config_of("int4", works), model) is None
    else:
        assert all(unsuitable_quantization(config_of("int4", size), model) for size in QUANTIZE_GROUPS)


def test_a_card_without_fp8_products_is_reported() -> None:
    fp8, int8 = {QuantKind.FP8, QuantKind.INT4}, {QuantKind.INT8}
    line = without_products(fp8, Card("NVIDIA A100", (8, 0)))
    assert line is not None and line.startswith("NVIDIA A100, compute capability 8.0, has no FP8 products")
    assert all(without_products(fp8, Card(*each)) is None for each in (("NVIDIA L4", (8, 9)), ("NVIDIA H200", (9, 0))))
    assert without_products(int8, Card("NVIDIA A100", (8, 0))) is None


def test_a_folder_that_is_quantized_already_is_not_quantized_again() -> None:
    layers = {"model.layers.0.mlp.up_proj": LayerFormat(Layout.AWQ, "int4", "group", 64)}
    model = dataclasses.replace(MODEL, quantization=FolderQuantization("awq", layers))
    for quantize in ("int8", "int4", "fp8"):
        said = unsuitable_quantization(config_of(quantize), model)
        assert said is not None and said.startswith(
            f"quantize is {quantize}, and the folder is quantized already (awq)"
        )
    assert unsuitable_quantization(config_of("off"), model) is None
    dummy = EngineConfig.model_validate({"model": DEMO, "load": "dummy"})
    assert "load is dummy" in str(unsuitable_quantization(dummy, model))


def head_of(quantize_head: str) -> EngineConfig:
    return EngineConfig.model_validate({"model": DEMO, "quantize_head": quantize_head})


def test_a_head_is_quantized_whatever_the_layers_are_and_a_folder_whose_head_is_plain_allows_it() -> None:
    folder = ModelFolder.open(DEMO)
    layers = {"model.layers.0.mlp.up_proj": LayerFormat(Layout.AWQ, "int4", "group", 64)}
    already = dataclasses.replace(
        folder, config=dataclasses.replace(folder.config, quantization=FolderQuantization("awq", layers))
    )
    for quantize_head in ("off", "int8", "fp8"):
        config = head_of(quantize_head)
        assert unsuitable_head(config, folder) is None and unsuitable_head(config, already) is None
        assert unsuitable_quantization(config, folder.config) is None
        assert unsuitable_quantization(config, already.config) is None


def test_a_head_in_a_gguf_file_stays_as_it_is(tmp_path: pathlib.Path) -> None:
    small().write(tmp_path / FILE)
    folder = ModelFolder.open(tmp_path / FILE)
    assert unsuitable_head(head_of("off"), folder) is None
    assert unsuitable_head(head_of("int8"), folder) == (
        f"quantize_head is int8, and {FILE} is a GGUF file, whose weights stay as they are; quantize_head off works"
    )


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_that_has_few_bits_already_is_named(is_tied: bool) -> None:
    name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    part = TensorRecord("model.safetensors", "U8", (4,), 0, 4)
    record = TensorRecord("model.safetensors", "NF4", (4, 64), 0, 128, nf4=Nf4State(part, part))
    config = demo_config(tie_word_embeddings=is_tied)
    folder = dataclasses.replace(ModelFolder.open(DEMO), config=config, tensors={name: record})
    assert unsuitable_head(head_of("fp8"), folder) == (
        f"quantize_head is fp8, and model.safetensors has {name} in NF4 already; quantize_head off works"
    )


def test_heads_have_8_bits() -> None:
    with pytest.raises(pydantic.ValidationError, match=r"quantize_head(.|\n)*'off', 'int8' or 'fp8'"):
        head_of("int4")
