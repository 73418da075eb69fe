"""Seed-OSS: Llama with biases on queries, keys and values, and a size of heads of its own."""

from __future__ import annotations

from headrace_model_folder.description import ModelDescription
from headrace_model_folder.families.decoder import Switches, decoder, read_sizes
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.fields import Fields


def describe(fields: Fields) -> ModelDescription:
    """Every layer sees the whole context."""
    sizes = read_sizes(fields)
    switches = Switches(
        qkv_bias=fields.boolean("attention_bias", True),
        output_bias=fields.boolean("attention_out_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )
    return decoder(sizes, [None] * sizes.num_layers, switches)


SEED_OSS = Family(
    "SeedOssForCausalLM",
    {"max_position_embeddings": 524_288, "num_key_value_heads": 8, "head_dim": 128},
    describe,
    knows=frozenset({"attention_bias", "attention_out_bias", "mlp_bias"}),
    gguf=GgufNaming("seed_oss", post_attention="post_attention_norm"),
)
