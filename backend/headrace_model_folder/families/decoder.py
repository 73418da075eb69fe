"""What most families share: sizes with bounds, and the pre-norm layer with a gated MLP.

config.json states the sizes; the bounds keep absurd values out. Attention is grouped-query.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from headrace_model_folder.description import Attention, Embedding, Head, Layer, Linear, Mlp, ModelDescription, Norm
from headrace_model_folder.fields import Fields
from headrace_model_folder.rope_config import RopeConfig, read_rope, read_rotary_dim, refuse_partial_rotation

# Far above any model that exists; they keep a hostile file from making us build billions of names
# or overflow a size.
_MAX_LAYERS = 1024
_MAX_HEADS = 1024
_MAX_HEAD_DIM = 1024
MAX_WIDTH = 1 << 20
_MAX_VOCAB = 1 << 22
MAX_CONTEXT = 1 << 26


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a decoder whose layers are alike, in elements."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Between the MLP's projections.
    inner: int
    vocab_size: int
    norm_eps: float
    rope: RopeConfig
    # Of a head, from the first on: what is rotated.
    rotary_dim: int
    is_tied: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Switches:
    """What layers of one skeleton differ in."""

    # Biases of query, key and value; of attention's output; of the MLP's three projections.
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    # Norms over each head's query and key.
    head_norms: bool = False


def read_sizes(fields: Fields, rotates_parts: bool = False) -> Sizes:
    """Reads the sizes under the names that most families give them.

    Args:
        fields: The fields of config.json, defaults filled in.
        rotates_parts: Whether models of the family may rotate a part of each head.

    Raises InvalidModelFolder naming the field, the rule and the value.
    """
    num_heads = fields.integer("num_attention_heads", 1, _MAX_HEADS)
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    max_position = fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
    head_dim = _head_dim(fields, hidden_size, num_heads)
    if not rotates_parts:
        refuse_partial_rotation(fields)
    rotary_dim = read_rotary_dim(fields, head_dim)
    return Sizes(
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers", 1, _MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(fields, num_heads),
        head_dim=head_dim,
        inner=fields.integer("intermediate_size", 1, MAX_WIDTH),
        vocab_size=fields.integer("vocab_size", 1, _MAX_VOCAB),
        norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
        rope=read_rope(fields, max_position, rotary_dim),
        rotary_dim=rotary_dim,
        is_tied=fields.boolean("tie_word_embeddings", False),
    )


def read_window(fields: Fields) -> int | None:
    """Reads `sliding_window`; None if it is null or absent."""
    return None if fields.get("sliding_window") is None else fields.integer("sliding_window", 1, MAX_CONTEXT)


def decoder(
    sizes: Sizes, windows: Iterable[int | None], switches: Switches, prefix: str = "model."
) -> ModelDescription:
    """Returns a model of pre-norm layers under the names that most families give their tensors.

    Args:
        sizes: Sizes of the model.
        windows: The attention window of each layer; None: the layer sees all.
        switches: What the layers of the family have besides.
        prefix: What all names but the output layer's begin with.
    """
    layers = (_layer(f"{prefix}layers.{index}", sizes, window, switches) for index, window in enumerate(windows))
    return ModelDescription(
        embedding=Embedding(f"{prefix}embed_tokens", sizes.vocab_size, sizes.hidden_size),
        layers=tuple(layers),
        norm=Norm(f"{prefix}norm", sizes.hidden_size, sizes.norm_eps),
        head=Head("lm_head", sizes.is_tied),
    )


def _layer(name: str, sizes: Sizes, window: int | None, switches: Switches) -> Layer:
    return Layer(
        name,
        attention_norm=Norm(f"{name}.input_layernorm", sizes.hidden_size, sizes.norm_eps),
        attention=_attention(f"{name}.self_attn", sizes, window, switches),
        mlp_norm=Norm(f"{name}.post_attention_layernorm", sizes.hidden_size, sizes.norm_eps),
        mlp=_mlp(f"{name}.mlp", sizes, switches.mlp_bias),
    )


def _attention(name: str, sizes: Sizes, window: int | None, switches: Switches) -> Attention:
    hidden, head_dim = sizes.hidden_size, sizes.head_dim
    query, key = sizes.num_heads * head_dim, sizes.num_kv_heads * head_dim
    norms = (Norm(f"{name}.{part}", head_dim, sizes.norm_eps) for part in ("q_norm", "k_norm"))
    query_norm, key_norm = norms if switches.head_norms else (None, None)
    return Attention(
        sizes.num_heads,
        sizes.num_kv_heads,
        head_dim,
        window,
        sizes.rope,
        sizes.rotary_dim,
        Linear(f"{name}.q_proj", query, hidden, switches.qkv_bias),
        Linear(f"{name}.k_proj", key, hidden, switches.qkv_bias),
        Linear(f"{name}.v_proj", key, hidden, switches.qkv_bias),
        Linear(f"{name}.o_proj", hidden, query, switches.output_bias),
        query_norm,
        key_norm,
    )


def _mlp(name: str, sizes: Sizes, bias: bool) -> Mlp:
    hidden, inner = sizes.hidden_size, sizes.inner
    return Mlp(
        Linear(f"{name}.gate_proj", inner, hidden, bias),
        Linear(f"{name}.up_proj", inner, hidden, bias),
        Linear(f"{name}.down_proj", hidden, inner, bias),
    )


def _kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", 1, _MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads ({num_heads}), is {num_kv_heads}")
    return num_kv_heads


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"must be a multiple of num_attention_heads ({num_heads}), is {hidden_size}")
    head_dim = fields.integer("head_dim", 2, _MAX_HEAD_DIM, hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even, is {head_dim}")
    return head_dim
