"""Mistral: Llama without biases, with one sliding window for all layers or none.

GGUF files of it say that they are Llama's.
"""

from __future__ import annotations

from headrace_model_folder.description import ModelDescription
from headrace_model_folder.families.decoder import Switches, decoder, read_sizes, read_window
from headrace_model_folder.families.family import Family
from headrace_model_folder.fields import Fields


def describe(fields: Fields) -> ModelDescription:
    """All layers have the window."""
    sizes, window = read_sizes(fields), read_window(fields)
    if window is not None:
        _refuse_mixed_layers(fields)
    return decoder(sizes, [window] * sizes.num_layers, Switches())


def _refuse_mixed_layers(fields: Fields) -> None:
    types = fields.get("layer_types")
    if types is not None and (not isinstance(types, list) or any(kind != "sliding_attention" for kind in types)):
        raise fields.error(
            "layer_types", "must be all 'sliding_attention' for MistralForCausalLM with a sliding_window"
        )


MISTRAL = Family(
    "MistralForCausalLM",
    {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    describe,
    knows=frozenset({"sliding_window", "layer_types"}),
)
