"""Layers of decoder-only transformers.

Parameters with their sharding, and a forward pass made of `headrace_kernels` operations.

A layer is given its parts as `headrace_model_folder.description` describes them, and knows no
family. Every module that owns checkpoint weights derives from `ShardedModule` and says which rows
and columns of which tensor it keeps.
"""
