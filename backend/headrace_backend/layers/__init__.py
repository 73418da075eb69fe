"""Layers of decoder-only transformers: parameters with their sharding, and a forward pass made of
`headrace_kernels` operations.

Every module that owns checkpoint weights derives from `ShardedModule` and says which rows and
columns of which part it keeps; the model gives the parts their checkpoint names. Layers know
neither configurations nor checkpoints.
"""
