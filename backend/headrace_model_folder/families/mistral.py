"""Mistral: Llama without biases, with one sliding window for all layers or none.

GGUF files of it say that they are Llama's. Mistral Small 3 sees as well (`Mistral3`), of which the
text part is read: Mistral's, or Ministral's. Ministral 3 multiplies queries behind its original
context by a factor that grows with the position. That is not computed, so a context is at most the
original one, where the factor is 1.
"""

from __future__ import annotations

import dataclasses

from headrace_model_folder.description import ModelDescription
from headrace_model_folder.errors import shown
from headrace_model_folder.families.decoder import MAX_CONTEXT, Switches, decoder, read_sizes, read_window
from headrace_model_folder.families.family import Family
from headrace_model_folder.fields import Fields
from headrace_model_folder.rope_config import without_query_scaling
from headrace_model_folder.text_part import TextPart


def describe(fields: Fields) -> ModelDescription:
    """All layers have the window."""
    sizes, window = read_sizes(fields), read_window(fields)
    if window is not None:
        _refuse_mixed_layers(fields)
    return decoder(sizes, [window] * sizes.num_layers, Switches())


def describe_ministral3(fields: Fields) -> ModelDescription:
    """Mistral's layers; the context ends where queries would be scaled."""
    fields, scaled_from = without_query_scaling(
        Fields(fields.name, {**_MINISTRAL3_DEFAULTS, **fields.values}), MAX_CONTEXT
    )
    return dataclasses.replace(describe(fields), context_limit=scaled_from)


def describe_text_part(fields: Fields) -> ModelDescription:
    """The text part says by its `model_type` which of both it is."""
    kind = fields.text("model_type", "mistral")
    if kind == "mistral":
        return describe(Fields(fields.name, {**_DEFAULTS, **fields.values}))
    if kind == "ministral3":
        return describe_ministral3(fields)
    raise fields.error("text_config.model_type", f"must be 'mistral' or 'ministral3', is {shown(kind)}")


def _refuse_mixed_layers(fields: Fields) -> None:
    types = fields.get("layer_types")
    if types is not None and (not isinstance(types, list) or any(kind != "sliding_attention" for kind in types)):
        raise fields.error("layer_types", "must be all 'sliding_attention' for Mistral with a sliding_window")


_DEFAULTS = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096}
_MINISTRAL3_DEFAULTS = {
    "max_position_embeddings": 262_144,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    # Read where config.json has no `rope_parameters` either.
    "rope_scaling": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_KNOWS = frozenset({"sliding_window", "layer_types"})

MISTRAL = Family("MistralForCausalLM", _DEFAULTS, describe, knows=_KNOWS)
MINISTRAL3 = Family("Ministral3ForCausalLM", _MINISTRAL3_DEFAULTS, describe_ministral3, knows=_KNOWS)
MISTRAL3_OF_SEVERAL = Family(
    "Mistral3ForConditionalGeneration",
    # Both text parts' own fill what is absent, but for the one that `parse_config` reads itself.
    {"max_position_embeddings": 131_072, "tie_word_embeddings": True},
    describe_text_part,
    knows=_KNOWS,
    text_part=TextPart(
        "text_config",
        {
            "language_model.model.": "model.",
            "model.language_model.": "model.",
            "language_model.lm_head.": "lm_head.",
        },
        ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
        of_all=("tie_word_embeddings",),
        alone={
            "mistral": ("MistralForCausalLM", "mistral"),
            "ministral3": ("Ministral3ForCausalLM", "ministral3"),
        },
    ),
)
