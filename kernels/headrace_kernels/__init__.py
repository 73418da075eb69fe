"""The operations of a decoder-only transformer over a paged KV cache.

Depends on torch alone (and on triton, where a GPU kernel exists).

One file per operation. In each: a plain PyTorch `*_reference`, which is the specification and the
oracle of every other implementation, and a function without suffix that callers use, which picks
the implementation for the device (`triton_runtime.uses_triton`). A Triton kernel stands below them,
or where it is long in a file beside it.

    attention         what lies between a layer's projections: rotation, cache, attention
    linear            products with weights, plain or quantized
    experts           products of tokens with the weights of their experts alone
    recurrence        linear attention: short convolution, gated delta rule
    weight_formats    what the bytes of a quantized weight mean
    sampling          from logits to tokens
    speculation       drafts looked up, stored and accepted
    collectives       all-reduce over GPUs
    hopper            what kernels in Gluon for sm_90 begin with: ring, barriers, stream-K
    here              operations of one file: `rms_norm`, `swiglu`, `embedding`, `step_inputs`,
                      `finite_rows`, `rounded_tokens` (tokens in 8 bits), `input_rounding` (how
                      a scheme rounds a product's inputs)

`quick_sources` has Triton find the kernels' sources quickly while all this is imported.

Rooms do not know each other, but for `weight_formats`, from which attention, linear and experts
take how bits are read, and `hopper`. Launch rules ask `card` what the GPU has, and short kernels
start early by `early_launch`. Functions take tensors and give tensors; nothing here knows models,
requests or configuration. Sums are fp32 whatever the storage.
"""
