"""`layer_types`: which layers see all that came before, and which see or remember it otherwise.

Owns the reading of the field. What a layer of a kind has besides is the family's.
"""

from __future__ import annotations

from headrace_model_folder.errors import shown
from headrace_model_folder.fields import Fields

# What every family calls layers that see all.
FULL = "full_attention"


def read_sliding(fields: Fields, num_layers: int) -> list[bool] | None:
    """Returns for each layer whether it has the sliding window; None if `layer_types` is absent.

    Raises InvalidModelFolder as `read_other_kind` does.
    """
    return read_other_kind(fields, num_layers, "sliding_attention")


def read_other_kind(fields: Fields, num_layers: int, other: str) -> list[bool] | None:
    """Returns for each layer whether it is of the other kind; None if `layer_types` is absent.

    Args:
        fields: The fields of config.json.
        num_layers: Layers of the model.
        other: Name of the kind of layers that do not see all.

    Raises InvalidModelFolder for another number of entries, and for kinds that are not known.
    """
    types = fields.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.error(
            "layer_types", f"must be a list of num_hidden_layers ({num_layers}) entries, is {shown(types)}"
        )
    for kind in types:
        if kind not in (FULL, other):
            raise fields.error("layer_types", f"must hold {FULL!r} or {other!r}, has {shown(kind)}")
    return [kind == other for kind in types]
