"""Bytes that a token takes in the KV cache, computed without torch.

Memory plan, model facts and step costs share this arithmetic.

How the numbers and scales lie is `headrace_kernels.attention.quantized_kv`'s; a test holds the two
together.
"""

from __future__ import annotations

from headrace_model_folder.description import Attention, ModelDescription

# fp32, one of each token and head.
_SCALE_BYTES = 4


def kv_token_bytes(model: ModelDescription, item_bytes: int, kv_dtype: str) -> int:
    """Bytes of one token's keys and values in all layers, scales included.

    Args:
        model: The whole model, or what one rank has of it.
        item_bytes: Bytes of one value of the model's dtype.
        kv_dtype: Dtype of the cache, by the names of `EngineConfig.kv_dtype`.
    """

    def head(attention: Attention) -> int:
        return attention.head_dim * item_bytes if kv_dtype == "auto" else attention.head_dim + _SCALE_BYTES

    return sum(2 * attention.num_kv_heads * head(attention) for attention in model.attentions)
