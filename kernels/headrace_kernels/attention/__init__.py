"""Attention of a step's tokens over the paged KV cache.

The room has all that lies between a layer's projections: rotation, the cache's layout, copies
of blocks, attention.

paged                      the operation: reference, and which implementation takes which part of a
                           step
plan, shares, step         columns of numbers made on the host; the same as tensors on the device
decode, decode_kernels     few query tokens: splits of long contexts, merged by `merge`
prefill, gathered          chunks of prompts: through the block table, or from gathered tokens
prefill_sm90               both on Hopper GPUs
tiles, quantized           device functions that those share; a cache of 8 bits
transposed                 few query rows over a cache of 8 bits
cpu                        without a GPU
kv_cache, quantized_kv     what a cache holds where
rope, rope_frequencies, rope_kv    rotation, alone and with head norms and the cache's writing
"""
