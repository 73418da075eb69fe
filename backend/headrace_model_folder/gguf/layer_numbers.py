"""What GGUF files state for each layer or once for all: numbers, and whose layers have a window."""

from __future__ import annotations

from typing import Any

from headrace_model_folder.errors import shown
from headrace_model_folder.families.layer_types import FULL
from headrace_model_folder.fields import Fields

_LIMIT = 1 << 26
_SLIDING = "sliding_attention"


def numbers_of_layers(fields: Fields, key: str, num_layers: int, default: int | None = None) -> list[int]:
    """The number of each layer.

    Args:
        fields: The file's metadata.
        key: A key whose value is one number, or an array of one for each layer.
        num_layers: Layers of the file.
        default: The number where the file states none; None: it must.

    Raises:
        InvalidModelFolder: Another number of entries, or one that is no integer from 1 on.
    """
    stated = fields.get(key)
    if not isinstance(stated, list):
        return [fields.integer(key, 1, _LIMIT, default)] * num_layers
    if len(stated) != num_layers or any(type(entry) is not int or not 1 <= entry <= _LIMIT for entry in stated):
        raise fields.error(key, f"must be an integer from 1 on, or an array of {num_layers}, is {shown(stated)}")
    return stated


def layer_types(fields: Fields, name: str, values: dict[str, Any], usual: int | None = None) -> list[str]:
    """The kind of each layer, as config.json calls it.

    Args:
        fields: The file's metadata.
        name: Prefix of the family's keys.
        values: config.json's fields, as most families have them.
        usual: Every `usual`-th layer sees all, unless the file has a pattern; None: it must.

    Raises:
        InvalidModelFolder: No window, or no pattern for as many layers.
    """
    key, count = f"{name}.attention.sliding_window_pattern", values["num_hidden_layers"]
    if not values["sliding_window"]:
        raise fields.error(f"{name}.attention.sliding_window", "is missing or 0: layers of this architecture have one")
    stated = fields.get(key)
    if isinstance(stated, list):
        if len(stated) != count or any(type(entry) is not bool for entry in stated):
            raise fields.error(key, f"must be an array of {count} booleans or a period, is {shown(stated)}")
        return [_SLIDING if slides else FULL for slides in stated]
    period = fields.integer(key, 1, 1 << 20, usual)
    return [_SLIDING if (layer + 1) % period else FULL for layer in range(count)]
