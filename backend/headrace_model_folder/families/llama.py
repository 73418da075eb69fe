"""Llama 2 and 3.x: the plain pre-norm decoder, whose variants may have biases."""

from __future__ import annotations

from headrace_model_folder.description import ModelDescription
from headrace_model_folder.families.decoder import Switches, decoder, read_sizes
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.fields import Fields


def describe(fields: Fields) -> ModelDescription:
    """Every layer sees the whole context."""
    sizes, attention_bias = read_sizes(fields), fields.boolean("attention_bias", False)
    switches = Switches(attention_bias, attention_bias, fields.boolean("mlp_bias", False))
    return decoder(sizes, [None] * sizes.num_layers, switches)


LLAMA = Family(
    "LlamaForCausalLM",
    {"max_position_embeddings": 2048},
    describe,
    knows=frozenset({"attention_bias", "mlp_bias"}),
    gguf=GgufNaming("llama", alternates=True, windowed="MistralForCausalLM"),
)
