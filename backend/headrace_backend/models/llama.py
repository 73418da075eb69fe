"""Llama 2 and 3.x, and Mistral: the plain pre-norm decoder.

Mistral adds a sliding window in every layer; Llama variants may have biases.
"""

from __future__ import annotations

from headrace_backend.layers.decoder_layer import DecoderLayer
from headrace_backend.models.causal_lm import CausalLM, attention_shape
from headrace_backend.weights.placement import Placement
from headrace_model_folder import ModelConfig


class LlamaForCausalLM(CausalLM):
    """Llama."""

    def make_layer(self, config: ModelConfig, index: int, placement: Placement) -> DecoderLayer:
        """Attention without norms on queries and keys, gated MLP."""
        assert not config.qk_norm
        shape = attention_shape(config, index)
        return DecoderLayer(shape, config.intermediate_size, config.mlp_bias, config.rms_norm_eps, placement)


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral: Llama with one window for all layers, or none."""

    def make_layer(self, config: ModelConfig, index: int, placement: Placement) -> DecoderLayer:
        """As Llama's, without any bias."""
        assert not (config.attention_bias or config.mlp_bias)
        return super().make_layer(config, index, placement)
