"""`layer_types`: which layers see all that came before, and which a sliding window of it.

Owns the reading of the field. What a layer of a kind has besides its window is the family's.
"""

from __future__ import annotations

from headrace_model_folder.errors import shown
from headrace_model_folder.fields import Fields


def read_sliding(fields: Fields, num_layers: int) -> list[bool] | None:
    """Returns for each layer whether it has the sliding window; None if `layer_types` is absent.

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
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error("layer_types", f"must hold 'full_attention' or 'sliding_attention', has {shown(kind)}")
    return [kind == "sliding_attention" for kind in types]
