"""What a token takes in the KV cache: the arithmetic of memory plan, model facts and step costs,
without torch.

How the numbers and scales lie is `headrace_kernels.attention.quantized_kv`'s; a test holds the two
together.
"""

from __future__ import annotations

from headrace_model_folder import ModelConfig

# fp32, one of each token and head.
_SCALE_BYTES = 4


def kv_token_bytes(model: ModelConfig, item_bytes: int, kv_dtype: str) -> int:
    """Bytes of one token's keys and values in all layers, scales included.

    Args:
        model: Sizes of its layers.
        item_bytes: Of a number of the model's type.
        kv_dtype: As `EngineConfig.kv_dtype`.
    """
    head = model.head_dim * item_bytes if kv_dtype == "auto" else model.head_dim + _SCALE_BYTES
    return 2 * model.num_layers * model.num_kv_heads * head
