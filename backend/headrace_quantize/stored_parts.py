"""Tensors that a folder keeps whole and that readers have in parts: projections of one input.

    linear_attn.in_proj_qkv.weight -> in_proj_q.weight, in_proj_k.weight, in_proj_v.weight

Owns their names. What is quantized and written is the folder's tensor, by the folder's name.
"""

from __future__ import annotations

from headrace_model_folder import ModelDescription


def stored_parts(model: ModelDescription) -> dict[str, tuple[str, ...]]:
    """Name of each tensor of a projection as the folder has it -> its parts, rows after rows."""
    found: dict[str, tuple[str, ...]] = {}
    for linear in model.linears:
        for name, _ in linear.tensors():
            stored = f"{linear.stored.name}.{name.rpartition('.')[2]}"
            found[stored] = (*found.get(stored, ()), name)
    return found
