"""The operations of a decoder-only transformer over a paged KV cache. Depends on torch alone (and on triton, where a GPU kernel exists).

One file per operation. In each: a plain PyTorch `*_reference`, which is the specification and the oracle of every other implementation, and a function without
suffix that callers use, which picks the implementation for the device. Functions take tensors and give tensors; nothing here knows models, requests or
configuration. Sums are fp32 whatever the storage.
"""
