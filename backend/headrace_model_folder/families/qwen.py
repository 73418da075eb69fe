"""Qwen2, Qwen2.5 and Qwen3 (dense).

Qwen2 has biases on queries, keys and values; Qwen3 has an RMS norm on every head's query and key
instead, and a head_dim of its own. Layers of both may have a sliding window. Of Qwen3-VL the text
part is read.
"""

from __future__ import annotations

from headrace_model_folder.description import ModelDescription
from headrace_model_folder.families.decoder import Switches, decoder, read_sizes, read_window
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.families.layer_types import read_sliding
from headrace_model_folder.fields import Fields
from headrace_model_folder.text_part import TextPart

_DEFAULTS = {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096}


def describe_qwen2(fields: Fields) -> ModelDescription:
    """Biases on queries, keys and values only."""
    sizes = read_sizes(fields)
    return decoder(sizes, _windows(fields, sizes.num_layers), Switches(qkv_bias=True))


def describe_qwen3(fields: Fields) -> ModelDescription:
    """Norms on queries and keys; variants may have biases in attention."""
    sizes, bias = read_sizes(fields), fields.boolean("attention_bias", False)
    return decoder(sizes, _windows(fields, sizes.num_layers), Switches(bias, bias, head_norms=True))


def describe_qwen3_vl(fields: Fields) -> ModelDescription:
    """Qwen3's layers, none of which has a window."""
    if fields.boolean("use_sliding_window", False) and fields.get("sliding_window") is not None:
        raise fields.error("use_sliding_window", "must be false: this architecture's text part has no window")
    return describe_qwen3(fields)


def _windows(fields: Fields, num_layers: int) -> list[int | None]:
    """Each layer's window, by `layer_types` or from `max_window_layers` on."""
    if not fields.boolean("use_sliding_window", False) or (window := read_window(fields)) is None:
        return [None] * num_layers
    sliding = read_sliding(fields, num_layers)
    if sliding is None:
        first = fields.integer("max_window_layers", 0, 1 << 30, 28)
        sliding = [layer >= first for layer in range(num_layers)]
    return [window if is_sliding else None for is_sliding in sliding]


_TEXT_PART = TextPart(
    "text_config",
    {"model.language_model.": "model."},
    ("model.visual.",),
    of_all=("tie_word_embeddings",),
    alone={"qwen3_vl_text": ("Qwen3ForCausalLM", "qwen3")},
)
# Qwen2 has its biases whatever `attention_bias` says, as in transformers.
_KNOWS = frozenset({"sliding_window", "layer_types", "attention_bias"})

QWEN2 = Family("Qwen2ForCausalLM", _DEFAULTS, describe_qwen2, knows=_KNOWS, gguf=GgufNaming("qwen2"))
QWEN3 = Family(
    "Qwen3ForCausalLM", {**_DEFAULTS, "head_dim": 128}, describe_qwen3, knows=_KNOWS, gguf=GgufNaming("qwen3")
)
# Places in images have three numbers, which are alike in a text.
QWEN3_VL = Family(
    "Qwen3VLForConditionalGeneration",
    {"max_position_embeddings": 128_000, "num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500_000.0},
    describe_qwen3_vl,
    knows=_KNOWS,
    text_part=_TEXT_PART,
)
