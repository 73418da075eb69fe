"""SmolLM3: Llama, some layers of which do not rotate queries and keys.

Those layers know no positions but through the others. They alone may have a sliding window.
"""

from __future__ import annotations

import dataclasses

from headrace_model_folder.description import ModelDescription
from headrace_model_folder.errors import shown
from headrace_model_folder.families.decoder import Switches, decoder, read_sizes, read_window
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.families.layer_types import read_sliding
from headrace_model_folder.fields import Fields
from headrace_model_folder.rope_config import NO_ROPE


def describe(fields: Fields) -> ModelDescription:
    """Every layer sees the whole context, unless `use_sliding_window` says otherwise."""
    sizes, bias = read_sizes(fields), fields.boolean("attention_bias", False)
    rotating = _rotating(fields, sizes.num_layers)
    switches = Switches(bias, bias, fields.boolean("mlp_bias", False))
    model = decoder(sizes, _windows(fields, rotating), switches)
    layers = (
        layer if rotates else layer.with_rope(NO_ROPE) for layer, rotates in zip(model.layers, rotating, strict=True)
    )
    return dataclasses.replace(model, layers=tuple(layers))


def _rotating(fields: Fields, num_layers: int) -> list[bool]:
    """For each layer whether it rotates: 1 in `no_rope_layers`, or by the interval."""
    flags = fields.get("no_rope_layers")
    if flags is None:
        interval = fields.integer("no_rope_layer_interval", 1, 1 << 20)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise fields.error(
            "no_rope_layers",
            f"must be a list of 0 or 1 for each of num_hidden_layers ({num_layers}), is {shown(flags)}",
        )
    return [flag == 1 for flag in flags[:num_layers]]


def _windows(fields: Fields, rotating: list[bool]) -> list[int | None]:
    window, stated = read_window(fields), read_sliding(fields, len(rotating))
    if not fields.boolean("use_sliding_window", False):
        if window is not None and stated is not None and any(stated):
            raise fields.error("layer_types", "must be all 'full_attention' where use_sliding_window is false")
        window = None
    sliding = stated or [not rotates for rotates in rotating]
    return [window if is_sliding else None for is_sliding in sliding]


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
    describe,
    knows=frozenset(
        {"attention_bias", "mlp_bias", "sliding_window", "layer_types", "no_rope_layers", "no_rope_layer_interval"}
    ),
    gguf=GgufNaming("smollm3", alternates=True),
)
