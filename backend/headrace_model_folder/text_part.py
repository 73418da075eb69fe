"""The text part of a model that sees or hears too: its fields of config.json, and its tensors.

Owns what is left out, and the names by which the rest of the room knows what stays. The other
parts' tensors are neither checked nor read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.safetensors_header import TensorRecord

# Fields that hold for the whole model, wherever they stand.
_QUANTIZATION = "quantization_config"
_OF_ALL = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", _QUANTIZATION)


@dataclasses.dataclass(frozen=True, slots=True)
class TextPart:
    """Place of the text part in a folder: a field of config.json, and beginnings of names."""

    # Field of config.json that holds the text part's fields.
    field: str
    # Beginning of a tensor's name in the folder -> in a folder of the text part alone.
    prefixes: Mapping[str, str]
    # Beginnings of the names of other parts' tensors.
    others: tuple[str, ...]
    # Further fields that hold for the whole model if they stand beside the parts' fields.
    of_all: tuple[str, ...] = ()
    # `model_type` of the text part -> architecture and `model_type` of a folder of the text alone,
    # where these are not named after the whole's; the first counts where none is stated.
    alone: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The text part's fields of config.json, with those that hold for the whole model.

        Raises InvalidModelFolder if there are none.
        """
        own = config.get(self.field)
        if not isinstance(own, dict):
            raise InvalidModelFolder(f"config.json: {self.field} must be an object, is {shown(own)}")
        of_all = {
            name: config[name] for name in (*_OF_ALL, *self.of_all, "architectures") if config.get(name) is not None
        }
        if _QUANTIZATION in of_all:
            try:
                of_all[_QUANTIZATION] = self._renamed(of_all[_QUANTIZATION])
            except RecursionError:
                raise InvalidModelFolder(f"config.json: {_QUANTIZATION} is nested too deeply") from None
        return {**own, **of_all}

    def tensors(self, found: Mapping[str, TensorRecord]) -> dict[str, TensorRecord]:
        """The text part's tensors by the names of a folder that has nothing else.

        Raises InvalidModelFolder if a tensor is there under two names.
        """
        kept: dict[str, TensorRecord] = {}
        for name, record in found.items():
            if name.startswith(self.others):
                continue
            own = self.own_name(name)
            if own in kept:
                raise InvalidModelFolder(f"{record.file}: tensor {shown(name)} is there twice, as {shown(own)}")
            kept[own] = record
        return kept

    def _renamed(self, value: Any) -> Any:
        """What a quantization says, with layers and patterns by the names of `tensors`."""
        if isinstance(value, dict):
            return {self._renamed(key): self._renamed(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._renamed(entry) for entry in value]
        if not isinstance(value, str):
            return value
        for theirs, ours in self.prefixes.items():
            # Patterns have it anywhere, with dots as they are or escaped.
            for name, own in ((theirs, ours), (re.escape(theirs), re.escape(ours))):
                value = value.replace(name, own)
        return value

    def own_name(self, name: str) -> str:
        """A tensor's name in a folder that has nothing else."""
        for theirs, ours in self.prefixes.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name
