"""Qwen2 and Qwen2.5: biases on queries, keys and values only; later layers may have a sliding
window.
"""

from __future__ import annotations

from headrace_backend.layers.decoder_layer import DecoderLayer
from headrace_backend.models.causal_lm import CausalLM, attention_shape
from headrace_backend.weights.placement import Placement
from headrace_model_folder import ModelConfig


class Qwen2ForCausalLM(CausalLM):
    """Qwen2."""

    def make_layer(self, config: ModelConfig, index: int, placement: Placement) -> DecoderLayer:
        """Biased query, key and value projections; everything else without."""
        assert config.attention_bias and not config.attention_output_bias
        shape = attention_shape(config, index)
        return DecoderLayer(shape, config.intermediate_size, config.mlp_bias, config.rms_norm_eps, placement)
