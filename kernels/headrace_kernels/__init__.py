"""The operations of a decoder-only transformer over a paged KV cache. Depends on torch alone (and on triton, where a GPU kernel exists).

One file per operation. In each: a plain PyTorch `*_reference`, which is the specification and the oracle of every other implementation, and a function without
suffix that callers use, which picks the implementation for the device (`triton_runtime.uses_triton`). A Triton kernel stands below them, or where it is long in files of its own:

    sampling, penalties, logprobs    sampling_triton with truncation_triton, ordering_triton, philox_triton; penalties_triton; logprobs_triton
    small_linear                     small_linear_kernels
    low_bit_linear                   low_bit_row_kernels, low_bit_kernels, low_bit_wide_kernels, low_bit_warpgroup_kernels with low_bit_numbers; fp8_activations and int8_activations on rounded_tokens; restored_weights; the weights are quantized_weight's
    attention                        attention_decode, attention_prefill, attention_gathered, by attention_plan (host, numpy) and attention_step (device); attention_cpu

Launch rules ask `card` what the device has. Functions take tensors and give tensors; nothing here knows models, requests or
configuration. Sums are fp32 whatever the storage.
"""
