"""Qwen3 (dense): an RMS norm on every head's query and key before the rotation instead of Qwen2's
biases; head_dim is independent of the width.
"""

from __future__ import annotations

from headrace_backend.layers.decoder_layer import DecoderLayer
from headrace_backend.models.causal_lm import CausalLM, attention_shape
from headrace_backend.weights.placement import Placement
from headrace_model_folder import ModelConfig


class Qwen3ForCausalLM(CausalLM):
    """Qwen3."""

    def make_layer(self, config: ModelConfig, index: int, placement: Placement) -> DecoderLayer:
        """Attention with norms on queries and keys."""
        assert config.qk_norm
        shape = attention_shape(config, index)
        return DecoderLayer(shape, config.intermediate_size, config.mlp_bias, config.rms_norm_eps, placement)
