"""The cost of a step equals the parameters of transformers' model of the same configuration."""

from __future__ import annotations

import json

import pytest
import torch
from tests.models.checkpoints import CONFIGS, make_model
from tests.support.running_server import DEMO

from headrace_backend.config import EngineConfig
from headrace_backend.server.model_cost import model_cost
from headrace_backend.server.model_facts import ModelFacts, model_limits
from headrace_backend.step.messages import QuantizationReport, WorkerReady
from headrace_model_folder import ModelFolder
from headrace_model_folder.config import parse_config


@pytest.mark.parametrize("name", list(CONFIGS))
def test_cost_counts_the_parameters_of_the_model(name: str) -> None:
    theirs = CONFIGS[name]()
    with torch.device("meta"):
        model = make_model(theirs)
    architecture = type(model).__name__
    config = parse_config({**json.loads(theirs.to_json_string()), "architectures": [architecture]})
    cost = model_cost(config, "bf16")
    # Of a model that sees too, the part that reads and writes text.
    theirs, decoder = theirs.get_text_config(), model.get_decoder()
    # Biases of all of a layer's experts are one parameter, and no matrix.
    named = decoder.named_parameters()
    matrices = [
        parameter
        for name, parameter in named
        if parameter.dim() == 2 and not name.endswith("_bias") and "embed_tokens" not in name
    ]
    # All of a layer's experts are one parameter, and some of them compute a token.
    named = decoder.layers.named_parameters()
    experts = [parameter for name, parameter in named if parameter.dim() == 3 and "conv1d" not in name]
    per_token = getattr(theirs, "num_experts_per_tok", None) or getattr(theirs, "top_k_experts", None)
    share = per_token / config.description.expert_layers[0].router.outputs if experts else 0.0
    num_expert_weights = sum(matrix.numel() for matrix in experts)
    recurrent = [layer.linear_attn for layer in decoder.layers if hasattr(layer, "linear_attn")]
    # Each token reads a matrix for each head of such a layer twice, and corrects it once.
    products = sum(3 * each.num_v_heads * each.head_k_dim * each.head_v_dim for each in recurrent)
    assert cost.flops_per_token == pytest.approx(
        2 * (sum(matrix.numel() for matrix in matrices) + share * num_expert_weights + products), rel=1e-12
    )
    assert (cost.expert_bytes, cost.expert_share) == (2 * num_expert_weights, share)
    head = model.get_output_embeddings().weight
    assert cost.flops_per_sample == 2 * head.numel()
    # Tied embeddings are one parameter, and the output layer reads it.
    embedding = model.get_input_embeddings().weight
    unread = 0 if head is embedding else embedding.numel()
    # Tied, it is one of the decoder's.
    learned = ("e_score_correction_bias", "layer_scalar")
    corrections = [each for name, each in decoder.named_buffers() if name.endswith(learned)]
    parameters = {*decoder.parameters(), *corrections, head}
    # Of inputs by layer a step reads its tokens' rows alone.
    parameters -= {each for name, each in decoder.named_parameters() if "embed_tokens_per_layer" in name}
    assert cost.weight_bytes + cost.expert_bytes == 2 * (sum(each.numel() for each in parameters) - unread)
    attentions = [layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn")]
    # Layers that read other layers' keys have none; in some models keys are the values too.
    keys = [each.k_proj.weight.shape[0] for each in attentions if hasattr(each, "k_proj")]
    if keys:
        assert cost.kv_bytes_per_token == 2 * 2 * sum(keys)
    else:
        assert cost.kv_bytes_per_token == 2 * len(attentions) * 2 * theirs.num_key_value_heads * attentions[0].head_dim
    # A product with each key's elements and one with each value's, for as many elements as the
    # output projection takes in.
    assert cost.flops_per_pair == 2 * 2 * sum(each.o_proj.weight.shape[1] for each in attentions)
    # In fp32: those matrices, and the inputs of all tokens that the convolution sees.
    kept = sum(each.conv_kernel_size * each.conv_dim for each in recurrent)
    assert cost.row_state_bytes == 4 * (products // 3 + kept)


def test_bytes_follow_the_type() -> None:
    config = parse_config({**json.loads(CONFIGS["llama"]().to_json_string()), "architectures": ["LlamaForCausalLM"]})
    half, single = model_cost(config, "fp16"), model_cost(config, "fp32")
    assert (2 * half.weight_bytes, 2 * half.kv_bytes_per_token) == (single.weight_bytes, single.kv_bytes_per_token)
    assert half.flops_per_token == single.flops_per_token


def test_a_quantized_cache_takes_a_byte_a_number_and_a_scale_for_each_head() -> None:
    config = parse_config({**json.loads(CONFIGS["llama"]().to_json_string()), "architectures": ["LlamaForCausalLM"]})
    plain, quantized = model_cost(config, "bf16"), model_cost(config, "bf16", kv_dtype="int8")
    attention = config.description.attention
    heads = 2 * len(config.description.layers) * attention.num_kv_heads
    assert (plain.kv_bytes_per_token, quantized.kv_bytes_per_token) == (
        heads * attention.head_dim * 2,
        heads * (attention.head_dim + 4),
    )
    assert plain._replace(kv_bytes_per_token=0) == quantized._replace(kv_bytes_per_token=0)


def test_quantized_layers_are_read_with_their_bits_and_the_rest_as_it_is() -> None:
    config = parse_config({**json.loads(CONFIGS["llama"]().to_json_string()), "architectures": ["LlamaForCausalLM"]})
    plain, quantized = model_cost(config, "bf16"), model_cost(config, "bf16", layer_bits=4.5)
    assert plain.weight_bytes - quantized.weight_bytes == int(plain.flops_per_token / 2 * (16 - 4.5) / 8)
    assert plain[1:] == quantized[1:]


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_an_output_layer_of_its_own_bits_is_read_instead(name: str) -> None:
    config = parse_config({**json.loads(CONFIGS[name]().to_json_string()), "architectures": ["LlamaForCausalLM"]})
    plain, quantized = model_cost(config, "bf16"), model_cost(config, "bf16", head_bits=8.5)
    assert plain.weight_bytes - quantized.weight_bytes == int(plain.flops_per_sample / 2 * (16 - 8.5) / 8)
    assert plain[1:] == quantized[1:]


def test_a_model_whose_layers_are_plain_and_output_layer_is_not_costs_that() -> None:
    folder = ModelFolder.open(DEMO, require_weights=False)
    config = EngineConfig(model=DEMO, device="cpu", dtype="bf16", quantize_head="int8")
    report = QuantizationReport(head_scheme="int8", head_bits_per_weight=8.125, head_relative_error=0.01)
    facts = ModelFacts(config, folder, model_limits(config, folder))
    ready = WorkerReady("cpu", 1, 16, 1, {}, quantization=report)
    assert facts.cost(ready) == model_cost(folder.config, "bf16", head_bits=8.125)


@pytest.mark.parametrize(("tp", "copies"), [(1, 1), (2, 1), (4, 1), (8, 2)])
def test_heads_that_several_ranks_keep_count_as_often(tp: int, copies: int) -> None:
    folder = ModelFolder.open(DEMO, require_weights=False)
    assert folder.config.description.attention.num_kv_heads == 4
    config = EngineConfig(model=DEMO, device="cpu", dtype="bf16", tp=tp)
    cost = ModelFacts(config, folder, model_limits(config, folder)).cost(WorkerReady("cpu", 1, 16, 1, {}))
    plain = model_cost(folder.config, "bf16")
    assert cost == plain._replace(kv_bytes_per_token=copies * plain.kv_bytes_per_token)
