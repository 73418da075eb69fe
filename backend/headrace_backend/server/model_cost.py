"""What a model's steps compute and read, from its configuration.

`step_records` judges steps against the device by these numbers.

Owns the arithmetic, for decoders with grouped-query attention, or with linear attention in some
layers, whose states are read and written by every row that a step computes. Of a mixture of experts
a step reads those that one of its tokens chose. Products count; norms, rotations
and activations do not: together they are below 1%. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headrace_backend.kv_bytes import kv_token_bytes
from headrace_backend.state_rules import row_state_bytes
from headrace_model_folder.config import ModelConfig
from headrace_model_folder.description import Linear
from headrace_model_folder.expected_tensors import parameter_count
from headrace_model_folder.formats.layer_format import LayerFormat

_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class ModelCost(NamedTuple):
    """Floating-point operations (a multiplication and an addition are two) and bytes."""

    # Weights that every step reads: all but experts, and an embedding table whose numbers are not
    # the output layer's too.
    weight_bytes: int
    # Of the linear layers, per token; of experts those that compute it.
    flops_per_token: float
    # Of attention in all layers, per query and key that it sees.
    flops_per_pair: float
    # Of the output layer, per token sampled.
    flops_per_sample: float
    # Of the cache, all layers and ranks; a head as often as ranks have it.
    kv_bytes_per_token: int
    # Of all experts of all layers.
    expert_bytes: int = 0
    # Of a layer's experts, those that compute one token.
    expert_share: float = 0.0
    # Of the states that a row has in recurrent layers.
    row_state_bytes: int = 0


def model_cost(
    config: ModelConfig,
    dtype: str,
    layer_bits: float | None = None,
    kv_dtype: str = "auto",
    head_bits: float | None = None,
    num_ranks: int = 1,
) -> ModelCost:
    """Computes the cost of a model.

    Args:
        config: Describes it.
        dtype: Dtype of weights and, unless quantized, of the cache: fp32, bf16 or fp16.
        layer_bits: Bits per weight of the layers' products, scales included, where they are
            quantized.
        kv_dtype: The cache's, as EngineConfig has it.
        head_bits: Width of one quantized value of the output layer, in the terms of `layer_bits`.
        num_ranks: Ranks that share the model.
    """
    item_bytes = _DTYPE_BYTES[dtype]
    model = config.description
    formats = None if config.quantization is None else config.quantization.layers
    layers = sum(linear.size for linear in model.linears if _has_few_bits(linear, formats))
    head = model.hidden_size * model.vocab_size
    # Of tables a step reads its tokens' rows alone.
    own_inputs = model.per_layer_embedding
    table = 0 if own_inputs is None else own_inputs.table.vocab_size * own_inputs.table.hidden_size
    num_read = parameter_count(config) - (0 if model.head.tied else head) - table
    weight_bytes = num_read * item_bytes
    if layer_bits is not None:
        weight_bytes -= int(layers * (item_bytes - layer_bits / 8))
    if head_bits is not None:
        weight_bytes -= int(head * (item_bytes - head_bits / 8))
    experts = model.expert_layers
    expert_weights = sum(mixture.size for mixture in experts)
    expert_bytes = expert_weights * item_bytes
    if layer_bits is not None:
        linears = (linear for mixture in experts for expert in mixture.experts for linear in expert.linears)
        low_bits = sum(linear.size for linear in linears if _has_few_bits(linear, formats))
        expert_bytes -= int(low_bits * (item_bytes - layer_bits / 8))
    return ModelCost(
        weight_bytes=weight_bytes - expert_bytes,
        # Of linear attention each token reads a state twice and corrects it once.
        flops_per_token=2.0 * model.multiplied + 6.0 * sum(layer.matrix_elements for layer in model.recurrent_layers),
        # One product of query and key, one of probability and value.
        flops_per_pair=4.0 * sum(attention.output.inputs for attention in model.attentions),
        flops_per_sample=2.0 * head,
        kv_bytes_per_token=kv_token_bytes(model, item_bytes, kv_dtype, num_ranks),
        expert_bytes=expert_bytes,
        expert_share=experts[0].share if experts else 0.0,
        row_state_bytes=row_state_bytes(model),
    )


def _has_few_bits(linear: Linear, formats: Mapping[str, LayerFormat] | None) -> bool:
    """Whether a projection is quantized, in its folder or, where that is plain, by the settings."""
    return linear.name in formats if formats is not None else not linear.keeps_dtype
