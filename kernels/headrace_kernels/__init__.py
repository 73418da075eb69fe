"""The operations of a decoder-only transformer over a paged KV cache.

Depends on torch alone (and on triton, where a GPU kernel exists).

One file per operation. In each: a plain PyTorch `*_reference`, which is the specification and the
oracle of every other implementation, and a function without suffix that callers use, which picks
the implementation for the device (`triton_runtime.uses_triton`). A Triton kernel stands below them,
or where it is long in a file beside it.

    attention    what lies between a layer's projections: rotation, cache, attention
    low_bit      weights of few bits, and products with them
    sampling     from logits to tokens
    sums         tensors of several GPUs, added up
    here         what every layer has: `linear` (few rows: `small_linear`), `rms_norm`, `swiglu`,
                 `embedding`; `step_inputs`; tokens in 8 bits (`rounded_tokens`)

Rooms do not know each other, but for how bits are read (`low_bit.numbers`). Launch rules ask `card`
what the device has. Functions take tensors and give tensors; nothing here knows models, requests or
configuration. Sums are fp32 whatever the storage.
"""
